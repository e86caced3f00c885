//! Executors, which run a function at a setting.
//!
//! # Problem
//! The same trial must run against a process on a GPU, against a GPU that is only a table, and in a test against every
//! possible failure. So a trial knows five calls, and asks for the time like for everything else: an executor in virtual time
//! lets a whole grid be profiled in milliseconds.
//!
//! | executor | runs |
//! |---|---|
//! | `process::Process` (feature `process`) | a program of the user's, by a line protocol |
//! | [`Virtual`] | a function in virtual time: a mock, or with [`simulated_gpu`] a GPU from a profile |

use crate::load::Random;
use crate::meter::Utilisation;
use gshare_core::profile::{ProfileTable, Setting};
use gshare_core::{BasisPoints, Bytes, Duration, Timestamp};
use std::collections::VecDeque;

/// Why a trial cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// Nothing can be run at all: the run ends, and no trial is kept.
    #[error("cannot run the function: {0}")]
    Unavailable(String),
    /// The function cannot run at this setting; others may be possible.
    #[error("cannot run at this setting: {0}")]
    Refused(String),
    /// The function ended by itself.
    #[error("the function ended: {0}")]
    Ended(String),
    /// The function writes answers and does not read its requests.
    #[error("the function does not read its input; one that computes by itself has the protocol of steps")]
    Deaf,
    /// The function was not ready in time.
    #[error("not ready within {within}")]
    NotReady {
        /// The time allowed.
        within: Duration,
    },
}

/// A ready function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ready {
    /// Time to load, if it was seen.
    pub load: Option<Duration>,
}

/// Runs a function at one setting after the other.
pub trait Executor {
    /// Makes the function ready at a setting, within a time.
    fn start(&mut self, setting: Setting, within: Duration) -> Result<Ready, ExecError>;

    /// The time, by the executor's clock. It does not go back.
    fn now(&self) -> Timestamp;

    /// Gives the function a batch.
    fn submit(&mut self) -> Result<(), ExecError>;

    /// Waits until a batch is answered and gives the time of the answer, or `None` at `until`. Never waits longer.
    fn wait(&mut self, until: Timestamp) -> Result<Option<Timestamp>, ExecError>;

    /// The measured part of the trial begins now. Called between [`start`](Self::start) and
    /// [`stop`](Self::stop).
    fn begin_metering(&mut self) {}

    /// The measured part has ended: how busy the GPU was during it. `None` if the executor cannot know, as in virtual time.
    fn end_metering(&mut self) -> Option<Utilisation> {
        None
    }

    /// Ends the function, also while it computes. After this it can be started again.
    fn stop(&mut self);

    /// The most GPU memory taken by the last function, without the run-time's own. Asked after the function was stopped.
    ///
    /// # Errors
    /// When the memory cannot be seen, as by default.
    fn memory(&mut self) -> Result<Bytes, ExecError> {
        Err(ExecError::Unavailable("its memory cannot be seen".to_owned()))
    }
}

/// The behaviour of a function in virtual time when it gets a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The function answers after this time.
    After(Duration),
    /// Never answers.
    Hangs,
    /// The function ends, for this reason.
    Ends(String),
}

/// The behaviour of a function in virtual time when it is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begin {
    /// The function is ready after this time.
    Ready(Duration),
    /// The function cannot run there.
    Refused(String),
    /// The function never gets ready.
    Hangs,
}

/// Runs a function in virtual time. `begin` is asked at each start, `reply` at each batch with its number from 0.
#[derive(Debug)]
pub struct Virtual<B, R> {
    begin: B,
    reply: R,
    now: Timestamp,
    setting: Option<Setting>,
    number: u64,
    /// When each submitted batch is answered; `None`: never.
    ends: VecDeque<Option<Timestamp>>,
    ended: Option<String>,
}

impl<B, R> Virtual<B, R>
where
    B: FnMut(Setting) -> Begin,
    R: FnMut(Setting, u64) -> Reply,
{
    /// A function with this behaviour.
    pub const fn new(begin: B, reply: R) -> Self {
        Self {
            begin,
            reply,
            now: Timestamp::ZERO,
            setting: None,
            number: 0,
            ends: VecDeque::new(),
            ended: None,
        }
    }
}

impl<B, R> Executor for Virtual<B, R>
where
    B: FnMut(Setting) -> Begin,
    R: FnMut(Setting, u64) -> Reply,
{
    fn start(&mut self, setting: Setting, within: Duration) -> Result<Ready, ExecError> {
        self.stop();
        match (self.begin)(setting) {
            Begin::Ready(load) if load <= within => {
                self.now = self.now.saturating_add(load);
                self.setting = Some(setting);
                Ok(Ready { load: Some(load) })
            }
            Begin::Refused(reason) => Err(ExecError::Refused(reason)),
            _ => {
                self.now = self.now.saturating_add(within);
                Err(ExecError::NotReady { within })
            }
        }
    }

    fn now(&self) -> Timestamp {
        self.now
    }

    fn submit(&mut self) -> Result<(), ExecError> {
        let Some(setting) = self.setting else {
            return Err(ExecError::Ended("it was not started".to_owned()));
        };
        if self.ended.is_none() {
            let free = match self.ends.back() {
                Some(None) => None,
                Some(Some(end)) => Some((*end).max(self.now)),
                None => Some(self.now),
            };
            match (self.reply)(setting, self.number) {
                Reply::After(time) => self.ends.push_back(free.map(|free| free.saturating_add(time))),
                Reply::Hangs => self.ends.push_back(None),
                Reply::Ends(reason) => self.ended = Some(reason),
            }
            self.number += 1;
        }
        Ok(())
    }

    fn wait(&mut self, until: Timestamp) -> Result<Option<Timestamp>, ExecError> {
        if let Some(&Some(end)) = self.ends.front()
            && end <= until
        {
            self.ends.pop_front();
            self.now = self.now.max(end);
            return Ok(Some(end));
        }
        if let Some(reason) = self.ended.clone()
            && self.ends.is_empty()
        {
            return Err(ExecError::Ended(reason));
        }
        self.now = self.now.max(until);
        Ok(None)
    }

    fn stop(&mut self) {
        (self.setting, self.number, self.ended) = (None, 0, None);
        self.ends.clear();
    }
}

/// A GPU from a profile: at each of its points a batch takes `batch / throughput`, give or take `noise`, evenly
/// spread. Settings outside the profile are refused. Every batch of every setting draws from one seeded stream.
pub fn simulated_gpu(
    table: ProfileTable,
    load: Duration,
    noise: BasisPoints,
    seed: u64,
) -> impl Executor + use<> {
    let mut random = Random(seed);
    let known = table.clone();
    let begin = move |setting| match known.at(setting) {
        Some(_) => Begin::Ready(load),
        None => Begin::Refused(format!("the profile has no point at ({setting})")),
    };
    Virtual::new(begin, move |setting, _| match table.at(setting) {
        Some(point) => {
            let mean = f64::from(point.batch) / point.throughput.as_f64();
            let factor = 1.0 + noise.as_fraction() * (2.0 * random.unit() - 1.0);
            Reply::After(core::time::Duration::from_secs_f64(mean * factor).into())
        }
        None => Reply::Ends("no such point".to_owned()),
    })
}
