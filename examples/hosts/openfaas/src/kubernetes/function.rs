//! `GpuFunction`: the declarative form of a deployment, as an object of Kubernetes.
//!
//! Each annotation of a deployment that the host knows is a field here ([`FIELDS`]); the checks are the same
//! ([`Plan::of`](crate::deployment::Plan::of)), and their messages name the field.

#![allow(unreachable_pub, reason = "the schema's macro keeps a copy of the type to itself")]
#![allow(clippy::duplicated_attributes, reason = "several columns of the same type")]

use super::pod_spec::own_name;
use super::template::TEMPLATE;
use crate::api::FunctionDeployment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::ObjectMeta;
use kube::{CustomResource, CustomResourceExt as _, KubeSchema, ResourceExt as _};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A function with instances that share GPUs.
#[serde_with::skip_serializing_none]
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "gshare.io",
    version = "v1alpha1",
    kind = "GpuFunction",
    shortname = "gf",
    namespaced,
    status = "GpuFunctionStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A function with instances that share GPUs: its image, and a goal or a share.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    validation = Rule::new("!self.metadata.name.contains('.')")
        .message("metadata.name: has a dot: need a DNS label of a-z, 0-9 and -"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "SLO", type_ = "string", json_path = ".spec.slo"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas")
        .message("minReplicas: need at most maxReplicas"),
    validation = Rule::new("!has(self.replicas) || !has(self.maxReplicas) || self.replicas <= self.maxReplicas")
        .message("replicas: need at most maxReplicas"),
    validation = Rule::new("!has(self.concurrency) || !has(self.batch)")
        .message("batch: an instance takes batches, or several requests at once: leave out concurrency")
)]
pub struct GpuFunctionSpec {
    /// Container image with its registry.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// Arguments of the image's entry point, without white space.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(regex(pattern = r"^\S+$")))]
    pub args: Vec<String>,
    /// Variables of the environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Names of Secrets. Their values become files in `$secret_mount_path`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// `cpu` and `memory` that a container gets at least.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
    /// `cpu` and `memory` that a container gets at most.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
    /// Whether the container's root file system is read-only.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub read_only_root_filesystem: bool,
    /// Time in which a request is to be answered, such as `69ms`.
    pub slo: Option<String>,
    /// `slo-sensitive` or `best-effort`.
    pub class: Option<String>,
    /// `inference` or `training`.
    pub workload: Option<String>,
    /// The explicit share of an instance; without it, the function is measured.
    pub share: Option<Share>,
    /// Measured points: a file of the host, `auto` or `none`.
    pub profile: Option<String>,
    /// The tenant that pays.
    pub tenant: Option<String>,
    /// `fractional`, `sliced` or `whole`.
    pub regime: Option<String>,
    /// Requests that an instance serves at once.
    #[schemars(range(min = 1, max = 64))]
    pub concurrency: Option<u32>,
    /// Most requests of a batch.
    #[schemars(range(min = 1, max = 256))]
    pub batch: Option<u32>,
    /// Time from the start of an instance to its first answer, such as `4s`.
    pub load: Option<String>,
    /// Fewest instances.
    #[schemars(range(min = 0, max = 4096))]
    pub min_replicas: Option<u32>,
    /// Most instances.
    #[schemars(range(min = 1, max = 4096))]
    pub max_replicas: Option<u32>,
    /// Number of instances that a client asked for. Load may start more of a function that scales.
    #[schemars(range(min = 0, max = 4096))]
    pub replicas: Option<u32>,
    /// Further labels of the deployment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Further parts of its pods, as in a Deployment: labels, volumes, node selectors, tolerations, service accounts and containers. The
    /// container `function` is its program: its image and arguments are the fields above.
    #[serde(default)]
    #[schemars(schema_with = "pod_template")]
    pub template: Option<Value>,
    /// Further annotations of the deployment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// A share of a GPU.
#[serde_with::skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// Guaranteed part of the time, such as `0.3` or `30%`.
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?%?$"))]
    pub quota: Option<String>,
    /// Largest part of the time.
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?%?$"))]
    pub quota_limit: Option<String>,
    /// Part of the SMs, such as `12` or `12%`.
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?%?$"))]
    pub sm: Option<String>,
    /// Memory, such as `1GiB`.
    pub memory: Option<String>,
    /// Requests per second of an instance with this share, by which it scales.
    pub requests_per_second: Option<String>,
}

