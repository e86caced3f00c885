//! Computes the CDI spec and the devices of an allocated claim. Pure.

use super::slice::{MEMORY, QUOTA, SM};
use super::{DRIVER, Gpu, Injection, Node, cdi};
use crate::kubernetes::{DOMAIN, kubelet, run_of};
use gshare_core::wire::DaemonWait;
use gshare_core::{Bytes, Quota, QuotaRange, ResourceSpec, ServiceClass, SmShare};
use gshare_openfaas::kubernetes::injection::{File, HOOK, SHARE};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim, ResourceClaimSpec};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Why a claim is not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct BadField {
    /// Path within the claim, or within the `ResourceClaimSpec` for [`check`].
    pub field: String,
    /// The value with the bound that it breaks.
    pub reason: String,
}

fn bad(field: impl Into<String>, reason: impl Into<String>) -> BadField {
    BadField { field: field.into(), reason: reason.into() }
}

fn several(field: &str, count: usize) -> BadField {
    bad(field, format!("{count} shares in one claim: need one, with a claim for each share"))
}

/// Options of a claim or a `DeviceClass` for its shares, beyond their size.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ShareOptions {
    api_version: String,
    kind: String,
    /// Most GPU time it may have when others leave it, in per cent. As much as is guaranteed by default.
    quota_limit_percent: Option<u16>,
    /// `slo-sensitive[:PERCENT]` or `best-effort`.
    class: Option<String>,
    /// `open` or `closed`.
    on_daemon_loss: Option<String>,
    /// How long launches and allocations wait for a daemon that is gone or says nothing: whole `ms` or `s`.
    daemon_wait: Option<String>,
}

/// The UID of a claim is part of a file's name.
///
/// # Errors
/// Names the field.
pub fn check_uid(uid: &str) -> Result<(), BadField> {
    let ok = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if (1..=63).contains(&uid.len()) && uid.bytes().all(ok) && !uid.starts_with('-') && !uid.ends_with('-') {
        return Ok(());
    }
    Err(bad("metadata.uid", format!("`{uid}`: need 1 to 63 of a-z, A-Z, 0-9 and -")))
}

/// The CDI spec of an allocated claim, with the changes to its containers.
///
/// # Errors
/// When the claim cannot be granted as it stands.
pub fn prepare(node: &Node, uid: &str, claim: &ResourceClaim) -> Result<cdi::Spec, BadField> {
    check_uid(uid)?;
    let found = claim.metadata.uid.as_deref().unwrap_or_default();
    if found != uid {
        return Err(bad("metadata.uid", format!("the claim has {found}, the kubelet asks for {uid}")));
    }
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let missing = || bad("status.allocation", "missing: the claim is not allocated");
    let devices = allocation.ok_or_else(missing)?.devices.as_ref();
    let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
    let here: Vec<_> =
        results.iter().enumerate().filter(|(_, r)| r.driver == DRIVER && r.pool == node.name).collect();
    let (all, pool) = ("status.allocation.devices.results", &node.name);
    let [(index, result)] = here[..] else {
        return Err(match here.len() {
            0 => bad(all, format!("none is of driver {DRIVER} and pool {pool}")),
            count => several(all, count),
        });
    };
    let field = format!("{all}[{index}]");
    if result.admin_access == Some(true) {
        return Err(bad(format!("{field}.adminAccess"), "true: need a share"));
    }
    let unknown = || bad(format!("{field}.device"), format!("{pool} has no `{}`", result.device));
    let gpu = node.gpus.iter().find(|gpu| gpu.name() == result.device).ok_or_else(unknown)?;
    let mut options = ShareOptions::default();
    for (index, config) in devices.iter().flat_map(|devices| devices.config.iter().flatten()).enumerate() {
        let Some(opaque) = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        // A subrequest is named `request/subrequest`, and an option for the request is for it as well.
        let names =
            |name: &String| *name == result.request || result.request.starts_with(&format!("{name}/"));
        let requests = config.requests.as_deref().unwrap_or_default();
        if requests.is_empty() || requests.iter().any(names) {
            // Options of the class come first.
            let field = format!("status.allocation.devices.config[{index}].opaque.parameters");
            options = read_options(&opaque.parameters.0, options).map_err(|reason| bad(field, reason))?;
        }
    }
    let share = share(&field, gpu, result, &options)?;
    Ok(spec(node, uid, claim, result, gpu, &share, &options))
}

