//! The order in which the waiting requests of a function are served, where its instances share devices.
//!
//! An engine that gives requests to instances asks a [`QueueOrder`] each time that an instance has room. It is asked about one function
//! at a time: requests of different functions never compete for an instance.
//!
//! # Example
//! The newest first, since the others are late anyway:
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

/// The requests of a function that wait, and the instance that can take one of them.
#[derive(Debug, Clone, Copy)]
pub struct WaitQueue<'a> {
    /// When each request arrived, with its name; never empty.
    pub waiting: &'a BTreeSet<(Timestamp, RequestId)>,
    /// When the instance will have answered what it takes now.
    pub done: Timestamp,
    /// The time in which the function's requests are to be answered; none: there is no such time.
    pub slo: Option<Duration>,
    /// The time that the function's ready instances need for all that waits.
    pub backlog: Duration,
}

/// A policy that orders the requests of a function.
pub trait QueueOrder: fmt::Debug + Send {
    /// The request that is served now: one of `queue.waiting`. The first is served for any other answer, so that no request waits
    /// while an instance has room.
    fn next(&mut self, queue: &WaitQueue<'_>) -> Option<(Timestamp, RequestId)>;
}
