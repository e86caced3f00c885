//! The two internal resources of Knative Serving for an autoscaler class, with the fields used here.
//!
//! All writes are JSON merge patches, so other fields stay unchanged.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::CustomResource;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Annotation by which an autoscaler class knows its own.
pub const CLASS: &str = "autoscaling.knative.dev/class";
/// Label of the parts of a service, with the service's name.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label of a `ServerlessService`'s services, and of their parts, with its name.
pub const SKS_NAME: &str = "networking.internal.knative.dev/serverlessservice";
/// Label of these services: `Private` for the service with the pods behind it.
pub const SERVICE_TYPE: &str = "networking.internal.knative.dev/serviceType";

/// Condition: the target gets traffic.
pub const ACTIVE: &str = "Active";
/// Condition: the target has once had its first pods. Never taken back.
pub const INITIALIZED: &str = "ScaleTargetInitialized";
/// Condition: the `ServerlessService` is ready.
pub const SKS_READY: &str = "SKSReady";
/// Condition: all of the above.
pub const READY: &str = "Ready";

/// The target to scale and its settings; written by the Revision.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[kube(
    group = "autoscaling.internal.knative.dev",
    version = "v1alpha1",
    kind = "PodAutoscaler",
    plural = "podautoscalers",
    status = "PodAutoscalerStatus",
    derive = "PartialEq",
    schema = "disabled",
    namespaced
)]
#[serde(rename_all = "camelCase")]
pub struct PodAutoscalerSpec {
    /// Requests of a pod at once; 0: any number.
    #[serde(default)]
    pub container_concurrency: u32,
    /// A Deployment.
    #[serde(default)]
    pub scale_target_ref: ObjectReference,
    /// `Unreachable` if no route leads here.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reachability: String,
    /// `http1` or `h2c`.
    #[serde(default)]
    pub protocol_type: String,
}

/// How it is scaled; written here.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodAutoscalerStatus {
    /// Generation of the described spec. Clients compare it to know whether the object is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Sorted by type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The service that clients use. Required, if empty.
    #[serde(default)]
    pub service_name: String,
    /// The service with the measured pods. Required, if empty.
    #[serde(default)]
    pub metrics_service_name: String,
    /// Wanted pods; -1: nothing is known of the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_scale: Option<i32>,
    /// Ready pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actual_scale: Option<i32>,
}

impl PodAutoscalerStatus {
    /// The condition of this type.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.kind == kind)
    }

    /// Whether that condition is True.
    pub fn is_true(&self, kind: &str) -> bool {
        self.condition(kind).is_some_and(|condition| condition.status == "True")
    }
}

/// Directs requests for the target; its spec is written here, its status by Knative.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[kube(
    group = "networking.internal.knative.dev",
    version = "v1alpha1",
    kind = "ServerlessService",
    plural = "serverlessservices",
    status = "ServerlessServiceStatus",
    derive = "PartialEq",
    schema = "disabled",
    namespaced
)]
#[serde(rename_all = "camelCase")]
pub struct ServerlessServiceSpec {
    /// The receiver of the requests.
    #[serde(default)]
    pub mode: Mode,
    /// The scaled Deployment.
    #[serde(default)]
    pub object_ref: ObjectReference,
    /// As in the `PodAutoscaler`.
    #[serde(default)]
    pub protocol_type: String,
    /// Activators with a part of its requests; 0: all.
    #[serde(default)]
    pub num_activators: i32,
}

/// The receiver of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Mode {
    /// The pods, if there are any.
    #[default]
    Serve,
    /// The activator, which keeps them until there are pods.
    Proxy,
}

/// Knative's status of a `ServerlessService`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerlessServiceStatus {
    /// The spec in question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready` and others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The service that clients use.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub service_name: String,
    /// The service with only the pods behind it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub private_service_name: String,
}

impl ServerlessServiceStatus {
    /// The condition of this type.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.kind == kind)
    }
}

/// One condition of a status.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Since when it has this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// Why, in one word.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Why, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// How bad; empty: an error. Others write it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub severity: String,
}

impl Condition {
    /// Since when it has this status; `now` if the time is unknown.
    pub fn since(&self, now: Timestamp) -> Timestamp {
        self.last_transition_time.as_ref().map_or(now, |time| time.0)
    }
}

/// Time from `then` to `now`; none if clocks disagree.
pub fn elapsed(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or(Duration::ZERO)
}
