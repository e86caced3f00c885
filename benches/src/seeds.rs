//! Simulations of many seeds at once. The caller gets the results in the order of the seeds. The output and the first failing seed
//! therefore do not depend on the number of CPUs.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

/// How many CPUs there are; one if that is not known.
pub fn cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Calls `run` for every seed, on `threads` threads, and `take` with each result, by seed and on this thread, until it breaks.
pub fn in_order<T: Send, B>(
    threads: usize,
    seeds: Range<u64>,
    run: impl Fn(u64) -> T + Sync,
    mut take: impl FnMut(u64, T) -> ControlFlow<B>,
) -> ControlFlow<B> {
    let next = AtomicU64::new(seeds.start);
    thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..threads.max(1) {
            let (sender, run, next, end) = (sender.clone(), &run, &next, seeds.end);
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    // The receiver is gone once `take` has stopped.
                    if seed >= end || sender.send((seed, run(seed))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let (mut early, mut wanted) = (BTreeMap::new(), seeds.start);
        for (seed, result) in results {
            early.insert(seed, result);
            while let Some(result) = early.remove(&wanted) {
                if let stop @ ControlFlow::Break(_) = take(wanted, result) {
                    return stop;
                }
                wanted += 1;
            }
        }
        ControlFlow::Continue(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_by_seed_whatever_each_takes() {
        let mut seen = Vec::new();
        let run =
            |seed: u64| (0..(seed * 7919) % 100_000).fold(seed, |hash, step| hash.rotate_left(5) ^ step);
        let all = in_order(7, 3..200, run, |seed, result| {
            seen.push((seed, result));
            ControlFlow::<()>::Continue(())
        });
        assert_eq!(all, ControlFlow::Continue(()));
        assert_eq!(seen, (3..200).map(|seed| (seed, run(seed))).collect::<Vec<_>>());
    }

    #[test]
    fn the_first_seed_that_breaks_is_the_last_that_is_taken() {
        let mut taken = Vec::new();
        let stop = in_order(
            7,
            0..u64::MAX,
            |seed| seed % 10 >= 7,
            |seed, breaks| {
                taken.push(seed);
                if breaks { ControlFlow::Break(seed) } else { ControlFlow::Continue(()) }
            },
        );
        assert_eq!((stop, taken), (ControlFlow::Break(7), (0..=7).collect()));
    }
}