/// `later` over `earlier`, field by field.
fn read_options(later: &serde_json::Value, earlier: ShareOptions) -> Result<ShareOptions, String> {
    let later: ShareOptions = serde_path_to_error::deserialize(later).map_err(|error| error.to_string())?;
    let version = format!("{DOMAIN}/v1");
    if (later.api_version.as_str(), later.kind.as_str()) != (version.as_str(), "ShareOptions") {
        return Err(format!(
            "apiVersion, kind: `{}`, `{}`: need `{version}`, `ShareOptions`",
            later.api_version, later.kind
        ));
    }
    if let Some(class) = &later.class {
        class.parse::<ServiceClass>().map_err(|error| format!("class: `{class}`: {error}"))?;
    }
    if let Some(percent) = later.quota_limit_percent.filter(|percent| !(1..=100).contains(percent)) {
        return Err(format!("quotaLimitPercent: {percent}: need 1 to 100"));
    }
    if let Some(policy) = later.on_daemon_loss.as_deref().filter(|p| !["open", "closed"].contains(p)) {
        return Err(format!("onDaemonLoss: `{policy}`: need open or closed"));
    }
    if let Some(wait) = later.daemon_wait.as_deref().filter(|wait| !is_daemon_wait(wait)) {
        let (least, most) = (DaemonWait::SHORTEST, DaemonWait::LONGEST);
        return Err(format!("daemonWait: `{wait}`: need {least} to {most}, in whole ms or s"));
    }
    Ok(ShareOptions {
        quota_limit_percent: later.quota_limit_percent.or(earlier.quota_limit_percent),
        class: later.class.or(earlier.class),
        on_daemon_loss: later.on_daemon_loss.or(earlier.on_daemon_loss),
        daemon_wait: later.daemon_wait.or(earlier.daemon_wait),
        ..later
    })
}

/// In whole milliseconds or seconds: the admission policy can tell the bounds of nothing else.
fn is_daemon_wait(text: &str) -> bool {
    let number = text.strip_suffix("ms").or_else(|| text.strip_suffix('s'));
    let whole = number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()));
    whole && text.parse::<DaemonWait>().is_ok()
}

/// Whether a claim can be granted by some GPU, as far as it says by itself: finds the faults that [`prepare`] would refuse
/// on every node. The admission policy of the manifests says the same when a claim or a template is made.
///
/// # Errors
/// Names the field.
pub fn check(spec: &ResourceClaimSpec) -> Result<(), BadField> {
    let devices = spec.devices.clone().unwrap_or_default();
    let requests = devices.requests.unwrap_or_default();
    let shares = requests.iter().enumerate().filter_map(|(index, request)| {
        let exact = request.exactly.as_ref().filter(|exact| exact.device_class_name == DRIVER)?;
        Some((format!("devices.requests[{index}].exactly"), request.name.as_str(), exact))
    });
    let shares: Vec<_> = shares.collect();
    let mut quotas = BTreeMap::new();
    for (field, name, exact) in &shares {
        if exact.admin_access == Some(true) {
            return Err(bad(format!("{field}.adminAccess"), "true: need a share"));
        }
        if exact.count.is_some_and(|count| count != 1) {
            return Err(bad(format!("{field}.count"), "need 1, with a claim for each share"));
        }
        let asked = exact.capacity.iter().flat_map(|capacity| capacity.requests.iter().flatten());
        for (key, quantity) in asked {
            // As the scheduler takes it: up to the next whole number.
            let thousandths = || Some(quantity.0.strip_suffix('m')?.parse::<u64>().ok()?.div_ceil(1000));
            let number = whole(&quantity.0).or_else(thousandths);
            let most = if key == MEMORY { u64::MAX } else { 100 };
            let Some(number) = number.filter(|number| (1..=most).contains(number)) else {
                let need = if key == MEMORY { "1 or more" } else { "1 to 100" };
                let field = format!("{field}.capacity.requests[{key}]");
                return Err(bad(field, format!("`{}`: need {need}", quantity.0)));
            };
            if key == QUOTA {
                quotas.insert(*name, number);
            }
        }
    }
    if shares.len() > 1 {
        return Err(several("devices.requests", shares.len()));
    }
    for (index, config) in devices.config.iter().flatten().enumerate() {
        let Some(opaque) = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        let field = format!("devices.config[{index}].opaque.parameters");
        let options = read_options(&opaque.parameters.0, ShareOptions::default())
            .map_err(|reason| bad(&field, reason))?;
        let names = config.requests.as_deref().unwrap_or_default();
        for (name, quota) in &quotas {
            let limit = options.quota_limit_percent.map(u64::from);
            let meant = names.is_empty() || names.iter().any(|meant| meant == name);
            if let Some(limit) = limit.filter(|limit| meant && limit < quota) {
                let reason = format!("{limit}: need {quota} or more, which the claim asks for");
                return Err(bad(format!("{field}.quotaLimitPercent"), reason));
            }
        }
    }
    Ok(())
}