/// The observed state.
#[serde_with::skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuFunctionStatus {
    /// The generation that this is about.
    #[serde(default)]
    pub observed_generation: i64,
    /// Instances that start or are ready.
    #[serde(default)]
    pub replicas: u64,
    /// Instances that are ready.
    #[serde(default)]
    pub ready_replicas: u64,
    /// By which its pods are found.
    #[serde(default)]
    pub selector: String,
    /// The measurement, for the next leader.
    #[serde(default)]
    #[schemars(schema_with = "anything")]
    pub profile: Option<Value>,
    /// The last spec without a fault, for the next leader.
    #[serde(default)]
    #[schemars(schema_with = "anything")]
    pub serving: Option<Value>,
    /// Ready: the least number of instances is ready. Progressing: instances start, or the function is measured. Degraded: something has
    /// to be mended first, as the message says.
    #[serde(default)]
    #[schemars(transform = with_states)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Kubernetes' own type says the states of a condition only in its description.
fn with_states(conditions: &mut schemars::Schema) {
    if let Some(status) = conditions.pointer_mut("/items/properties/status") {
        status["enum"] = json!(["True", "False", "Unknown"]);
    }
}

fn anything(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// As much of a pod template as makes mistakes plain at once. The host checks the whole of it.
fn pod_template(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "description": "Further parts of its pods, as in a Deployment: labels, volumes, node selectors, tolerations, service accounts and containers. The container `function` is its program: its image and arguments are the fields beside the template.",
        "properties": { "metadata": anything(generator), "spec": anything(generator) },
    })
}

/// Fields of the object, and the labels or annotations of a deployment that say the same.
pub const FIELDS: [(&str, &str); 16] = [
    ("minReplicas", "com.openfaas.scale.min"),
    ("maxReplicas", "com.openfaas.scale.max"),
    ("slo", "gshare/slo"),
    ("class", "gshare/class"),
    ("workload", "gshare/workload"),
    ("profile", "gshare/profile"),
    ("tenant", "gshare/tenant"),
    ("regime", "gshare/regime"),
    ("concurrency", "gshare/concurrency"),
    ("batch", "gshare/batch"),
    ("load", "gshare/load"),
    ("share.requestsPerSecond", "gshare/requests_per_second"),
    ("share.quota", "fastgshare/gpu_quota_request"),
    ("share.quotaLimit", "fastgshare/gpu_quota_limit"),
    ("share.sm", "fastgshare/gpu_sm_partition"),
    ("share.memory", "fastgshare/gpu_mem"),
];

/// The fields of these that are numbers.
const NUMBERS: [&str; 4] = ["minReplicas", "maxReplicas", "concurrency", "batch"];

/// Takes a label or an annotation as a field of a spec. False: there is no such field, or it takes no such value.
fn take(spec: &mut Value, key: &str, value: &str) -> bool {
    let key = key.strip_prefix("faasshare/").map_or(key.to_owned(), |rest| format!("fastgshare/{rest}"));
    let Some((field, _)) = FIELDS.iter().find(|(_, known)| *known == key) else { return false };
    let value = match NUMBERS.contains(field) {
        true => value.parse::<u32>().map(Value::from).ok(),
        false => Some(value.into()),
    };
    let Some(value) = value else { return false };
    let place = match field.split_once('.') {
        Some((outer, inner)) => &mut spec[outer][inner],
        None => &mut spec[*field],
    };
    let is_free = place.is_null();
    if is_free {
        *place = value;
    }
    is_free
}

