//! Starts, feeds and stops the processes of a node.
//!
//! A host starts the instances that a platform ordered; a partitioner cuts a function into stages. This crate turns these
//! decisions into processes, under the hook where a share of a GPU is to be kept, and tells how each one ended. It needs no
//! daemon: a host may run one in its own process, elsewhere, or none.
//!
//! | module | for |
//! |---|---|
//! | [`HookedProcess`] | a process under the hook, which ends with all that it started |
//! | [`pipeline`] | functions that run as pipelines, a process per stage (FluidFaaS) |
//! | [`channel`] | large messages from one stage of a pipeline to the next, in shared memory |
//! | [`container`] | processes in containers of OCI images, by podman |
//! | [`confine`] | processes as another user, in cgroups of their own |
//! | [`libraries`] | where the hook and the simulated driver are |
#![cfg_attr(test, allow(clippy::cast_possible_truncation))]

#[cfg(not(loom))]
pub mod channel;
pub mod confine;
pub mod container;
pub mod libraries;
#[cfg(not(loom))]
pub mod pipeline;

mod hooked_process;
mod preload;
#[cfg(loom)]
#[path = "channel/ring.rs"]
mod ring;
mod run_id;

pub use hooked_process::{Hook, HookedProcess};
pub use preload::{PreloadError, preload};
pub use run_id::new_run;