fn share(
    field: &str,
    gpu: &Gpu,
    result: &DeviceRequestAllocationResult,
    options: &ShareOptions,
) -> Result<ResourceSpec, BadField> {
    let capacity = |key: &'static str, most: u64| {
        let text = result.consumed_capacity.as_ref().and_then(|all| all.get(key)).map(|q| q.0.as_str());
        let number = text.and_then(whole).filter(|number| (1..=most).contains(number));
        number.ok_or_else(|| {
            let found = text.map_or("missing".into(), |text| format!("`{text}`"));
            bad(format!("{field}.consumedCapacity[{key}]"), format!("{found}: need 1 to {most}"))
        })
    };
    let percent = |key| capacity(key, 100).map(|percent| u16::try_from(percent).unwrap_or(100));
    let (sm, request) = (percent(SM)?, percent(QUOTA)?);
    let memory = Bytes(capacity(MEMORY, gpu.memory.get())?);
    let limit = options.quota_limit_percent.unwrap_or(request);
    // All three are at most 100.
    let quota = |percent| Quota::from_percent(percent).unwrap_or(Quota::WHOLE);
    let sm = SmShare::from_percent(sm).unwrap_or(SmShare::WHOLE);
    QuotaRange::new(quota(request), quota(limit))
        .and_then(|quota| ResourceSpec::new(quota, sm, Some(memory)))
        .map_err(|error| bad(field, error.to_string()))
}

fn spec(
    node: &Node,
    uid: &str,
    claim: &ResourceClaim,
    result: &DeviceRequestAllocationResult,
    gpu: &Gpu,
    share: &ResourceSpec,
    options: &ShareOptions,
) -> cdi::Spec {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let full = format!("{namespace}/{name}");
    let [told, mps] = node.injected.environment(&full, run_of(uid, &full), share);
    let told = told.into_iter().chain(mps);
    let mut env: Vec<_> = told.map(|(name, value)| format!("{name}={value}")).collect();
    env.extend(options.class.iter().map(|class| format!("GSHARE_CLASS={class}")));
    env.extend(options.on_daemon_loss.iter().map(|policy| format!("GSHARE_ON_DAEMON_LOSS={policy}")));
    env.extend(options.daemon_wait.iter().map(|wait| format!("GSHARE_DAEMON_WAIT={wait}")));
    if node.injected.injection == Injection::Environment {
        env.push(format!("LD_PRELOAD={HOOK}"));
    }
    let mut files = node.injected.files();
    files.insert(1, File::of("share", cdi::share_file(&node.injected.hook, uid), SHARE));
    let mounts = files.iter().map(Into::into).collect();
    let kind = format!("{DRIVER}/{}", cdi::CLASS);
    let gpu = node.gpu_kind.as_ref().map(|kind| format!("{kind}={} ", gpu.uuid)).unwrap_or_default();
    let notes = [
        ("claim", Some(full)),
        ("uid", Some(uid.to_owned())),
        ("request", Some(result.request.clone())),
        ("pool", Some(result.pool.clone())),
        ("device", Some(result.device.clone())),
        ("share-id", result.share_id.clone()),
        ("cdi-devices", Some(format!("{gpu}{kind}={uid}"))),
    ];
    let note = |(key, value): (&str, Option<String>)| Some((format!("{DOMAIN}/{key}"), value?));
    let annotations = notes.into_iter().filter_map(note).collect();
    cdi::Spec::of(kind, uid, cdi::Edits { env, mounts }, annotations)
}

/// The answer to the kubelet about a prepared claim. None unless the spec is this driver's spec for the claim.
pub fn answer(uid: &str, spec: &cdi::Spec) -> Option<kubelet::Device> {
    if spec.note("uid")? != uid {
        return None;
    }
    let request = spec.note("request")?;
    // The kubelet knows a subrequest by its request.
    let request = request.split_once('/').map_or(request, |(request, _)| request);
    Some(kubelet::Device {
        request_names: vec![request.to_owned()],
        pool_name: spec.note("pool")?.to_owned(),
        device_name: spec.note("device")?.to_owned(),
        cdi_device_ids: spec.note("cdi-devices")?.split(' ').map(str::to_owned).collect(),
        share_id: spec.note("share-id").map(str::to_owned),
    })
}