impl GpuFunctionSpec {
    /// The object's form of a deployment.
    pub fn of(deployment: &FunctionDeployment, replicas: Option<u32>) -> Self {
        let mut taken = json!({ "image": deployment.image });
        let mut rest = |all: &Option<BTreeMap<String, String>>| {
            let mut rest = all.clone().unwrap_or_default();
            rest.retain(|key, value| !take(&mut taken, key, value));
            rest
        };
        let (labels, mut annotations) = (rest(&deployment.labels), rest(&deployment.annotations));
        let template = annotations.get(TEMPLATE).and_then(|text| serde_json::from_str(text).ok());
        let template = template.filter(Value::is_object);
        if template.is_some() {
            annotations.remove(TEMPLATE);
        }
        let words = deployment.env_process.iter().flat_map(|line| line.split_whitespace());
        Self {
            args: words.map(str::to_owned).collect(),
            env: deployment.env_vars.clone().unwrap_or_default(),
            secrets: deployment.secrets.clone().unwrap_or_default(),
            requests: deployment.requests.clone().unwrap_or_default(),
            limits: deployment.limits.clone().unwrap_or_default(),
            read_only_root_filesystem: deployment.read_only_root_filesystem,
            replicas,
            labels,
            template,
            annotations,
            // Each has the type of its field.
            ..serde_json::from_value(taken).unwrap_or_default()
        }
    }

    /// The deployment under a name. Two deployments of one object's form are equal.
    pub fn deployment(&self, name: &str) -> FunctionDeployment {
        let (spec, mut labels, mut annotations) =
            (json!(self), self.labels.clone(), self.annotations.clone());
        for (field, key) in FIELDS {
            let all = if key.starts_with("com.openfaas.") { &mut labels } else { &mut annotations };
            let text = match spec.pointer(&format!("/{}", field.replace('.', "/"))) {
                Some(Value::String(text)) => text.clone(),
                Some(number) => number.to_string(),
                None => continue,
            };
            all.insert(key.to_owned(), text);
        }
        if let Some(template) = &self.template {
            annotations.insert(TEMPLATE.to_owned(), template.to_string());
        }
        let map = |all: BTreeMap<String, String>| Some(all).filter(|all| !all.is_empty());
        FunctionDeployment {
            service: name.to_owned(),
            image: self.image.clone(),
            env_process: Some(self.args.join(" ")).filter(|line| !line.is_empty()),
            env_vars: map(self.env.clone()),
            secrets: Some(self.secrets.clone()).filter(|all| !all.is_empty()),
            labels: map(labels),
            annotations: map(annotations),
            limits: map(self.limits.clone()),
            requests: map(self.requests.clone()),
            read_only_root_filesystem: self.read_only_root_filesystem,
            ..FunctionDeployment::default()
        }
    }
}

impl GpuFunction {
    /// The object of a deployment.
    pub fn of(deployment: &FunctionDeployment, replicas: Option<u32>) -> Self {
        let name = own_name(&deployment.service).to_owned();
        let metadata = ObjectMeta { name: Some(name), ..ObjectMeta::default() };
        Self { metadata, spec: GpuFunctionSpec::of(deployment, replicas), status: None }
    }

    /// The deployment that it is.
    pub fn deployment(&self) -> FunctionDeployment {
        self.spec.deployment(&self.name_any())
    }
}

/// A refusal of a deployment, by the names of the object's fields.
pub fn in_fields(message: &str) -> String {
    let mut message = message.to_owned();
    // Most messages name none, and each look asks for all of them.
    for of in ["annotations: ", "labels: "].into_iter().filter(|of| message.contains(of)).collect::<Vec<_>>()
    {
        for (field, key) in FIELDS.into_iter().chain([("template", TEMPLATE)]) {
            message = message.replace(&format!("{of}{key}"), &format!("spec.{field}"));
        }
    }
    let Some((field, rest)) = message.split_once(": ") else { return message };
    match field {
        "service" => format!("metadata.name: {rest}"),
        "envProcess" => format!("spec.args: {rest}"),
        "envVars" => format!("spec.env: {rest}"),
        "image" | "secrets" | "limits" | "requests" | "labels" | "annotations" => format!("spec.{message}"),
        _ => message,
    }
}

