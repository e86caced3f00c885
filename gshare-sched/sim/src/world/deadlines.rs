//! The book's part for bounds: the deadlines of a platform with this [`PlatformConfig`], in every regime.
//!
//! # Rules
//! - a request waits until its deadline at most, and no longer than the longest wait since its arrival, also after the end of an
//!   instance that had it; it is dispatched no more often than it may;
//! - a new request does not wait where as many requests of its function wait as may;
//! - an instance is ready, parked, back or drained in time, or it is stopped; so is an instance of a removed function;
//! - a function has its minimum of instances once all is quiet.

use gshare_core::{Duration, FunctionId, InstanceId, RequestId, Timestamp};
use gshare_sched::platform::PlatformConfig;
use std::collections::{BTreeMap, BTreeSet};

/// An instance's duty with a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    Start,
    Move,
    Drain,
}

/// One end for each key.
#[derive(Debug)]
struct Ends<K> {
    by_time: BTreeSet<(Timestamp, K)>,
    by_key: BTreeMap<K, Timestamp>,
}

impl<K: Copy + Ord> Ends<K> {
    fn set(&mut self, key: K, at: Timestamp) {
        self.clear(key);
        self.by_key.insert(key, at);
        self.by_time.insert((at, key));
    }

    fn clear(&mut self, key: K) -> bool {
        let before = self.by_key.remove(&key);
        before.is_some_and(|at| self.by_time.remove(&(at, key)))
    }

    /// The first key with an end before this time.
    fn passed(&self, now: Timestamp) -> Option<K> {
        self.by_time.first().filter(|(at, _)| *at < now).map(|(_, key)| *key)
    }
}

impl<K> Default for Ends<K> {
    fn default() -> Self {
        Self { by_time: BTreeSet::new(), by_key: BTreeMap::new() }
    }
}

/// The ends of waits and orders, by the bounds of a platform.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    config: PlatformConfig,
    waits: Ends<RequestId>,
    waiting: BTreeMap<FunctionId, u32>,
    due: Ends<(InstanceId, Due)>,
}

impl Deadlines {
    pub(super) fn new(config: PlatformConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Checks that nothing has an end before this time.
    pub(super) fn keep(&self, now: Timestamp) -> Result<(), String> {
        if let Some(request) = self.waits.passed(now) {
            return Err(format!("{request} waits for longer than it may"));
        }
        match self.due.passed(now) {
            Some((instance, due)) => {
                Err(format!("{instance} has not done its {due:?} in time, and is not stopped"))
            }
            None => Ok(()),
        }
    }

    /// The request waits from now on, since it came at this time.
    pub(super) fn waits(
        &mut self,
        request: RequestId,
        function: FunctionId,
        (arrived, deadline): (Timestamp, Option<Timestamp>),
    ) {
        let longest = arrived.saturating_add(self.config.max_wait);
        self.waits.set(request, deadline.map_or(longest, |deadline| deadline.min(longest)));
        *self.waiting.entry(function).or_default() += 1;
    }

    /// The request waits no longer, if it did.
    pub(super) fn leaves(&mut self, request: RequestId, function: FunctionId) {
        if self.waits.clear(request)
            && let Some(waiting) = self.waiting.get_mut(&function)
        {
            *waiting -= 1;
        }
    }

    /// Checks the number of waiting requests after a request has come.
    pub(super) fn may_wait(&self, request: RequestId, function: FunctionId) -> Result<(), String> {
        let (waits, most) = (self.waiting.get(&function).copied().unwrap_or(0), self.config.max_waiting);
        match self.waits.by_key.contains_key(&request) && waits > most {
            true => Err(format!("{request} waits beside {} others of {function}, of {most}", waits - 1)),
            false => Ok(()),
        }
    }

    /// Checks that a request may be dispatched once more.
    pub(super) fn may_try(&self, request: RequestId, attempts: u32) -> Result<(), String> {
        match attempts > self.config.max_attempts.into() {
            true => Err(format!("{request} is dispatched for the {attempts}th time")),
            false => Ok(()),
        }
    }

    /// The instance has the time of the bound for this, or twice the expected time.
    pub(super) fn begins(&mut self, now: Timestamp, instance: InstanceId, due: Due, expected: Duration) {
        let bound = match due {
            Due::Start => self.config.start_timeout,
            Due::Move => self.config.park_timeout,
            Due::Drain => self.config.drain_timeout,
        };
        let time = bound.max(expected.saturating_mul(2));
        self.due.set((instance, due), now.saturating_add(time));
    }

    pub(super) fn ends(&mut self, instance: InstanceId, due: Due) {
        self.due.clear((instance, due));
    }

    /// The instance is stopped or gone.
    pub(super) fn over(&mut self, instance: InstanceId) {
        for due in [Due::Start, Due::Move, Due::Drain] {
            self.ends(instance, due);
        }
    }
}
