//! The Knative host before a mock of the API server that keeps objects as the real one does: versions and conflicts, merge patches,
//! subresources, lists, watches that break off or have gone too far back, and the rights of `knative/rbac.yaml`. Each request is recorded;
//! writes are compared to the letter.
#![cfg(feature = "kubernetes")]

#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "support/api_server.rs"]
mod api_server;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "support/cluster.rs"]
mod cluster;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "support/control_plane.rs"]
mod control_plane;
#[path = "support/kustomize.rs"]
mod kustomize;
#[path = "knative/life.rs"]
mod life;
#[path = "knative/manifests.rs"]
mod manifests;
#[path = "knative/real.rs"]
mod real;
#[path = "knative/transitions.rs"]
mod transitions;
