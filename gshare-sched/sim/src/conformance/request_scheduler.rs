//! Whether a scheduler of requests keeps its promises, in clusters of [`request::chaos`](crate::request_cluster::chaos), with
//! unexpected losses of GPUs, failed loads and dead processes, and under the checks of [`simulate`].

use super::story::{Log, Story};
use crate::request_cluster::{chaos, simulate};
use core::ops::Range;
use gshare_core::Duration;
use gshare_sched::request::RequestScheduler;

const ONCE: &str = "each request is served or rejected once, on a GPU that has its model, within the GPU's memory and the model's copies";

/// The time within which a request without its own deadline must be complete.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the suite over the schedulers of `make`, which must be equal, without GPUs and without models.
///
/// # Errors
/// The first broken claim.
pub fn request_scheduler(
    make: &dyn Fn() -> Box<dyn RequestScheduler>,
    seeds: Range<u64>,
) -> Result<(), Story> {
    for seed in seeds {
        let mut work = chaos(seed);
        for arrival in &mut work.arrivals {
            // A model may fit no present kind of GPU. It may wait for another GPU, but not for ever.
            arrival.deadline.get_or_insert(arrival.at + PATIENCE);
        }
        let run = || {
            let log = Log::default();
            let mut scheduler = log.watch(make(), false);
            let outcome = simulate(&mut scheduler, &work, seed, None);
            outcome.map_err(|wrong| log.story(seed, (ONCE, wrong))).map(|_| log)
        };
        let (log, again) = (run()?, run()?);
        log.is_repeated_by(&again).map_err(|broken| log.story(seed, broken))?;
    }
    Ok(())
}
