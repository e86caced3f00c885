//! Starts, feeds and stops the processes of a node.
//!
//! A host starts the instances ordered by a platform. This crate turns these orders into processes, under the hook if a share of a
//! GPU is to be kept, and tells how each process ended. The crate needs no daemon: a host may run a daemon in its own process,
//! elsewhere, or not at all.
//!
//! | module | for |
//! |---|---|
//! | [`HookedProcess`] | a process under the hook, which ends with all its descendants |
//! | [`container`] | processes in containers of OCI images, by podman |
//! | [`confine`] | processes as another user, in cgroups of their own |
//! | [`libraries`] | where the hook and the simulated driver are |
//! | [`Scratch`] | a folder that no killed process leaves behind |
#![cfg_attr(test, allow(clippy::cast_possible_truncation))]

pub mod confine;
pub mod container;
pub mod libraries;

mod hooked_process;
mod preload;
mod run_id;
mod scratch;

pub use hooked_process::{Hook, HookedProcess};
pub use preload::{PreloadError, preload};
pub use run_id::new_run;
pub use scratch::Scratch;
