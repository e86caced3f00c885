//! What is said over the wire, and the one place where it is checked.

use crate::SHARE_PREFIXES;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use gshare_core::profile::ProfilePoint;
use gshare_core::{Duration, Quota, ResourceSpec, SmShare};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The one namespace there is.
pub const NAMESPACE: &str = "openfaas-fn";
/// Load that nothing reaches: a function of unknown speed is never started twice because of its load.
const ANY_RATE: f64 = 1e9;

/// A refusal: status, and a sentence that names the field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// The contract's status.
    pub status: StatusCode,
    /// For people.
    pub message: String,
}

impl ApiError {
    /// A refusal of this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// The request is wrong.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// No such function.
    pub fn unknown_function(name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("unknown function `{name}`"))
    }

    /// The provider's fault.
    pub fn internal(what: &str, error: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{what}: {error}"))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.message + "\n").into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            let realm = HeaderValue::from_static("Basic realm=\"Restricted\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, realm);
        }
        response
    }
}

type Map = Option<BTreeMap<String, String>>;

/// What is deployed. Fields that the contract may get later are not looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionDeployment {
    /// Its name.
    pub service: String,
    /// Shown; and the program, if there is no `envProcess`.
    #[serde(default)]
    pub image: String,
    /// [`NAMESPACE`], or none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Program and arguments, between spaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_process: Option<String>,
    /// More environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Map,
    /// Kept and shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constraints: Option<Vec<String>>,
    /// Secrets that it finds in `secret_mount_path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<Vec<String>>,
    /// `com.openfaas.scale.min` and `.max` are looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Map,
    /// Shares, `gshare/requests_per_second`, `gshare/concurrency`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Map,
    /// Kept and shown; not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Map,
    /// Kept and shown; not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Map,
    /// Kept and shown; not enforced.
    #[serde(default)]
    pub read_only_root_filesystem: bool,
}

/// What a deployment amounts to.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Share of a GPU; none for a function that uses none.
    pub share: Option<ResourceSpec>,
    /// What one replica does.
    pub point: ProfilePoint,
    /// Requests that a replica serves at a time.
    pub concurrency: u32,
    /// Fewest and most replicas.
    pub bounds: (u32, u32),
    /// Whether load starts and stops replicas.
    pub scales: bool,
}

impl FunctionDeployment {
    /// Reads and checks a deployment.
    ///
    /// # Errors
    /// 400 that names the field.
    pub fn parse(body: &[u8]) -> Result<(Self, Plan), ApiError> {
        let deployment: Self = parse(body)?;
        let plan = deployment.plan()?;
        Ok((deployment, plan))
    }

    /// What it amounts to.
    ///
    /// # Errors
    /// 400 that names the field.
    pub fn plan(&self) -> Result<Plan, ApiError> {
        check_name("service", &self.service)?;
        check_namespace(self.namespace.as_deref())?;
        let line = self.env_process.as_deref().filter(|line| !line.trim().is_empty()).unwrap_or(&self.image);
        let command: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        if command.is_empty() {
            return Err(ApiError::bad("envProcess, image: both are empty: need a program to start"));
        }
        for key in self.env_vars.iter().flatten().map(|(key, _)| key) {
            if key.is_empty() || key.contains(['=', '\0']) {
                return Err(ApiError::bad(format!("envVars: `{key}` is not a name for a variable")));
            }
        }
        if self.env_vars.iter().flatten().any(|(_, value)| value.contains('\0')) || line.contains('\0') {
            return Err(ApiError::bad("envVars, envProcess: a byte of value 0"));
        }
        for (field, map) in [("limits", &self.limits), ("requests", &self.requests)] {
            let gpus = map.iter().flatten().find(|(key, value)| key.ends_with("/gpu") && *value != "0");
            if let Some((key, _)) = gpus {
                return Err(ApiError::bad(format!(
                    "{field}: `{key}`: shares of a GPU are annotations here, such as fastgshare/gpu_quota_request"
                )));
            }
        }
        let share = self.share()?;
        let annotation = |key: &str| self.annotations.iter().flatten().find(|(k, _)| *k == key);
        if let Some((key, _)) = self.annotations.iter().flatten().find(|(key, _)| {
            key.starts_with("gshare/")
                && !["gshare/requests_per_second", "gshare/concurrency"].contains(&key.as_str())
        }) {
            return Err(ApiError::bad(format!("annotations: unknown `{key}`")));
        }
        let rate = match annotation("gshare/requests_per_second") {
            None => None,
            Some((key, text)) => match text.parse::<f64>() {
                Ok(rate) if (0.001..=1e6).contains(&rate) => Some(rate),
                _ => {
                    return Err(ApiError::bad(format!(
                        "annotations: {key}: `{text}`: need 0.001 to 1000000"
                    )));
                }
            },
        };
        let concurrency = match annotation("gshare/concurrency") {
            None => 1,
            Some((key, text)) => match text.parse() {
                Ok(count @ 1..=64) => count,
                _ => return Err(ApiError::bad(format!("annotations: {key}: `{text}`: need 1 to 64"))),
            },
        };
        let label = |name: &str, default: u32, least: u32| {
            let found = self.labels.iter().flatten().find(|(key, _)| *key == name);
            match found.map(|(_, text)| (text, text.parse::<u32>())) {
                None => Ok(default),
                Some((_, Ok(count))) if (least..=4096).contains(&count) => Ok(count),
                Some((text, _)) => {
                    Err(ApiError::bad(format!("labels: {name}: `{text}`: need {least} to 4096")))
                }
            }
        };
        let least = label("com.openfaas.scale.min", 1, 0)?;
        let most = label("com.openfaas.scale.max", least.max(20), 1)?;
        if least > most {
            return Err(ApiError::bad(format!(
                "labels: com.openfaas.scale.min: {least} is more than the maximum {most}"
            )));
        }
        let bounds = if rate.is_some() { (least, most) } else { (least, least.max(1)) };
        let one = share.map_or((SmShare::WHOLE, Quota::WHOLE), |share| (share.sm(), share.quota().request()));
        // Nobody looks at the latency: without a bound on it every point will do.
        let any = Duration::from_millis(1);
        let point = ProfilePoint::measured(one.0, one.1, 1, rate.unwrap_or(ANY_RATE), any, any)
            .map_err(|error| ApiError::bad(format!("annotations: {error}")))?;
        Ok(Plan { command, share, point, concurrency, bounds, scales: rate.is_some() })
    }

