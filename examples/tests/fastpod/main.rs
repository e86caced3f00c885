//! FaSTPods: decisions, on a cluster as a value; requests to a mock of the API server; and the manifests.
#![cfg(feature = "kubernetes")]

#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/api_server.rs"]
mod api_server;
mod backoff;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/cluster.rs"]
mod cluster;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/control_plane.rs"]
mod control_plane;
mod decisions;
#[path = "../support/kustomize.rs"]
mod kustomize;
mod lease;
mod life;
mod manifests;
mod manners;
mod monitoring;
mod node_hooks;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/policy.rs"]
mod policy;
mod requests;
mod tenants;
