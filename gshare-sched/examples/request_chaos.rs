//! Chaos over many seeds: `cargo run --release -p gshare-sched --example request_chaos -- 1000`.

#[path = "../tests/support/request_chaos.rs"]
mod chaos;

use gshare_sim::request_cluster::Fate;
use std::collections::BTreeMap;

fn main() {
    let seeds: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1000);
    let (mut served, mut events, mut failed) = (0u64, 0u64, 0u64);
    let mut rejected: BTreeMap<_, u64> = BTreeMap::new();
    let mut longest = gshare_core::Duration::ZERO;
    for seed in 0..seeds {
        match chaos::run(seed) {
            Err(error) => {
                failed += 1;
                println!("seed {seed}: {error}");
            }
            Ok(outcome) => {
                events += outcome.events;
                for fate in outcome.fates {
                    match fate {
                        Fate::Served { waited, .. } => {
                            served += 1;
                            longest = longest.max(waited);
                        }
                        Fate::Rejected { reason, .. } => *rejected.entry(reason).or_default() += 1,
                    }
                }
            }
        }
    }
    println!("{seeds} seeds, {events} events, {failed} failed; {served} served, longest wait {longest}");
    println!("rejected: {rejected:?}");
    if failed > 0 {
        std::process::exit(1);
    }
}
