//! GPU sharing for a host of your own: engines that decide, the words that they speak, and a [`Runner`] that keeps time for them.
//!
//! An engine is told the time and an event, and answers with orders; it owns no clock, thread or socket. A host brings events
//! to it and carries its orders out. This one shares a GPU between two clients:
//!
//! ```
//! use gshare::prelude::*;
//! use gshare::token::{MultiToken, MultiTokenConfig};
//! let mut runner = Runner::new(MultiToken::new(MultiTokenConfig::default())?, || TokenEvent::DeadlineReached);
//! let (events, inbox) = gshare::channel::unbounded();
//! for (slot, quota) in [(0, "0.3:0.8"), (1, "0.7")] {
//!     let (client, share) = (ClientId::new(slot, 0), Share { quota: quota.parse()?, sm: SmShare::WHOLE });
//!     events.send(TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share })?;
//!     events.send(TokenEvent::Used { client, used: Duration::ZERO, state: UseState::Wants })?;
//! }
//! drop(events);
//! let mut granted = Vec::new();
//! runner.run(&inbox, |_, action| {
//!     if let TokenAction::Allow { client, allowed, .. } = action {
//!         granted.push((client.slot(), allowed)); // A host sends it to the client's process.
//!     }
//! }, |refused| eprintln!("{refused}"));
//! assert_eq!(granted, [(0, Duration::from_millis(10))]); // The other waits for its turn.
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | decides |
//! |---|---|
//! | [`token`] | who may launch kernels now |
//! | [`pack`], [`place`] | which GPU an instance goes to, and which part of it |
//! | [`scale`] | how much of a GPU an instance has, and how many instances run |
//! | [`pipeline`] | how a function is cut into stages on MIG slices |
//! | [`request`] | which GPU serves a request, and which models stay in memory |
//! | [`node`], [`platform`] | all of it on a node, and for a cluster |
//!
//! Features: `serde` and `schema` for events, orders and settings; `profile` and `modelstore` for the crates of these names.

#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod runner;

/// Channels of events, which [`Runner::run`] reads.
pub use crossbeam_channel as channel;
/// The words that engines share: units, ids, shares, profiles.
pub use gshare_core as words;
#[cfg(feature = "modelstore")]
pub use gshare_modelstore as modelstore;
#[cfg(feature = "profile")]
pub use gshare_profile as profile;
pub use gshare_sched::{Wrapped, mig, node, pack, pipeline, place, platform, request, scale, token};
pub use runner::Runner;

/// The names that most hosts use.
pub mod prelude {
    pub use crate::Runner;
    pub use gshare_core::{
        Bytes, ClientId, Duration, Engine, FunctionId, GpuId, GpuShare, Quota, QuotaRange, ResourceSpec,
        Share, SmShare, Timestamp, TokenAction, TokenEvent, UseState,
    };
    pub use gshare_sched::platform::{PlatformAction, PlatformEvent};
}
