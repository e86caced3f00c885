//! The manifests with their policies, the driver of claims, and the device plugin of a node.
#![cfg(feature = "kubernetes")]

#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/api_server.rs"]
mod api_server;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/cluster.rs"]
mod cluster;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/control_plane.rs"]
mod control_plane;
mod dra;
mod manifests;
mod monitoring;
mod node_hooks;
#[path = "../support/policy.rs"]
mod policy;
mod tenants;
