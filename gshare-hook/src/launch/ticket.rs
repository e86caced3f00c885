//! The decision about one launch.

use gshare_meter::launch::Verdict;

/// The decision about a launch, taken before the launch is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) verdict: Verdict,
    /// The charged cost, in ns.
    pub(crate) cost: u64,
}

impl Ticket {
    pub(crate) const PASS: Self = Self { verdict: Verdict::Pass, cost: 0 };
    pub(crate) const FAIL: Self = Self { verdict: Verdict::Fail, cost: 0 };
}
