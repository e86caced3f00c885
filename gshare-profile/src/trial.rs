//! One trial: start the function, let it warm up, and measure until the figures are sure enough.
//!
//! # Algorithm
//! 1. Start the function; it must be ready within `start_timeout`.
//! 2. **Warm up**: make calls until two windows of ten calls look alike ([`is_steady`](crate::stats::is_steady)), for at
//!    most `max_warmup`. A function without a steady state has no throughput to be measured. In an open loop this shows a
//!    load beyond the function, since its queue grows for ever.
//! 3. **Measure**: make calls until there are `min_calls` and the interval of the throughput is within `precision` of it, or
//!    until `max_time` is over.
//! 4. **Look back**: do the halves of the measurement look alike? If not, the warm-up had only paused: the measurement is
//!    dropped, and step 3 runs again, three times in all. In an open loop the queue must not have grown by a fifth of
//!    the calls.
//! 5. Wait for the last calls, and stop the function, also after an error.
//!
//! No wait is without end: a call not answered within `answer_timeout` ends the trial, and so does a queue of
//! [`MAX_QUEUE`] calls.
//!
//! # Cost
//! Memory for each call of the trial (24 bytes).

use crate::executor::{ExecError, Executor};
use crate::load::Load;
use crate::meter::Utilisation;
use crate::planner::Measurement;
use crate::stats::{self, Call, Interval};
use gshare_core::profile::{ProfileError, ProfilePoint, Setting};
use gshare_core::{BasisPoints, ConfigError, Duration, Timestamp};
use std::collections::VecDeque;

/// The most calls due and not yet taken by the function.
pub const MAX_QUEUE: usize = 10_000;

/// Calls of an open loop with the function at a time: its time is then its own.
const OPEN_AT_ONCE: u32 = 1;
/// Calls in a window of the warm-up: enough for a mean, few enough for a slow function.
const WINDOW: usize = 10;
/// The most measurements begun in one trial.
const MEASUREMENTS: usize = 3;

gshare_core::config! {
    /// Settings of a trial.
    #[derive(Debug, Clone, PartialEq)]
    pub struct TrialConfig {
        /// How calls are made. One at a time: the function is always busy, and its time is its own.
        pub load: Load = Load::Closed { in_flight: 1 }, with_load;
        /// How much the means of two windows may differ. 5 %.
        pub steady_tolerance: BasisPoints = BasisPoints::percent(5), with_steady_tolerance;
        /// Longest warm-up. 30 s: several times what just-in-time compilers and clocks take.
        pub max_warmup: Duration = Duration::from_secs(30), with_max_warmup;
        /// The least number of measured calls. 60: three in each group of the interval.
        pub min_calls: usize = 60, with_min_calls;
        /// Wanted half width of the interval. 2 %.
        pub precision: BasisPoints = BasisPoints::percent(2), with_precision;
        /// Longest measurement. 30 s, as in Dilu's Table 2.
        pub max_time: Duration = Duration::from_secs(30), with_max_time;
        /// Time in which the function must be ready. 120 s: a cold start of a large model.
        pub start_timeout: Duration = Duration::from_secs(120), with_start_timeout;
        /// Time in which a call must be answered. 30 s.
        pub answer_timeout: Duration = Duration::from_secs(30), with_answer_timeout;
    }
}

impl TrialConfig {
    /// Refuses what cannot be.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.load.check()?;
        let (ms, day) = (Duration::from_millis(1), Duration::from_secs(86_400));
        gshare_core::check_fields!(self {
            min_calls in 2 * stats::GROUPS..=1_000_000, "need 40 to 1000000";
            max_warmup, max_time, start_timeout, answer_timeout in ms..=day, "need 1ms to one day";
        })
    }
}

/// The measured figures of a trial.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Measured {
    /// Figures for a planner: throughput, and latency in the function.
    pub measurement: Measurement,
    /// Requests per second.
    pub throughput: Interval,
    /// 99th percentile of the time in the function, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "p99_ns"))]
    pub p99: Duration,
    /// 95th percentile of the time since a call was due, in ns: with the wait in the queue. In a closed loop, the time in the
    /// function.
    #[cfg_attr(feature = "serde", serde(rename = "p95_with_wait_ns"))]
    pub p95_with_wait: Duration,
    /// Calls of the measurement, and of the warm-up.
    pub calls: u64,
    /// See `calls`.
    pub warmup_calls: u64,
    /// How busy the GPU was while it was measured; `None` where no meter could tell.
    #[cfg_attr(feature = "serde", serde(default))]
    pub utilisation: Option<Utilisation>,
}

