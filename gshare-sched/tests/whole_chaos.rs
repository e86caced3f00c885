//! Whole devices where everything goes wrong.

use gshare_sched::platform::{Locality, WholeConfig, WholePolicy};
use gshare_sim::Rng;
use gshare_sim::conformance::whole_policy;
use gshare_sim::scenario::LoadBalance;

/// A policy for a seed.
fn policy(seed: u64) -> Box<dyn WholePolicy> {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let skip_limit = u32::try_from(rng.below(30)).unwrap_or(0);
    match rng.below(4) {
        0 => Box::new(LoadBalance),
        1 => Box::new(Locality::new(&WholeConfig::paper(0))),
        2 => Box::new(Locality::new(&WholeConfig::paper(skip_limit))),
        _ => Box::new(Locality::new(&WholeConfig::default().with_skip_limit(skip_limit))),
    }
}

/// Every request is served once or rejected once, in time, with any faults; the suite checks the rest at each step.
#[test]
fn every_request_ends_once_whatever_goes_wrong() {
    let (mut answered, mut rejected) = (0, 0);
    for seed in 0..60 {
        let outcome =
            whole_policy(&|| policy(seed), seed..seed + 1).unwrap_or_else(|story| panic!("{story}"));
        answered += outcome.functions.iter().map(|one| one.answered).sum::<u64>();
        rejected += outcome.functions.iter().flat_map(|one| one.rejected.values()).sum::<u64>();
    }
    assert!(answered > 5_000 && answered > rejected, "{answered} answered, {rejected} rejected");
}
