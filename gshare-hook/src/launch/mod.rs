//! The launch path: the cost of a launch, the decision whether it goes now, and the measurement of its time on the device.

pub(crate) mod control;
pub(crate) mod failure;
pub(crate) mod gate;
pub(crate) mod line;
pub(crate) mod metering;
pub(crate) mod probe;
pub(crate) mod runs;
pub(crate) mod segments;
pub(crate) mod streams;
pub(crate) mod threads;
pub(crate) mod ticket;