/// The definition as it is checked in.
///
/// # Errors
/// Never, unless it cannot be written as YAML.
pub fn crd() -> anyhow::Result<String> {
    let text = serde_saphyr::to_string(&GpuFunction::crd())?;
    // A server warns of formats that it does not know; the bounds say as much.
    let is_known = |line: &&str| !line.trim_start().starts_with("format: uint");
    let text: String = text.split_inclusive('\n').filter(is_known).collect();
    Ok(format!("# Made by `cargo run -p gshare-openfaas --features kubernetes -- --crd`.\n{text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_a_condition_is_one_of_three() {
        let crd = serde_json::to_value(GpuFunction::crd()).unwrap();
        let status = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/conditions/items/properties/status";
        assert_eq!(crd.pointer(status).unwrap()["enum"], json!(["True", "False", "Unknown"]));
    }

    #[test]
    fn a_deployment_is_the_same_after_its_way_through_an_object() {
        let text = r#"{"service":"f","image":"localhost/f:1","envProcess":"a  b","envVars":{"K":"V"},"secrets":["s"],
            "labels":{"com.openfaas.scale.min":"2","com.openfaas.scale.max":"many","team":"x"},
            "annotations":{"gshare/pod_template":"{\"spec\":{\"hostname\":\"h\"}}","gshare/slo":"69ms","faasshare/gpu_quota_request":"0.4","gshare/batch":"8","topic":"t",
            "gshare/probe_path":"/p"},"limits":{"memory":"1Gi"}}"#;
        let deployment: FunctionDeployment = serde_json::from_str(text).unwrap();
        let object = GpuFunction::of(&deployment, Some(3));
        let (spec, share) = (&object.spec, object.spec.share.clone().unwrap());
        assert_eq!((spec.min_replicas, spec.max_replicas, spec.batch), (Some(2), None, Some(8)));
        assert_eq!((share.quota.as_deref(), spec.slo.as_deref()), (Some("0.4"), Some("69ms")));
        // A text that is no number stays as it is, for the check to refuse.
        assert_eq!(spec.labels["com.openfaas.scale.max"], "many");
        let once = object.deployment();
        assert_eq!(once.annotations.as_ref().unwrap()["fastgshare/gpu_quota_request"], "0.4");
        assert_eq!(GpuFunction::of(&once, Some(3)), object);
        let read: GpuFunction = serde_json::from_value(serde_json::to_value(&object).unwrap()).unwrap();
        assert_eq!(read.deployment(), once);
    }

    #[test]
    fn a_refusal_names_the_field_of_the_object() {
        for (name, spec, starts) in [
            ("f", json!({ "slo": "soon" }), "spec.slo: `soon`"),
            (
                "f",
                json!({ "share": { "quota": "50%", "quotaLimit": "30%" } }),
                "spec.share.quota: quota request 50% is larger",
            ),
            ("f", json!({ "share": { "memory": "1GiB", "sm": "12" } }), "spec.share.quota: is 0 or missing"),
            (
                "f",
                json!({ "share": { "quota": "50%", "memory": "1GiB:2GiB" } }),
                "spec.share.memory: is a range",
            ),
            ("f", json!({ "tenant": "red" }), "spec.tenant: `red`: is not known: leave it out"),
            ("f", json!({ "env": { "a=b": "1" } }), "spec.env: `a=b` is not a name"),
            ("f", json!({ "limits": { "cpu": "lots" } }), "spec.limits: cpu: `lots`"),
            (
                "f",
                json!({ "limits": { "nvidia.com/gpu": "1" } }),
                "spec.limits: `nvidia.com/gpu`: need an SLO",
            ),
            ("f", json!({ "annotations": { "gshare/colour": "red" } }), "spec.annotations: unknown"),
            ("f_", json!({}), "metadata.name: `f_` is not a DNS label"),
        ] {
            let spec: GpuFunctionSpec = {
                let mut whole = spec.clone();
                whole["image"] = json!("localhost/f:1");
                serde_json::from_value(whole).unwrap()
            };
            let error = crate::deployment::Plan::of(&spec.deployment(name), &BTreeMap::new()).unwrap_err();
            let said = in_fields(&error.message);
            assert!(said.starts_with(starts), "{said}");
        }
    }

    #[test]
    fn the_definition_has_only_formats_that_a_server_knows() {
        let text = crd().unwrap();
        let mut formats = text.lines().filter_map(|line| line.trim().strip_prefix("format: "));
        assert!(formats.all(|format| ["int64", "date-time"].contains(&format)), "{text}");
    }
}
