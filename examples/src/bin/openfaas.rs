//! An OpenFaaS provider for one node: see [`gshare_examples::openfaas`].
//!
//! `cargo build -p gshare-examples -p gshare-hook -p gshare-fake-cuda && target/debug/openfaas --sim`

use clap::Parser as _;

fn main() -> anyhow::Result<()> {
    gshare_examples::openfaas::serve(&gshare_examples::openfaas::Options::parse())
}
