//! An OpenFaaS provider for one node: see [`gshare_openfaas`].
//!
//! `cargo build -p gshare-openfaas -p gshare-hook -p gshare-fake-cuda && target/debug/gshare-openfaas --sim`

use clap::Parser as _;

fn main() -> anyhow::Result<()> {
    gshare_openfaas::serve(&gshare_openfaas::Options::parse())
}