    fn share(&self) -> Result<Option<ResourceSpec>, ApiError> {
        let is_share = |key: &str| SHARE_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
        let shares = || self.annotations.iter().flatten().filter(|(key, _)| is_share(key));
        if shares().next().is_none() {
            return Ok(None);
        }
        let spec =
            ResourceSpec::from_annotations(shares().map(|(key, value)| (key.as_str(), value.as_str())))
                .map_err(|error| ApiError::bad(format!("annotations: {error}")))?;
        if spec.quota().request().is_zero() {
            return Err(ApiError::bad(
                "annotations: gpu_quota_request: is 0 or missing: need more, since a replica is placed by it",
            ));
        }
        Ok(Some(spec))
    }
}

/// What a function is and does.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionStatus {
    /// Its name.
    pub name: String,
    /// As deployed; `service` is `name` here.
    #[serde(flatten)]
    pub deployment: serde_json::Value,
    /// Requests so far.
    pub invocation_count: f64,
    /// Replicas that are starting or ready.
    pub replicas: u64,
    /// Replicas that are ready.
    pub available_replicas: u64,
    /// RFC 3339.
    pub created_at: String,
    /// If it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// What its replicas use of the node.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Milli-CPUs, since the replicas began.
    pub cpu: f64,
    /// Resident memory.
    pub total_memory_bytes: f64,
}

/// Which function, in a body.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeleteRequest {
    /// Its name.
    pub function_name: String,
    /// [`NAMESPACE`], or none.
    pub namespace: Option<String>,
}

/// How many replicas.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScaleRequest {
    /// The function; the path says so too.
    pub service_name: Option<String>,
    /// How many.
    pub replicas: u32,
    /// [`NAMESPACE`], or none.
    pub namespace: Option<String>,
}

/// A secret.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    /// Its name.
    pub name: String,
    /// [`NAMESPACE`], or none.
    pub namespace: Option<String>,
    /// The text of the secret.
    pub value: Option<String>,
    /// Anything, as base64. Goes before the text.
    pub raw_value: Option<String>,
}

impl Secret {
    /// Its bytes.
    ///
    /// # Errors
    /// 400 that names the field.
    pub fn bytes(&self) -> Result<Vec<u8>, ApiError> {
        use base64::Engine as _;
        match (&self.raw_value, &self.value) {
            (Some(raw), _) if !raw.is_empty() => base64::engine::general_purpose::STANDARD
                .decode(raw)
                .map_err(|error| ApiError::bad(format!("rawValue: {error}"))),
            (_, Some(text)) => Ok(text.clone().into_bytes()),
            _ => Err(ApiError::bad("value, rawValue: need one of them")),
        }
    }
}

/// A line that a replica printed.
#[derive(Debug, Clone, Serialize)]
pub struct LogLine {
    /// The function.
    pub name: String,
    /// [`NAMESPACE`].
    pub namespace: &'static str,
    /// The replica.
    pub instance: String,
    /// RFC 3339.
    pub timestamp: String,
    /// The line.
    pub text: String,
}

