//! GPU sharing for a host of your own: engines which decide, their common types, and a [`Runner`] which keeps time for them.
//!
//! An engine takes the time and an event, and answers with orders; it owns no clock, thread or socket. A host brings events to it and
//! carries its orders out. This host shares a GPU between two clients:
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
//! | module | decision |
//! |---|---|
//! | [`token`] | the clients which may launch kernels now |
//! | [`pack`], [`place`] | the GPU, and the part of it, for an instance |
//! | [`scale`] | an instance's share of a GPU, and the number of instances |
//! | [`pipeline`] | the cut of a function into stages on MIG slices |
//! | [`node`], [`platform`] | all of these on a node, and for a cluster |
//!
//! Features: `serde` and `schema` for events, orders and settings; `profile` and `modelstore` for the crates of these names.

#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod runner;

/// Channels of events, which [`Runner::run`] reads.
pub use crossbeam_channel as channel;
/// Types shared by the engines: units, ids, shares, profiles.
pub use gshare_core as words;
#[cfg(feature = "modelstore")]
pub use gshare_modelstore as modelstore;
#[cfg(feature = "profile")]
pub use gshare_profile as profile;
pub use gshare_sched::{Wrapped, mig, node, pack, pipeline, place, platform, scale, token};
pub use runner::Runner;

/// The names used by most hosts.
pub mod prelude {
    pub use crate::Runner;
    pub use gshare_core::{
        Bytes, ClientId, Duration, Engine, FunctionId, GpuId, GpuShare, Quota, QuotaRange, ResourceSpec,
        Share, SmShare, Timestamp, TokenAction, TokenEvent, UseState,
    };
    pub use gshare_sched::platform::{PlatformAction, PlatformEvent};
}
