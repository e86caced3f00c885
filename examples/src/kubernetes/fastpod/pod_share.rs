//! The GPU share of a FaSTPod's pods, from its annotations and, for missing values, from a profile. Pure.

use crate::SHARE_PREFIXES;
use crate::kubernetes::DOMAIN;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Duration, QuotaRange, ResourceSpec};
use gshare_sched::pack::Demand;
use std::collections::BTreeMap;

/// Profiles by the name that the annotation `gshare.io/profile` gives.
pub type Profiles = BTreeMap<String, ProfileTable>;

/// The share that annotations ask for.
///
/// With `gshare.io/profile`, a missing partition or quota comes from the profile's most efficient point per area of a GPU
/// (FaST-GShare, Algorithm 1, `p_eff`). Only points that match the given values count and, with `gshare.io/slo`, only
/// points with a 95th percentile within it. Without its own limit such a pod's limit is its request, as it was measured
/// (section 3.3.2).
///
/// # Errors
/// Names the annotation.
pub fn share(annotations: &BTreeMap<String, String>, profiles: &Profiles) -> Result<ResourceSpec, String> {
    let of_share = |key: &str| SHARE_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
    let given: Vec<_> = annotations
        .iter()
        .filter(|(key, _)| of_share(key))
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let spec = ResourceSpec::from_annotations(given.iter().copied()).map_err(|error| error.to_string())?;
    let is_given = |name: &str| given.iter().any(|(key, _)| key.ends_with(name));
    let (profile, slo) = (format!("{DOMAIN}/profile"), format!("{DOMAIN}/slo"));
    let Some(name) = annotations.get(&profile) else {
        if annotations.contains_key(&slo) {
            return Err(format!("{slo}: without {profile}: need one, since latencies are known from it"));
        }
        if spec.quota().request().is_zero() {
            return Err(format!(
                "quota_request: is 0 or missing: need more, since a pod is placed by it, or {profile}"
            ));
        }
        return Ok(spec);
    };
    let table = profiles.get(name).ok_or_else(|| {
        let known: Vec<_> = profiles.keys().map(String::as_str).collect();
        format!("{profile}: `{name}`: not one of [{}]", known.join(", "))
    })?;
    let most: Option<Duration> = match annotations.get(&slo) {
        Some(text) => Some(text.parse().map_err(|error| format!("{slo}: {error}"))?),
        None => None,
    };
    let allowed = |point: &ProfilePoint| {
        (!is_given("sm_partition") || point.sm == spec.sm())
            && (!is_given("quota_request") || point.quota == spec.quota().request())
            && (!is_given("quota_limit") || point.quota <= spec.quota().limit())
            && most.is_none_or(|most| point.p95 <= most)
    };
    let point = table.most_effective(allowed).ok_or_else(|| {
        let slo = most.map_or(String::new(), |most| format!(" with a 95th percentile of at most {most}"));
        format!("{profile}: `{name}`: no point of it is at the shares given{slo}")
    })?;
    let limit = if is_given("quota_limit") { spec.quota().limit() } else { point.quota };
    let quota = QuotaRange::new(point.quota, limit).map_err(|error| error.to_string())?;
    let share = ResourceSpec::new(quota, point.sm, None).map_err(|error| error.to_string())?;
    Ok(spec.memory_range().map_or(share, |memory| share.with_memory(memory)))
}

/// The share of a pod as annotations, which [`share`] reads back.
pub fn annotations(share: &ResourceSpec) -> BTreeMap<String, String> {
    let (quota, prefix) = (share.quota(), SHARE_PREFIXES[0]);
    let mut all = vec![
        ("sm_partition", share.sm().to_string()),
        ("quota_request", quota.request().to_string()),
        ("quota_limit", quota.limit().to_string()),
    ];
    all.extend(share.memory_range().map(|memory| ("gpu_mem", memory.to_string())));
    all.into_iter().map(|(name, value)| (format!("{prefix}{name}"), value)).collect()
}

/// The demand of a share for the packer.
pub fn demand(share: &ResourceSpec) -> Demand {
    let demand = Demand::new(share.quota().request(), share.sm());
    share.guaranteed().or(share.memory()).map_or(demand, |memory| demand.with_memory(memory))
}

