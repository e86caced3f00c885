//! Shares of this node's GPUs for Kubernetes' own scheduler: see [`gshare_examples::kubernetes::dra`].

use clap::Parser as _;
use gshare_examples::kubernetes::dra::command::{Options, run};

#[tokio::main]
async fn main() -> std::process::ExitCode {
    gshared::report::exit(run(Options::parse()).await)
}
