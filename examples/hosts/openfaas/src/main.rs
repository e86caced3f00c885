//! An OpenFaaS provider for one node: see [`gshare_openfaas`].
//!
//! `cargo build -p gshare-openfaas -p gshare-hook -p gshare-fake-cuda && target/debug/gshare-openfaas --sim`

use std::process::ExitCode;

fn main() -> ExitCode {
    gshared::report::exit(gshare_openfaas::Builder::from_args().serve())
}
