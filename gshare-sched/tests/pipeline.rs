//! Pipelines: how they are cut, which slices they get, and where requests go.

#[path = "support/pipeline.rs"]
mod support;

mod pipeline_assign;
mod pipeline_bottleneck;
mod pipeline_input;
mod pipeline_routing;
