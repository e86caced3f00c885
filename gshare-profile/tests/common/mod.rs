//! Functions in virtual time: mocks with each failure, and a GPU from a profile.
#![allow(dead_code, reason = "each test program uses a part")]

use gshare_core::profile::{ProfileTable, Setting};
use gshare_core::{BasisPoints, Duration, Quota, SmShare, Timestamp};
use gshare_profile::executor::{ExecError, Executor, Ready};
use gshare_profile::planner::Grid;
use std::collections::VecDeque;

/// FaST-GShare's grid: SM 6, 12, 24, 50, 60, 80, 100 %, quota 20 to 100 % in steps of 20 %, one batch size.
pub(crate) fn fast_gshare(batch: u32) -> Grid {
    let sms = [6, 12, 24, 50, 60, 80, 100].into_iter().filter_map(SmShare::from_percent);
    let quotas = [20, 40, 60, 80, 100].into_iter().filter_map(Quota::from_percent);
    Grid::new(sms.collect(), quotas.collect(), vec![batch]).unwrap()
}

/// The behaviour of a function in virtual time when it gets a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The function answers after this time.
    After(Duration),
    /// Never answers.
    Hangs,
    /// The function ends, for this reason.
    Ends(String),
}

/// The behaviour of a function in virtual time when it is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Begin {
    /// The function is ready after this time.
    Ready(Duration),
    /// The function cannot run there.
    Refused(String),
    /// The function never gets ready.
    Hangs,
}

/// Runs a function in virtual time. `begin` is asked at each start, `reply` at each batch with its number from 0.
#[derive(Debug)]
pub(crate) struct Virtual<B, R> {
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
    pub(crate) const fn new(begin: B, reply: R) -> Self {
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
                Err(ExecError::NotReady { within, why: None })
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
pub(crate) fn simulated_gpu(
    table: ProfileTable,
    load: Duration,
    noise: BasisPoints,
    seed: u64,
) -> impl Executor + use<> {
    let mut state = seed;
    // SplitMix64.
    let mut unit = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    };
    let known = table.clone();
    let begin = move |setting| match known.at(setting) {
        Some(_) => Begin::Ready(load),
        None => Begin::Refused(format!("the profile has no point at ({setting})")),
    };
    Virtual::new(begin, move |setting, _| match table.at(setting) {
        Some(point) => {
            let mean = f64::from(point.batch) / point.throughput.as_f64();
            let factor = 1.0 + noise.as_fraction() * (2.0 * unit() - 1.0);
            Reply::After(core::time::Duration::from_secs_f64(mean * factor).into())
        }
        None => Reply::Ends("no such point".to_owned()),
    })
}
