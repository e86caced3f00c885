//! The suite for orders of waiting requests: the contract of [`QueueOrder`].
//!
//! # Runs
//! Queues have up to 20 requests with waits up to a minute, some with an SLO. The suite empties them one request at a time while
//! other requests arrive; then it runs **the same again**, which must give the same answers.

use crate::rng::Rng;
use crate::story::Story;
use core::ops::Range;
use gshare_core::{Duration, RequestId, Timestamp};
use gshare_sched::platform::{QueueOrder, WaitQueue};
use std::collections::BTreeSet;

const WAITS: &str = "the request that is served is one that waits";
const SAME: &str = "the same questions have the same answers";
/// The number of requests in a run.
const REQUESTS: u64 = 200;

/// Runs the suite over the orders of `make`.
///
/// # Errors
/// The first broken claim, with its story.
pub fn queue_order(make: &dyn Fn() -> Box<dyn QueueOrder>, seeds: Range<u64>) -> Result<(), Story> {
    for seed in seeds {
        let (once, again) = (run(make().as_mut(), seed)?, run(make().as_mut(), seed)?);
        if let Some(differ) = once.iter().zip(&again).position(|(one, other)| one != other) {
            let wrong = format!("{} once, and {} in the run after it", once[differ], again[differ]);
            let events = once[..differ].iter().map(ToString::to_string).collect();
            return Err(Story {
                claim: SAME,
                seed: Some(seed),
                at: format!("answer {differ}"),
                wrong,
                events,
            });
        }
    }
    Ok(())
}

/// The requests in the order of their service.
fn run(order: &mut dyn QueueOrder, seed: u64) -> Result<Vec<RequestId>, Story> {
    let mut rng = Rng::new(seed);
    let slo = (rng.below(3) > 0).then(|| Duration::from_millis(rng.between(10, 2_000)));
    let (mut waiting, mut served, mut came) = (BTreeSet::new(), Vec::new(), 0);
    let mut now = Timestamp::ZERO.saturating_add(Duration::from_secs(60));
    while came < REQUESTS || !waiting.is_empty() {
        while came < REQUESTS && (waiting.is_empty() || (waiting.len() < 20 && rng.below(2) == 0)) {
            let waits = Duration::from_millis(rng.below(60_000));
            let arrived =
                Timestamp::ZERO.saturating_add(now.saturating_since(Timestamp::ZERO.saturating_add(waits)));
            waiting.insert((arrived, RequestId::new(came)));
            came += 1;
        }
        now = now.saturating_add(Duration::from_millis(rng.below(50)));
        let takes = Duration::from_millis(rng.between(1, 100));
        let queue = WaitQueue {
            waiting: &waiting,
            done: now.saturating_add(takes),
            slo,
            backlog: Duration::from_nanos(takes.as_nanos() * waiting.len() as u64),
        };
        let chosen = order.next(&queue);
        let Some(chosen) = chosen.filter(|chosen| waiting.remove(chosen)) else {
            let wrong = format!("{chosen:?} is served, and these wait: {waiting:?}");
            let events = served.iter().map(ToString::to_string).collect();
            return Err(Story { claim: WAITS, seed: Some(seed), at: now.to_string(), wrong, events });
        };
        served.push(chosen.1);
    }
    Ok(served)
}
