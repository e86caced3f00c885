//! What is decided about one launch.

use crate::device::Device;

/// A call that gives the device work, by what it may do before the work is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// It queues a kernel or a graph, and takes its usual time for that.
    Launch,
    /// It may move bytes on the host first.
    Copy,
    /// It may wait for the work itself.
    Blocking,
}

impl Call {
    /// The part of the call's duration, in ns, that may be the reason that the work started late.
    pub(crate) fn slack(self, device: &Device) -> u64 {
        match self {
            Self::Launch => device.calls.most(),
            Self::Copy => u64::MAX,
            Self::Blocking => 0,
        }
    }
}

/// What is decided about a launch before it is made.
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
    /// What was charged, in ns.
    pub(crate) cost: u64,
}

impl Ticket {
    pub(crate) const PASS: Self = Self { verdict: Verdict::Pass, cost: 0 };
    pub(crate) const FAIL: Self = Self { verdict: Verdict::Fail, cost: 0 };
}
