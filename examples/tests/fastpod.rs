//! FaSTPods: what is decided, on a cluster that is a value; what is asked of an API server, before a mock of it; and the
//! manifests.
#![cfg(feature = "kubernetes")]

#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "support/api_server.rs"]
mod api_server;
#[path = "fastpod/backoff.rs"]
mod backoff;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "support/cluster.rs"]
mod cluster;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "support/control_plane.rs"]
mod control_plane;
#[path = "fastpod/decisions.rs"]
mod decisions;
#[path = "support/kustomize.rs"]
mod kustomize;
#[path = "fastpod/lease.rs"]
mod lease;
#[path = "fastpod/life.rs"]
mod life;
#[path = "fastpod/manifests.rs"]
mod manifests;
#[path = "fastpod/manners.rs"]
mod manners;
#[path = "fastpod/monitoring.rs"]
mod monitoring;
#[path = "fastpod/node.rs"]
mod node;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "support/policy.rs"]
mod policy;
#[path = "fastpod/requests.rs"]
mod requests;
#[path = "fastpod/tenants.rs"]
mod tenants;
