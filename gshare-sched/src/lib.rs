//! The decision engines of gshare.
//!
//! Each module answers one question of a platform that shares GPUs, and each of its engines is one policy behind a trait.
//! All engines are pure: the host tells them the time, and they return orders.
//!
//! | module | question | source |
//! |---|---|---|
//! | [`token`] | which client may launch kernels now? | FaST-GShare, section 3.3 |
//! | [`pack`] | which GPU, and which rectangle of its time and SMs? | FaST-GShare, section 3.4.2 |
//! | [`place`] | which GPU, by sums of requests, limits and memory? | Dilu, section 3.3 |
//! | [`scale`] | how many tokens for each client of a GPU, and how many instances? | Dilu, section 3.4; FaST-GShare, section 3.4.1 |
//! | [`pipeline`] | into which stages is a function cut, and on which MIG slices do they run? | FluidFaaS, section 5.2 |
//!
//! [`node`] composes token scheduling and vertical scaling with sessions, memory, debts and admission: the decisions of the
//! node daemon. [`platform`] composes scaling, packing, pipelines, request routing and caching with functions and tenants:
//! the decisions of a cluster.
#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]

mod settings_table;
mod tier;
mod wrapped;

pub mod mig;
pub mod node;
pub mod pack;
pub mod pipeline;
pub mod place;
pub mod platform;
pub mod scale;
pub mod token;

pub use tier::Tier;
pub use wrapped::Wrapped;
