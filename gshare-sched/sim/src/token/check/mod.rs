//! Checkers: one file each, with what it proves and how.
//!
//! | checker | claim |
//! |---|---|
//! | [`sm_sum`] | the holders' SMs never add up to more than the whole GPU |
//! | [`quota_window`] | in no window is a client granted more than its limit and what it may be owed, less the overuse it carries |
//! | [`throttle`] | a client that is told to wait has used its limit, and is told the true end of the wait |
//! | [`work_conservation`] | free SMs are not kept from the only one who wants them |
//! | [`request_met`] | who keeps asking gets its request in every window |
//! | [`bounded_wait`] | who is owed time waits no longer than a stated bound |
//! | [`ledger`] | the scheduler's own account agrees with the returns it was told |
//!
//! A checker sees the [`Book`] before and after each change, and the scheduler after each call. It keeps what it needs
//! beyond that itself, and answers with the words that a person needs to see the mistake.

pub mod advance;
pub mod bounded_wait;
pub mod ledger;
pub mod quota_window;
pub mod request_met;
pub mod sm_sum;
pub mod throttle;
pub mod work_conservation;

use super::{Book, Change};
use core::fmt::Debug;
use gshare_core::{Timestamp, TokenScheduler};

/// Something that must hold at every instant. All methods have empty defaults, and answer how often they put the claim to the test.
pub trait Checker: Debug + Send {
    /// A change is about to be written into the book.
    fn before(&mut self, _book: &Book, _now: Timestamp, _change: Change) -> Result<u64, String> {
        Ok(0)
    }

    /// A change was written into the book.
    fn after(&mut self, _book: &Book, _now: Timestamp, _change: Change) -> Result<u64, String> {
        Ok(0)
    }

    /// A call is over.
    fn settled(
        &mut self,
        _book: &Book,
        _now: Timestamp,
        _scheduler: &dyn TokenScheduler,
    ) -> Result<u64, String> {
        Ok(0)
    }
}

/// A checker at work.
#[derive(Debug)]
pub struct Check {
    /// Its name in a report.
    pub(super) name: &'static str,
    /// How often its claim was put to the test: a claim that never was has not been shown.
    pub(super) tested: u64,
    pub(super) checker: Box<dyn Checker>,
}

impl Check {
    /// A checker that has seen nothing.
    pub fn new(name: &'static str, checker: impl Checker + 'static) -> Self {
        Self { name, tested: 0, checker: Box::new(checker) }
    }
}

/// All checkers that hold for every scheduler of tokens, no matter what its clients do.
pub fn always() -> Vec<Check> {
    vec![
        Check::new("sum of SMs", sm_sum::SmSum),
        Check::new("quota of a window", quota_window::QuotaWindow),
        Check::new("throttle", throttle::Throttle::default()),
        Check::new("work conservation", work_conservation::WorkConservation),
        Check::new("ledger", ledger::Ledger),
    ]
}
