//! A packer of the host's own in ten lines: it is checked by the public suite, and runs beside ours on the same load.
//!
//! `cargo run -p gshare-examples --bin own_packer`

use gshare_core::GpuId;
use gshare_core::pack::{Demand, Packer};
use gshare_sched::pack::by_rule::{ByRule, Candidate, ChoiceRule};
use gshare_sched::pack::{MaxRects, MaxRectsConfig};
use gshare_sched::place::{DiluConfig, DiluPacker};
use gshare_sim::conformance::{Shares, packer};
use gshare_sim::packing::{Churn, churn};

/// First fit by sums: the lowest GPU whose SM shares suffice. Ids, memory and groups are kept by [`ByRule`].
struct FirstFit;

impl ChoiceRule for FirstFit {
    fn choose(&self, demand: &Demand, candidates: &[Candidate<'_>]) -> Option<GpuId> {
        let used = |on: &Candidate| on.held.iter().map(|held| u32::from(held.demand.sm.get())).sum::<u32>();
        let fits = |on: &&Candidate| used(on) + u32::from(demand.sm.get()) <= on.spec.sm.get().into();
        candidates.iter().find(fits).map(|found| found.gpu)
    }
}

fn main() -> anyhow::Result<()> {
    let own = || -> Box<dyn Packer> { Box::new(ByRule::new(FirstFit)) };
    packer(&own, Shares::Sums, 0..100)?;
    println!("first_fit keeps the contract of Packer: 100 seeds\n");
    let max_rects = || -> Box<dyn Packer> { Box::new(MaxRects::new(MaxRectsConfig::default())) };
    let dilu: Box<dyn Packer> = Box::new(DiluPacker::new(DiluConfig::default())?);
    println!("packer     GPUs in use  placed  refused");
    for (name, packer) in [("first_fit", own()), ("max_rects", max_rects()), ("dilu", dilu)] {
        let packed = churn(packer, &Churn::default())?;
        let used = packed.gpus_per_gpu_asked();
        println!("{name:<10} {used:>11.3}  {:>6}  {:>7}", packed.placed, packed.refused);
    }
    Ok(())
}