/// Reads a body; the error names the field.
///
/// # Errors
/// 400.
pub fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { String::new() } else { format!("{path}: ") };
        ApiError::bad(format!("body: {field}{}", error.into_inner()))
    })?;
    json.end().map_err(|error| ApiError::bad(format!("body: {error}")))?;
    Ok(value)
}

/// A DNS label, since the name is part of URLs, files and host names.
///
/// # Errors
/// 400 that names the field.
pub fn check_name(field: &str, name: &str) -> Result<(), ApiError> {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    let ends = bytes.first().is_some_and(|b| inner(*b)) && bytes.last().is_some_and(|b| inner(*b));
    if ends && bytes.len() <= 63 && bytes.iter().all(|byte| inner(*byte) || *byte == b'-') {
        return Ok(());
    }
    Err(ApiError::bad(format!(
        "{field}: `{name}` is not a DNS label: need 1 to 63 of a-z, 0-9 and -, the first and the last no -"
    )))
}

/// There is one namespace.
///
/// # Errors
/// 400.
pub fn check_namespace(namespace: Option<&str>) -> Result<(), ApiError> {
    match namespace {
        None | Some("" | NAMESPACE) => Ok(()),
        Some(other) => Err(ApiError::bad(format!("namespace: unknown `{other}`: there is `{NAMESPACE}`"))),
    }
}

/// A time as RFC 3339, UTC, to the millisecond.
pub fn rfc3339(time: std::time::SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(body: &str) -> String {
        let error = FunctionDeployment::parse(body.as_bytes()).unwrap_err();
        assert_eq!(error.status, StatusCode::BAD_REQUEST, "{body}");
        error.message
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |rest: &str| refusal(&format!(r#"{{"service":"f","image":"/bin/true",{rest}}}"#));
        for (body, field) in [
            ("{", "body"),
            ("[]", "body"),
            (r#"{"image":"x"}"#, "service"),
            (r#"{"service":5}"#, "service"),
            (r#"{"service":"Not_DNS","image":"x"}"#, "service"),
            (r#"{"service":"-a","image":"x"}"#, "service"),
            (r#"{"service":"f"}"#, "envProcess"),
            (r#"{"service":"f","image":"x"} trailing"#, "body"),
        ] {
            assert!(refusal(body).contains(field), "{body}: {}", refusal(body));
        }
        for (rest, field) in [
            (r#""namespace":"other""#, "namespace"),
            (r#""envVars":{"A=B":"1"}"#, "envVars"),
            (r#""envVars":{"A":1}"#, "envVars.A"),
            (r#""labels":{"com.openfaas.scale.min":"-1"}"#, "com.openfaas.scale.min"),
            (
                r#""labels":{"com.openfaas.scale.min":"5","com.openfaas.scale.max":"4"}"#,
                "com.openfaas.scale.min",
            ),
            (r#""annotations":{"fastgshare/gpu_quota_request":"1.5"}"#, "quota_request"),
            (r#""annotations":{"fastgshare/gpu_sm_partition":"24"}"#, "gpu_quota_request"),
            (r#""annotations":{"fastgshare/colour":"red"}"#, "fastgshare/colour"),
            (r#""annotations":{"gshare/requests_per_second":"many"}"#, "gshare/requests_per_second"),
            (r#""annotations":{"gshare/requests_per_second":"NaN"}"#, "gshare/requests_per_second"),
            (r#""annotations":{"gshare/concurrency":"0"}"#, "gshare/concurrency"),
            (r#""annotations":{"gshare/conc":"1"}"#, "gshare/conc"),
            (r#""limits":{"nvidia.com/gpu":"0.5"}"#, "nvidia.com/gpu"),
        ] {
            assert!(with(rest).contains(field), "{rest}: {}", with(rest));
        }
    }

    #[test]
    fn shares_are_fast_gshares_and_other_annotations_are_the_users_own() {
        let body = r#"{"service":"f","image":"x","envProcess":"/bin/f --a b","annotations":{
            "fastgshare/gpu_quota_request":"0.3","fastgshare/gpu_quota_limit":"0.8","fastgshare/gpu_sm_partition":"24",
            "fastgshare/gpu_mem":"1073741824","topic":"cron","gshare/requests_per_second":"27.5"},
            "labels":{"com.openfaas.scale.max":"8"},"somethingNew":1}"#;
        let (_, plan) = FunctionDeployment::parse(body.as_bytes()).unwrap();
        let share = plan.share.unwrap();
        assert_eq!((share.quota().to_string(), share.sm()), ("30%:80%".into(), "24".parse().unwrap()));
        assert_eq!((plan.bounds, plan.scales, plan.command.len()), ((1, 8), true, 3));
        assert_eq!(plan.point.throughput.as_milli(), 27_500);
        let (_, plan) = FunctionDeployment::parse(br#"{"service":"f","image":"/bin/f"}"#).unwrap();
        assert!(plan.share.is_none() && !plan.scales && plan.bounds == (1, 1));
    }
}
