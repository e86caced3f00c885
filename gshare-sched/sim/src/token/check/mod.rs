//! Checkers: one file each, with the claim and the method.
//!
//! | checker | claim |
//! |---|---|
//! | [`sm_sum`] | the holders' SMs never add up to more than the whole GPU |
//! | [`quota_window`] | no window grants a client more than its limit and its possibly owed time, less the carried overuse |
//! | [`throttle`] | a throttled client has used its limit, and the scheduler tells it the true end of the wait |
//! | [`work_conservation`] | free SMs are not kept from the only client that wants them |
//! | [`request_met`] | a client that keeps asking gets its request in every window |
//! | [`bounded_wait`] | a client with owed time waits no longer than a stated bound |
//! | [`ledger`] | the scheduler's own account agrees with the reported returns |
//!
//! A checker sees the [`Book`] before and after each change, and the scheduler after each call. It keeps all further state itself,
//! and answers with enough words for a person to see the mistake.

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
use gshare_core::token::token_claims;
use gshare_core::{Timestamp, TokenScheduler};

/// A claim about every instant. All methods have empty defaults, and return the number of tests of the claim.
pub(crate) trait Checker: Debug + Send {
    /// Looks at the book before a change.
    fn before(&mut self, _book: &Book, _now: Timestamp, _change: Change) -> Result<u64, String> {
        Ok(0)
    }

    /// Looks at the book after a change.
    fn after(&mut self, _book: &Book, _now: Timestamp, _change: Change) -> Result<u64, String> {
        Ok(0)
    }

    /// Looks at the book and the scheduler after a call.
    fn settled(
        &mut self,
        _book: &Book,
        _now: Timestamp,
        _scheduler: &dyn TokenScheduler,
    ) -> Result<u64, String> {
        Ok(0)
    }
}

/// A checker with its claim and its count.
#[derive(Debug)]
pub struct Check {
    /// The claim, as a report names it.
    pub(super) name: &'static str,
    /// The number of tests of its claim: a claim without a test is not shown.
    pub(super) tested: u64,
    pub(super) checker: Box<dyn Checker>,
}

impl Check {
    /// A check without any test so far.
    pub(crate) fn new(name: &'static str, checker: impl Checker + 'static) -> Self {
        Self { name, tested: 0, checker: Box::new(checker) }
    }
}

/// All checkers valid for every scheduler of tokens whose clients hold side by side, regardless of its clients.
pub fn always() -> Vec<Check> {
    always_if(true)
}

/// The same for a scheduler whose clients hold side by side where their SMs fit, or one at a time.
pub fn always_if(together: bool) -> Vec<Check> {
    vec![
        Check::new(token_claims::SM_SUM, sm_sum::SmSum),
        Check::new(token_claims::QUOTA, quota_window::QuotaWindow),
        Check::new(token_claims::THROTTLE, throttle::Throttle::default()),
        Check::new(token_claims::WORK, work_conservation::WorkConservation { together }),
        Check::new(token_claims::LEDGER, ledger::Ledger),
    ]
}
