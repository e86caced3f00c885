//! An OpenFaaS provider for one node: see [`gshare_openfaas`].
//!
//! `cargo build -p gshare-openfaas -p gshare-hook -p gshare-fake-cuda && target/debug/gshare-openfaas --sim`

use std::process::ExitCode;

fn main() -> ExitCode {
    match gshare_openfaas::Builder::from_args().serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The causes in one line: a backtrace is of no use to an operator.
            eprintln!("openfaas: {error:#}");
            ExitCode::FAILURE
        }
    }
}
