//! Messages of the HTTP interface, and the one place where they are checked.

use super::deployment::Wants;
use super::host::View;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The one namespace there is.
pub const NAMESPACE: &str = "openfaas-fn";

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

/// A deployment as it is sent. Fields that the contract may get later are not looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionDeployment {
    /// Its name.
    pub service: String,
    /// A container image, where it names a registry; else shown, and the program, if there is no `envProcess`.
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
    /// Wishes and shares of the function, see [`super::deployment`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Map,
    /// `memory` and `cpu` are enforced in containers, and where the host has a folder for cgroups; else kept and shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Map,
    /// Kept and shown; not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Map,
    /// Enforced in containers; else kept and shown.
    #[serde(default)]
    pub read_only_root_filesystem: bool,
}

/// Description and state of a function.
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
    /// State of the function beyond the contract: how it is served.
    #[serde(rename = "gshare")]
    pub status: Status,
}

/// How a function is served.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// `serving`, `training`, `completed`, `failing`, `measuring`, `parked`, `starting` or `idle`.
    pub state: &'static str,
    /// `inference`, `pipeline` or `training`.
    pub workload: &'static str,
    /// How far its measurement is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measuring: Option<String>,
    /// Why an instance of it did not start the last time, or has lost its device and no other one is ready since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The time in ns in which a request is to be answered.
    #[serde(rename = "slo_ns", skip_serializing_if = "Option::is_none")]
    pub slo: Option<gshare_core::Duration>,
    /// Requests that wait for an instance.
    pub waiting: u64,
    /// Requests that were answered, and how many of them within the SLO.
    pub answered: u64,
    /// See `answered`.
    pub within_slo: u64,
    /// Requests that were refused.
    pub rejected: u64,
    /// Instances that were started so far.
    pub starts: u64,
    /// Times that an instance was parked for another function.
    pub parked: u64,
    /// Times that an instance took the place of another one on better slices.
    pub migrated: u64,
    /// Requests that went through several stages, each on a slice of its own.
    pub pipelined: u64,
    /// Device time that it used, in s.
    pub gpu_seconds: f64,
    /// GPU memory of an instance in bytes, as it is booked.
    pub memory_bytes: u64,
    /// Points of the function that were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<gshare_core::profile::ProfileTable>,
    /// The most of the device's time that other processes had while the function was measured.
    #[serde(rename = "others_bp", skip_serializing_if = "Option::is_none")]
    pub others: Option<gshare_core::BasisPoints>,
    /// Instances of the function that are not gone.
    pub instances: Vec<super::host::InstanceView>,
}

impl Status {
    /// How the function of this view is served.
    pub fn of(view: &View) -> Self {
        let (stats, totals) = (view.totals.stats, view.totals);
        let workload = match view.version.plan.wants {
            Wants::Training { .. } => "training",
            Wants::Pipeline { .. } => "pipeline",
            _ => "inference",
        };
        let parked =
            view.instances.iter().any(|instance| instance.life == gshare_sched::platform::Life::Parked);
        let state = match () {
            () if view.completed => "completed",
            () if view.available() > 0 && workload == "training" => "training",
            () if view.available() > 0 => "serving",
            () if view.problem.is_some() => "failing",
            () if view.measuring.is_some() => "measuring",
            () if parked => "parked",
            () if view.replicas() > 0 => "starting",
            () => "idle",
        };
        Self {
            state,
            workload,
            measuring: view.measuring.clone(),
            problem: view.problem.clone(),
            slo: view.version.plan.slo,
            waiting: view.waiting,
            answered: stats.answered,
            within_slo: stats.within_slo,
            rejected: stats.rejected,
            starts: stats.starts,
            parked: totals.parked,
            migrated: totals.migrated,
            pipelined: totals.pipelined,
            gpu_seconds: totals.gpu_ns as f64 / 1e9,
            memory_bytes: view.memory.get(),
            profile: view.profile.clone(),
            others: view.others,
            instances: view.instances.clone(),
        }
    }
}

/// CPU time and memory of the node that its replicas use.
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
    use crate::deployment::Plan;

    fn refusal(body: &str) -> String {
        let deployment = parse::<FunctionDeployment>(body.as_bytes());
        let error = deployment.and_then(|all| Plan::of(&all, &BTreeMap::new())).unwrap_err();
        assert_eq!(error.status, StatusCode::BAD_REQUEST, "{body}");
        error.message
    }

    #[test]
    fn what_is_wrong_is_named() {
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
    }
}
