//! An OpenFaaS provider for one node: see [`gshare_examples::openfaas`].
//!
//! `cargo run -p gshare-examples --bin openfaas -- --sim`

use clap::Parser as _;

fn main() -> anyhow::Result<()> {
    gshare_examples::openfaas::serve(&gshare_examples::openfaas::Options::parse())
}
