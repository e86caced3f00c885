//! The words of gshare.
//!
//! Several crates share these words: units, ids, shares, profiles of functions, the [`Engine`] shape, the frames between a
//! hooked process and its daemon, and the [`gate::LaunchGate`] inside the hooked process. The words of a single engine
//! live beside the engine.
//!
//! The crate is pure: it has no clock, thread, file, socket or randomness. An engine gets the time from its host and returns
//! orders, so one type serves the node daemon, an embedding host, the simulator, the fuzzer and the replay of a journal.
#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]

pub mod dag;
pub mod gate;
pub mod ids;
pub mod profile;
pub mod reason;
pub mod resource;
pub mod share;
pub mod slots;
#[cfg(feature = "serde")]
pub mod text;
pub mod token;
pub mod units;
pub mod wire;

mod config_error;
mod engine;
mod fmt_macros;
mod service_class;

pub use config_error::ConfigError;
pub use engine::{Engine, TimeWentBack};
pub use ids::{
    ArenaId, ClientId, ConnId, DeviceUuid, FunctionId, GpuId, GpuKind, GroupId, InstanceId, ModelId, NodeId,
    ParseRunIdError, ParseUuidError, PlacementId, ProfileId, RequestId, RunId, TenantId, TicketId,
};
pub use resource::{MemoryRange, QuotaRange, ResourceSpec, SpecError};
pub use service_class::ServiceClass;
pub use share::GpuShare;
pub use token::{Share, TokenAction, TokenError, TokenEvent, TokenScheduler, UseState};
pub use units::{BasisPoints, Bytes, Duration, ParseUnitError, Quota, SmShare, Timestamp};
