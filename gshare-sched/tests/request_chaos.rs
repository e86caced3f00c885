//! The request scheduler in a cluster where everything goes wrong; `cargo run --release --example request_chaos` runs
//! a thousand seeds.

#[path = "support/request_chaos.rs"]
mod chaos;

use gshare_sim::request::Fate;

/// Every request is served once or rejected once, whatever happens; `simulate` checks the rest at each step.
#[test]
fn every_request_ends_once_whatever_goes_wrong() {
    let (mut served, mut rejected) = (0, 0);
    for seed in 0..60 {
        let outcome = chaos::run(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(outcome.fates.len(), 200);
        for fate in &outcome.fates {
            match fate {
                Fate::Served { .. } => served += 1,
                Fate::Rejected { .. } => rejected += 1,
            }
        }
    }
    assert!(served > rejected, "{served} served, {rejected} rejected");
}

#[test]
fn a_chaotic_run_replays_exactly() {
    let run = || format!("{:?}", chaos::run(7).unwrap());
    assert_eq!(run(), run());
}