/// Why a trial has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TrialError {
    /// The function did not run.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// The configuration cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A call was not answered.
    #[error("a call was not answered within {within}")]
    Hung {
        /// The time allowed.
        within: Duration,
    },
    /// The warm-up did not end.
    #[error(
        "not steady after {calls} calls in {within}: either it has no steady state, or the load is not met"
    )]
    NotSteady {
        /// Answered calls.
        calls: usize,
        /// The time allowed.
        within: Duration,
    },
    /// The queue grew too long.
    #[error("{queued} calls wait: the load is not met")]
    LoadNotMet {
        /// Calls in the queue.
        queued: usize,
    },
    /// Too few calls for an interval in the time allowed.
    #[error("{calls} calls in {within}, need {need}: it is too slow to be measured in that time")]
    TooFewCalls {
        /// Answered calls.
        calls: usize,
        /// The time allowed.
        within: Duration,
        /// How many it takes.
        need: usize,
    },
    /// The measured figures are no point of a profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

impl TrialError {
    /// Whether other settings fail just the same, and a run has to end.
    pub const fn is_fatal(&self) -> bool {
        matches!(self, Self::Config(_) | Self::Exec(ExecError::Unavailable(_)))
    }
}

/// Runs one trial. See the [module](self).
pub fn measure(
    executor: &mut dyn Executor,
    setting: Setting,
    config: &TrialConfig,
) -> Result<Measured, TrialError> {
    config.check()?;
    let started = executor.start(setting, config.start_timeout);
    let result = started.map_err(TrialError::from).and_then(|ready| {
        let run = Run::new(executor, config);
        run.drive()?.result(setting, ready.load)
    });
    executor.stop();
    result
}

struct Run<'a> {
    executor: &'a mut dyn Executor,
    config: &'a TrialConfig,
    calls: crate::load::Calls,
    /// Calls due and not with the function yet.
    queue: VecDeque<Timestamp>,
    /// Calls with the function: when due, when sent.
    sent: VecDeque<(Timestamp, Timestamp)>,
    last_done: Timestamp,
    answered: Vec<Call>,
}

struct Answers {
    begin: Timestamp,
    calls: Vec<Call>,
    warmup: usize,
    rate: Interval,
    utilisation: Option<Utilisation>,
}

impl<'a> Run<'a> {
    fn new(executor: &'a mut dyn Executor, config: &'a TrialConfig) -> Self {
        let now = executor.now();
        let calls = config.load.calls(now);
        let (queue, sent) = (VecDeque::new(), VecDeque::new());
        Self { executor, config, calls, queue, sent, last_done: now, answered: Vec::new() }
    }

    /// The most calls with the function at a time.
    fn room(&self) -> usize {
        let most = match self.config.load {
            Load::Closed { in_flight } => in_flight,
            _ => OPEN_AT_ONCE,
        };
        most as usize
    }

    /// Makes the due calls.
    fn submit(&mut self, now: Timestamp) -> Result<(), TrialError> {
        let closed = self.calls.due().is_none();
        while let Some(due) = self.calls.due().filter(|due| *due <= now) {
            self.queue.push_back(due);
            self.calls.advance();
            if self.queue.len() > MAX_QUEUE {
                return Err(TrialError::LoadNotMet { queued: self.queue.len() });
            }
        }
        while self.sent.len() < self.room() {
            let due = if closed {
                now
            } else {
                let Some(due) = self.queue.pop_front() else { break };
                due
            };
            self.executor.submit()?;
            self.sent.push_back((due, now));
        }
        Ok(())
    }

    /// The next answer, or `None` when `end` has come.
    fn answer(&mut self, end: Timestamp) -> Result<Option<Call>, TrialError> {
        loop {
            let now = self.executor.now();
            self.submit(now)?;
            if now >= end {
                return Ok(None);
            }
            let timeout = self.config.answer_timeout;
            let given_up = self.sent.front().map(|(_, sent)| sent.saturating_add(timeout));
            let next_call = self.calls.due();
            let until = [Some(end), given_up, next_call].into_iter().flatten().min().unwrap_or(end);
            if let Some(done) = self.executor.wait(until)? {
                // An answer without a call counts for nothing.
                let Some((due, sent)) = self.sent.pop_front() else { continue };
                // The function takes the next call only when it has answered the previous call.
                let call = Call { due, sent: sent.max(self.last_done), done };
                self.last_done = done;
                return Ok(Some(call));
            }
            if given_up.is_some_and(|given_up| self.executor.now() >= given_up) {
                return Err(TrialError::Hung { within: timeout });
            }
        }
    }

