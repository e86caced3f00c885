//! Messages of the HTTP interface and their checks.

use super::host::View;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The only namespace.
pub const NAMESPACE: &str = "openfaas-fn";

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status, by the contract.
    pub status: StatusCode,
    /// One sentence that names the field.
    pub message: String,
}

impl ApiError {
    /// An error with this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// A 400 answer.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 404 for an unknown function.
    pub fn unknown_function(name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("unknown function `{name}`"))
    }

    /// 500 with the failed operation.
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

/// A deployment as clients send it. Unknown fields are ignored, since the contract may grow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionDeployment {
    /// Name of the function.
    pub service: String,
    /// A container image if it names a registry. Otherwise a name, or the program if there is no `envProcess`.
    #[serde(default)]
    pub image: String,
    /// [`NAMESPACE`], or none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Program and arguments, separated by spaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_process: Option<String>,
    /// Additional environment variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Map,
    /// Stored and shown, without effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constraints: Option<Vec<String>>,
    /// Secrets to place in `secret_mount_path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<Vec<String>>,
    /// Labels; `com.openfaas.scale.min` and `.max` bound the replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Map,
    /// Goals and shares of the function, see [`super::deployment`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Map,
    /// `memory` and `cpu` hold in containers, and where the host manages cgroups; otherwise they are only shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Map,
    /// Stored and shown, without effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Map,
    /// Holds in containers; otherwise only shown.
    #[serde(default)]
    pub read_only_root_filesystem: bool,
}

/// Description and state of a function.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionStatus {
    /// Name of the function.
    pub name: String,
    /// The deployment; `service` is `name` here.
    #[serde(flatten)]
    pub deployment: serde_json::Value,
    /// Number of requests so far.
    pub invocation_count: f64,
    /// Number of replicas that are ready, start or are parked.
    pub replicas: u64,
    /// Number of replicas that are ready.
    pub available_replicas: u64,
    /// Time of the first deployment, in RFC 3339.
    pub created_at: String,
    /// Use of CPUs and host memory, on request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Figures beyond the contract.
    #[serde(rename = "gshare")]
    pub status: View,
}

/// Use of CPUs and host memory by a function's replicas.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Mean CPU use since the start of each replica, in thousandths of a CPU.
    pub cpu: f64,
    /// Resident memory in bytes.
    pub total_memory_bytes: f64,
}

/// A request to delete a function.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeleteRequest {
    /// Name of the function.
    pub function_name: String,
    /// [`NAMESPACE`], or none.
    pub namespace: Option<String>,
}

/// A request to scale a function.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScaleRequest {
    /// Name of the function, which the path repeats.
    pub service_name: Option<String>,
    /// Number of replicas.
    pub replicas: u32,
    /// [`NAMESPACE`], or none.
    pub namespace: Option<String>,
}

/// A secret.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    /// Name of the secret.
    pub name: String,
    /// [`NAMESPACE`], or none.
    pub namespace: Option<String>,
    /// Value as text.
    pub value: Option<String>,
    /// Value as base64; takes precedence over the text.
    pub raw_value: Option<String>,
}

impl Secret {
    /// The bytes of the value.
    ///
    /// # Errors
    /// 400 with the name of the field.
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

/// A line of a replica's output.
#[derive(Debug, Clone, Serialize)]
pub struct LogLine {
    /// Name of the function.
    pub name: String,
    /// [`NAMESPACE`].
    pub namespace: &'static str,
    /// Name of the replica.
    pub instance: String,
    /// Time of arrival, in RFC 3339.
    pub timestamp: String,
    /// The line without its end.
    pub text: String,
}

/// Reads a JSON body.
///
/// # Errors
/// 400 with the name of the field.
pub fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        // A path of `?` is a body that is no JSON.
        let field = if path == "." || path == "?" { String::new() } else { format!("{path}: ") };
        ApiError::bad(format!("body: {field}{}", error.into_inner()))
    })?;
    json.end().map_err(|error| ApiError::bad(format!("body: {error}")))?;
    Ok(value)
}

/// Checks that a name is a DNS label, since it becomes part of URLs, files and host names.
///
/// # Errors
/// 400 with the name of the field.
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

/// Checks that a namespace, if given, is [`NAMESPACE`].
///
/// # Errors
/// 400 for any other namespace.
pub fn check_namespace(namespace: Option<&str>) -> Result<(), ApiError> {
    match namespace {
        None | Some("" | NAMESPACE) => Ok(()),
        Some(other) => Err(ApiError::bad(format!("namespace: unknown `{other}`: there is `{NAMESPACE}`"))),
    }
}

/// A time in RFC 3339, UTC, with milliseconds.
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
            ("{'service':'f'}", "body: key must be a string"),
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
