//! The order in which the waiting requests of a function are served, where its instances share devices.
//!
//! An engine that gives requests to instances asks a [`QueueOrder`] whenever an instance has room. Each question is about one
//! function: requests of different functions never compete for an instance.
//!
//! # Example
//! The newest request first, since the others are late anyway:
//! ```
//! use gshare_sched::platform::{QueueOrder, WaitQueue};
//! use gshare_core::{RequestId, Timestamp};
//!
//! #[derive(Debug)]
//! struct NewestFirst;
//!
//! impl QueueOrder for NewestFirst {
//!     fn next(&mut self, queue: &WaitQueue<'_>) -> Option<(Timestamp, RequestId)> {
//!         queue.waiting.last().copied()
//!     }
//! }
//! ```

use core::fmt;
use gshare_core::{Duration, RequestId, Timestamp};
use std::collections::BTreeSet;

/// The waiting requests of a function, and the instance with room for one of them.
#[derive(Debug, Clone, Copy)]
pub struct WaitQueue<'a> {
    /// Each request's arrival and name; never empty.
    pub waiting: &'a BTreeSet<(Timestamp, RequestId)>,
    /// The time at which the instance will have answered the chosen request.
    pub done: Timestamp,
    /// The time within which the function's requests should be answered, if there is one.
    pub slo: Option<Duration>,
    /// The time the function's ready instances need for all waiting requests.
    pub backlog: Duration,
}

/// A policy that orders the requests of a function.
pub trait QueueOrder: fmt::Debug + Send {
    /// The request to serve now: one of `queue.waiting`. Any other answer serves the first, so that no request waits while an
    /// instance has room.
    fn next(&mut self, queue: &WaitQueue<'_>) -> Option<(Timestamp, RequestId)>;
}
