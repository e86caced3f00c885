//! The launch path: the cost of a launch, the decision whether it goes now, and the measurement of its time on the device.

pub(crate) mod admit;
pub(crate) mod control;
pub(crate) mod failure;
pub(crate) mod guard;
pub(crate) mod guarded;
pub(crate) mod line;
pub(crate) mod segments;
pub(crate) mod streams;
pub(crate) mod thread_record;
pub(crate) mod threads;
