//! An autoscaler class for Knative Serving: see [`gshare_examples::knative`].
//!
//! `cargo run -p gshare-examples --bin knative -- --dry-run`

use clap::Parser as _;

fn main() -> std::process::ExitCode {
    gshared::report::exit(gshare_examples::knative::serve(&gshare_examples::knative::Options::parse()))
}
