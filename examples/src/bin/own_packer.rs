//! A packer of the host's own in forty lines, the first fit of `own_host`. The public suite checks it, and it runs beside ours on the same
//! load and in the same scenario of a whole platform.
//!
//! `cargo run -p gshare-examples --bin own_packer`

#[path = "../../own_host/src/first_fit.rs"]
mod first_fit;

use first_fit::FirstFit;
use gshare_sched::pack::{MaxRects, MaxRectsConfig, Packer};
use gshare_sched::place::{DiluConfig, DiluPacker};
use gshare_sim::conformance::{Shares, packer};
use gshare_sim::packing::{Churn, churn};
use gshare_sim::scenario::{Own, Scenario};
use gshare_sim::world;

fn main() -> anyhow::Result<()> {
    let own = || -> Box<dyn Packer> { Box::new(FirstFit::new(|_| {})) };
    packer(&own, Shares::Rectangles, 0..100)?;
    println!("first_fit keeps the contract of Packer: 100 seeds\n");
    let max_rects = || -> Box<dyn Packer> { Box::new(MaxRects::new(MaxRectsConfig::default())) };
    let dilu: Box<dyn Packer> = Box::new(DiluPacker::new(DiluConfig::default())?);
    println!("packer     GPUs in use  placed  refused");
    for (name, packer) in [("first_fit", own()), ("max_rects", max_rects()), ("dilu", dilu)] {
        let packed = churn(packer, &Churn::default())?;
        let used = packed.gpus_per_gpu_asked();
        println!("{name:<10} {used:>11.3}  {:>6}  {:>7}", packed.placed, packed.refused);
    }

    // The scenario's file names the policies of the platform; the program adds a name.
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/scenarios/platform/all.toml");
    println!("\nfunctions with an SLO\npacker     requests  answered  in time");
    for name in ["first_fit", "max_rects", "dilu"] {
        let set = [("policies.packer", name), ("length", "20s")];
        let set = set.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let mut scenario = Scenario::read(file.as_ref(), &set)?;
        scenario.own = Own::default().with_packer("first_fit", own);
        let outcome = world::run(&scenario.plan()?, 1, || scenario.platform())?;
        let of: Vec<_> = outcome.functions.iter().filter(|of| of.slo.is_some()).collect();
        let sum = |figure: fn(&world::FunctionOutcome) -> u64| of.iter().map(|of| figure(of)).sum::<u64>();
        let (requests, answered) = (sum(|of| of.requests), sum(|of| of.answered));
        println!("{name:<10} {requests:>8}  {answered:>8}  {:>7}", sum(|of| of.within_slo));
    }
    Ok(())
}
