//! FaSTPods on Kubernetes: see [`gshare_examples::kubernetes::fastpod`].

use clap::Parser as _;
use gshare_examples::kubernetes::fastpod::command::{Options, run};

#[tokio::main]
async fn main() -> std::process::ExitCode {
    gshared::report::exit(run(Options::parse()).await)
}
