//! The decision about one launch.

/// The longest call of a kernel's launch, in ns: a longer call was interrupted.
pub(crate) const CALL_NS: u64 = 10_000;

/// The decision about a launch before it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// It is not metered.
    Pass,
    /// It is paid for.
    Paid,
    /// It is paid for, and a segment begins with it.
    First,
    /// It is paid for, and the segment ends with it.
    Last,
    /// It is paid for and measured alone.
    Alone,
    /// It must fail.
    Fail,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) verdict: Verdict,
    /// The charge, in ns.
    pub(crate) cost: u64,
}

impl Ticket {
    pub(crate) const PASS: Self = Self { verdict: Verdict::Pass, cost: 0 };
    pub(crate) const FAIL: Self = Self { verdict: Verdict::Fail, cost: 0 };
}
