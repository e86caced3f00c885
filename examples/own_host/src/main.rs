//! `gshare up` with a packer and a scaler of its own. Everything else is ours: profiles, processes, daemon, proxy.
//!
//! `cargo run --manifest-path examples/own_host/Cargo.toml -- --demo=end`

mod first_fit;

use first_fit::FirstFit;
use gshare_core::ConfigError;
use gshare_core::profile::RequestRate;
use gshare_openfaas::Builder;
use gshare_sched::pack::Packer;
use gshare_sched::platform::OwnPolicies;
use gshare_sched::scale::{HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler, Told};

fn first_fit() -> Box<dyn Packer> {
    Box::new(FirstFit::new(|placed| println!("first fit: {} on {}", placed.id, placed.gpu)))
}

/// A fifth of headroom: each load counts as a fifth more than it is.
fn with_headroom() -> Result<Box<dyn HorizontalScaler>, ConfigError> {
    let ours = HeuristicHorizontal::new(HeuristicHorizontalConfig::default())?;
    Ok(Box::new(Told::new(Box::new(ours), |function, load| {
        let load = RequestRate::from_milli(load.as_milli() * 6 / 5);
        println!("headroom: {function} is planned for {load}");
        load
    })))
}

fn main() -> anyhow::Result<()> {
    let (packer, scaler) = (Some(first_fit()), Some(with_headroom()?));
    Builder::from_args().policies(OwnPolicies { packer, scaler, ..OwnPolicies::default() }).serve()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_sim::conformance::{Shares, horizontal_scaler, packer};

    #[test]
    fn both_keep_their_contracts() {
        packer(&first_fit, Shares::Rectangles, 0..20).unwrap();
        horizontal_scaler(&|| with_headroom().unwrap(), 0..5).unwrap();
    }
}