    /// Waits for the calls with the function, so a hanging call is not passed over because time is up.
    fn finish(&mut self) -> Result<(), TrialError> {
        while let Some((_, sent)) = self.sent.front() {
            let within = self.config.answer_timeout;
            let given_up = sent.saturating_add(within);
            match self.executor.wait(given_up)? {
                Some(_) => drop(self.sent.pop_front()),
                None if self.executor.now() >= given_up => return Err(TrialError::Hung { within }),
                None => {}
            }
        }
        Ok(())
    }

    fn drive(mut self) -> Result<Answers, TrialError> {
        let warmup = self.warm_up()?;
        let config = self.config;
        for _ in 0..MEASUREMENTS {
            let (begin, queued) = (self.last_done, self.queue.len());
            self.answered.clear();
            self.executor.begin_metering();
            let rate = self.gather(begin)?;
            let utilisation = self.executor.end_metering();
            let calls = self.answered.len();
            let grown = self.queue.len().saturating_sub(queued);
            if grown > 10 && grown > calls / 5 {
                return Err(TrialError::LoadNotMet { queued: self.queue.len() });
            }
            let latencies: Vec<_> = self.answered.iter().map(Call::latency).collect();
            if stats::is_steady(&latencies, calls / 2, config.steady_tolerance.as_fraction()) {
                self.finish()?;
                let Some(rate) = rate else {
                    let need = 2 * stats::GROUPS;
                    return Err(TrialError::TooFewCalls { calls, within: config.max_time, need });
                };
                return Ok(Answers { begin, calls: self.answered, warmup, rate, utilisation });
            }
        }
        let calls = warmup + self.answered.len();
        Err(TrialError::NotSteady { calls, within: config.max_time })
    }

    /// Step 2. Answers how many calls it took.
    fn warm_up(&mut self) -> Result<usize, TrialError> {
        let config = self.config;
        let end = self.executor.now().saturating_add(config.max_warmup);
        let mut latencies = Vec::new();
        loop {
            let Some(call) = self.answer(end)? else {
                return Err(TrialError::NotSteady { calls: latencies.len(), within: config.max_warmup });
            };
            latencies.push(call.latency());
            // Looked at once per window, for the same reason as below.
            if latencies.len().is_multiple_of(WINDOW)
                && stats::is_steady(&latencies, WINDOW, config.steady_tolerance.as_fraction())
            {
                return Ok(latencies.len());
            }
        }
    }

    /// Step 3. Answers the throughput in calls; `None` of too few.
    fn gather(&mut self, begin: Timestamp) -> Result<Option<Interval>, TrialError> {
        let config = self.config;
        let end = begin.saturating_add(config.max_time);
        let (mut done, mut look_at) = (Vec::new(), config.min_calls);
        while let Some(call) = self.answer(end)? {
            self.answered.push(call);
            done.push(call.done);
            if done.len() == look_at {
                // Looked at ever more seldom: the more often it is asked, the sooner chance says yes.
                look_at = look_at.saturating_mul(2);
                let rate = stats::rate(begin, &done);
                if rate.is_some_and(|rate| rate.half_width() <= config.precision.as_fraction()) {
                    return Ok(rate);
                }
            }
        }
        Ok(stats::rate(begin, &done))
    }
}

impl Answers {
    fn result(self, setting: Setting, load: Option<Duration>) -> Result<Measured, TrialError> {
        debug_assert!(self.calls.iter().all(|call| call.done >= self.begin), "measured after the warm-up");
        let mut exec: Vec<_> = self.calls.iter().map(Call::exec).collect();
        let mut latency: Vec<_> = self.calls.iter().map(Call::latency).collect();
        exec.sort_unstable();
        latency.sort_unstable();
        let requests = f64::from(setting.batch);
        let of = |calls: f64| calls * requests;
        let throughput =
            Interval { low: of(self.rate.low), mean: of(self.rate.mean), high: of(self.rate.high) };
        let [p50, p95, p99] = [50, 95, 99].map(|percent| stats::percentile(&exec, percent));
        let point =
            ProfilePoint::measured(setting.sm, setting.quota, setting.batch, throughput.mean, p50, p95)?;
        Ok(Measured {
            measurement: Measurement { point, load },
            throughput,
            p99,
            p95_with_wait: stats::percentile(&latency, 95),
            calls: self.calls.len() as u64,
            warmup_calls: self.warmup as u64,
            utilisation: self.utilisation,
        })
    }
}
