//! The words of gshare.
//!
//! This crate is what every other crate of the family shares, and all that they share: units, ids, resource specs,
//! the [`Engine`] shape, the policy traits with their events, actions and errors, the wire format between a hooked
//! process and its daemon, and the [`gate::LaunchGate`] that decides inside the hooked process.
//!
//! It is pure: no clock, thread, file, socket or randomness. An engine is told the time and returns orders, so the
//! same type serves the node daemon, a host that embeds it, the simulator, the fuzzer and the replay of a journal.
#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]

pub mod dag;
pub mod gate;
pub mod ids;
pub mod mig;
pub mod pack;
pub mod pipeline;
pub mod platform;
pub mod profile;
pub mod queue_order;
pub mod request;
pub mod resource;
pub mod scale;
pub mod share;
pub mod slots;
pub mod store;
pub mod token;
pub mod units;
pub mod wait_ring;
pub mod wire;

mod config_error;
mod engine;
mod fmt_macros;
mod wrapped;

pub use config_error::ConfigError;
pub use engine::{Engine, TimeWentBack};
pub use ids::{
    ArenaId, ClientId, ConnId, DeviceUuid, FunctionId, GpuId, GpuKind, GroupId, InstanceId, LeaseId, ModelId,
    NodeId, ParseRunIdError, ParseUuidError, PlacementId, ProfileId, RequestId, RunId, SharedSlice, TenantId,
    TicketId,
};
pub use resource::{QuotaRange, ResourceSpec, SpecError};
pub use share::GpuShare;
pub use token::{Share, TokenAction, TokenError, TokenEvent, TokenScheduler};
pub use units::{BasisPoints, Bytes, Duration, ParseUnitError, Quota, SmShare, Timestamp};
pub use wrapped::Wrapped;