/// For people: `30%:80% of the time, 12% of the SMs, 1 GiB`.
pub fn describe(share: &ResourceSpec) -> String {
    let most = share.memory().map_or_else(|| "the device".to_owned(), |memory| memory.to_string());
    let memory = match (share.guaranteed(), share.memory()) {
        (Some(guaranteed), _) => format!(", {guaranteed}:{most}"),
        (None, Some(_)) => format!(", {most}"),
        (None, None) => String::new(),
    };
    format!("{} of the time, {} of the SMs{memory}", share.quota(), share.sm())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{Bytes, Quota, SmShare};
    use proptest::prelude::*;

    fn ask(pairs: &[(&str, &str)]) -> Result<ResourceSpec, String> {
        let point = |sm, quota, rate: f64, p95| {
            let p95 = Duration::from_millis(p95);
            let (sm, quota) = (SmShare::from_percent(sm).unwrap(), Quota::from_percent(quota).unwrap());
            ProfilePoint::measured(sm, quota, 1, rate, p95, p95).unwrap()
        };
        // Requests per second and area: 11.1, 9, 6.25 and 4 thousandths.
        let points = vec![
            point(12, 30, 4.0, 90),
            point(24, 40, 8.64, 60),
            point(24, 80, 12.0, 40),
            point(50, 80, 16.0, 30),
        ];
        let profiles = [("resnet".to_owned(), ProfileTable::sparse(points).unwrap())].into();
        let annotations = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        share(&annotations, &profiles)
    }

    fn found(pairs: &[(&str, &str)]) -> (String, String) {
        let share = ask(pairs).unwrap();
        (share.quota().to_string(), share.sm().to_string())
    }

    #[test]
    fn what_is_left_out_is_the_most_effective_of_what_keeps_the_slo() {
        let profile = ("gshare.io/profile", "resnet");
        assert_eq!(found(&[profile]), ("30%:30%".into(), "12%".into()));
        assert_eq!(found(&[profile, ("gshare.io/slo", "69ms")]), ("40%:40%".into(), "24%".into()));
        assert_eq!(found(&[profile, ("gshare.io/slo", "30ms")]), ("80%:80%".into(), "50%".into()));
        // Given values stay.
        let sm = ("faasshare/sm_partition", "24");
        assert_eq!(found(&[profile, sm]), ("40%:40%".into(), "24%".into()));
        assert_eq!(found(&[profile, sm, ("gshare.io/slo", "50ms")]), ("80%:80%".into(), "24%".into()));
        assert_eq!(found(&[profile, ("faasshare/quota_request", "0.8")]), ("80%:80%".into(), "24%".into()));
        assert_eq!(found(&[profile, sm, ("faasshare/quota_limit", "0.5")]), ("40%:50%".into(), "24%".into()));
        let memory = ask(&[profile, ("fastgshare/gpu_mem", "1GiB")]).unwrap().memory();
        assert_eq!(memory, Some(Bytes::from_gib(1)));
    }

    #[test]
    fn errors_name_the_annotation() {
        let profile = ("gshare.io/profile", "resnet");
        for (pairs, why) in [
            (vec![], "quota_request: is 0 or missing"),
            (vec![("faasshare/quota_limit", "0.5")], "quota_request: is 0 or missing"),
            (vec![("faasshare/colour", "red")], "unknown annotation `faasshare/colour`"),
            (
                vec![("faasshare/quota_request", "0.5"), ("gshare.io/slo", "1s")],
                "gshare.io/slo: without gshare.io/profile",
            ),
            (vec![("gshare.io/profile", "vgg")], "gshare.io/profile: `vgg`: not one of [resnet]"),
            (vec![profile, ("gshare.io/slo", "soon")], "gshare.io/slo: "),
            (
                vec![profile, ("gshare.io/slo", "29ms")],
                "no point of it is at the shares given with a 95th percentile of at most 29ms",
            ),
            (vec![profile, ("faasshare/sm_partition", "13")], "gshare.io/profile: `resnet`: no point of it"),
        ] {
            let error = ask(&pairs).unwrap_err();
            assert!(error.contains(why), "{pairs:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn a_share_is_read_back_as_it_was_written(
            (request, limit) in (1u16..=10_000, 1u16..=10_000), sm in 1u16..=10_000, memory in prop::option::of(1u64..1 << 50),
        ) {
            let quota = |points| Quota::new(points).unwrap();
            let range = QuotaRange::new(quota(request.min(limit)), quota(request.max(limit))).unwrap();
            let written = ResourceSpec::new(range, SmShare::new(sm).unwrap(), memory.map(Bytes)).unwrap();
            prop_assert_eq!(share(&annotations(&written), &Profiles::new()), Ok(written));
        }
    }
}