/// A quantity of Kubernetes that is a whole number: `24`, `1Gi`, `500M`, `2e9`, `3000m`.
pub fn whole(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let power = |base: u64, units: &[&str]| {
        (0..).zip(units).find(|(_, unit)| **unit == suffix).map(|(power, _)| base.pow(power))
    };
    let exponent = || 10_u64.checked_pow(suffix.strip_prefix(['e', 'E'])?.parse().ok()?);
    if suffix == "m" {
        return number.is_multiple_of(1000).then_some(number / 1000);
    }
    let factor = power(1000, &["", "k", "M", "G", "T", "P", "E"])
        .or_else(|| power(1024, &["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]))
        .or_else(exponent)?;
    number.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{UID, claim, node};
    use super::*;
    use serde_json::json;

    #[test]
    fn quantities_are_whole_numbers_in_any_of_their_forms() {
        for (text, number) in [
            ("24", Some(24)),
            ("3000m", Some(3)),
            ("1500m", None),
            ("1Gi", Some(1 << 30)),
            ("500M", Some(500_000_000)),
            ("2e9", Some(2_000_000_000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("16Ei", None),
            ("-1", None),
            ("", None),
            ("Gi", None),
            ("1.5Gi", None),
            ("1 Gi", None),
            ("1e99999999999", None),
        ] {
            assert_eq!(whole(text), number, "{text}");
        }
    }

    #[test]
    fn an_allocation_becomes_an_environment_and_mounts() {
        let spec = prepare(&node(), UID, &claim()).unwrap();
        let edits = &spec.devices[0].container_edits;
        let has = |text: &str| edits.env.iter().any(|env| env == text);
        assert!(has("GSHARE_QUOTA=30%:80%") && has("GSHARE_SM=24%"), "{:?}", edits.env);
        assert!(has("GSHARE_MEM=1073741824") && has("GSHARE_NAME=team/rnnt"), "{:?}", edits.env);
        assert!(!edits.env.iter().any(|env| env.starts_with("LD_PRELOAD")));
        let preload = edits.mounts.iter().find(|m| m.container_path == "/etc/ld.so.preload").unwrap();
        assert!(preload.options.contains(&"ro".into()));
        let share = edits.mounts.iter().find(|m| m.container_path == SHARE).unwrap();
        assert_eq!(share.host_path, format!("/opt/gshare/shares/{UID}.env"));
        let device = answer(UID, &spec).unwrap();
        assert_eq!(
            device.cdi_device_ids,
            ["nvidia.com/gpu=GPU-b".into(), format!("gpu.gshare.io/share={UID}")]
        );
        assert_eq!((device.device_name.as_str(), device.share_id.as_deref()), ("gpu-1", Some("s-1")));
        assert_eq!(answer("another", &spec), None);
    }

    #[test]
    fn mps_and_the_environment_are_injected_where_they_are_asked_for() {
        let mut node = node();
        node.injected.injection = Injection::Environment;
        node.injected.mps = Some(("/run/mps".into(), "/run/mps-shm".into()));
        node.gpu_kind = None;
        let spec = prepare(&node, UID, &claim()).unwrap();
        let edits = &spec.devices[0].container_edits;
        let has = |text: &str| edits.env.iter().any(|env| env == text);
        assert!(has("LD_PRELOAD=/usr/lib/gshare/libgshare_hook.so"));
        assert!(has("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=24"));
        let mounted: Vec<_> = edits.mounts.iter().map(|m| m.container_path.as_str()).collect();
        assert_eq!(mounted, [HOOK, SHARE, "/run/gshare", "/tmp/nvidia-mps", "/dev/shm"]);
        assert_eq!(answer(UID, &spec).unwrap().cdi_device_ids.len(), 1);
    }

    #[test]
    fn what_cannot_be_granted_is_refused_by_the_name_of_its_field() {
        let good = serde_json::to_value(claim()).unwrap();
        let result = "/status/allocation/devices/results/0";
        let options = "/status/allocation/devices/config/0/opaque/parameters";
        let cases = [
            ("/metadata/uid", json!("f00"), "metadata.uid"),
            ("/status/allocation", json!(null), "status.allocation: missing"),
            ("/status/allocation/devices/results", json!([]), "none is of driver gpu.gshare.io"),
            (&format!("{result}/pool"), json!("n2"), "pool n1"),
            (&format!("{result}/driver"), json!("gpu.nvidia.com"), "none is of driver"),
            (&format!("{result}/device"), json!("gpu-9"), "results[0].device: n1 has no `gpu-9`"),
            (&format!("{result}/adminAccess"), json!(true), "adminAccess"),
            (&format!("{result}/consumedCapacity"), json!({"sm": "24"}), "consumedCapacity[quota]: missing"),
            (
                &format!("{result}/consumedCapacity/sm"),
                json!("101"),
                "consumedCapacity[sm]: `101`: need 1 to 100",
            ),
            (&format!("{result}/consumedCapacity/sm"), json!("500m"), "consumedCapacity[sm]: `500m`"),
            (&format!("{result}/consumedCapacity/quota"), json!("0"), "consumedCapacity[quota]: `0`"),
            (&format!("{result}/consumedCapacity/memory"), json!("1Ti"), "consumedCapacity[memory]: `1Ti`"),
            (&format!("{options}/quotaLimitPercent"), json!(20), "quota request 30% is larger"),
            (
                &format!("{options}/quotaLimitPercent"),
                json!(101),
                "config[0].opaque.parameters: quotaLimitPercent",
            ),
            (&format!("{options}/quotaLimitPercent"), json!("x"), "quotaLimitPercent"),
            (&format!("{options}/kind"), json!("Other"), "apiVersion, kind"),
            (&format!("{options}/class"), json!("vip"), "class: `vip`"),
            (&format!("{options}/onDaemonLoss"), json!("panic"), "onDaemonLoss"),
            (
                &format!("{options}/daemonWait"),
                json!("601s"),
                "daemonWait: `601s`: need 200ms to 600s, in whole ms or s",
            ),
            (&format!("{options}/colour"), json!("red"), "colour"),
        ];
        for (path, value, expected) in cases {
            let mut bad = good.clone();
            let (parent, key) = path.rsplit_once('/').unwrap();
            bad.pointer_mut(parent).unwrap()[key] = value;
            let bad: ResourceClaim = serde_json::from_value(bad).unwrap();
            let error = prepare(&node(), UID, &bad).unwrap_err().to_string();
            assert!(error.contains(expected), "{path}: {error}");
        }
        let mut two = claim();
        let devices = two.status.as_mut().unwrap().allocation.as_mut().unwrap().devices.as_mut().unwrap();
        let results = devices.results.as_mut().unwrap();
        results.push(results[0].clone());
        let refused = |uid: &str, claim: &ResourceClaim| prepare(&node(), uid, claim).unwrap_err();
        assert_eq!(refused(UID, &two), several("status.allocation.devices.results", 2));
        for uid in ["", "../../etc/passwd", "a/b", "-a", "a_b", &"a".repeat(64)] {
            let why = refused(uid, &claim());
            assert!(why.reason.starts_with(&format!("`{uid}`: need 1 to 63 of")), "{why}");
        }
    }

    #[test]
    fn a_class_speaks_first_the_claim_after_it_and_only_to_the_requests_it_names() {
        let options = |requests: &[&str], limit: u32, class: Option<&str>| {
            let mut parameters =
                json!({"apiVersion": "gshare.io/v1", "kind": "ShareOptions", "quotaLimitPercent": limit});
            if let Some(class) = class {
                (parameters["class"], parameters["daemonWait"]) = (class.into(), "2s".into());
            }
            json!({"source": "FromClaim", "requests": requests,
                "opaque": {"driver": DRIVER, "parameters": parameters}})
        };
        let mut value = serde_json::to_value(claim()).unwrap();
        value["status"]["allocation"]["devices"]["config"] = json!([
            options(&[], 50, Some("best-effort")),
            options(&["share"], 60, None),
            options(&["other"], 99, None),
            {"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": {"sharing": 1}}},
        ]);
        let claim = serde_json::from_value(value).unwrap();
        let env = prepare(&node(), UID, &claim).unwrap().devices.remove(0).container_edits.env;
        assert!(env.contains(&"GSHARE_QUOTA=30%:60%".into()), "{env:?}");
        assert!(env.contains(&"GSHARE_CLASS=best-effort".into()), "{env:?}");
        assert!(env.contains(&"GSHARE_DAEMON_WAIT=2s".into()), "{env:?}");
    }
}
