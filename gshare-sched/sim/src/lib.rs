//! Simulation for gshare's engines: virtual time, a virtual GPU, arrivals, checkers and conformance suites.
//!
//! # Problem
//! An engine that decides about the use of a GPU is wrong in ways that no single call shows: a wait above its bound, a share one point
//! too small, a drifting account. A test of it must need no GPU and no clock, and must show each finding again. Engines take the time as
//! an argument, so a simulation is only a loop around them, and all its randomness comes from one printed seed.
//!
//! # Modules
//! | module | for |
//! |---|---|
//! | [`EventQueue`], [`Rng`] | virtual time with a stable order; randomness from a seed |
//! | [`virtual_gpu`] | a device that runs kernels side by side while its SMs suffice |
//! | [`arrivals`], [`load_trace`] | times of requests: closed loop, Poisson, gamma, bursts, recorded load |
//! | [`token`] | a book of tokens beside a [`TokenScheduler`](gshare_core::TokenScheduler), with checkers and random operations |
//! | [`conformance`] | one suite per policy trait, to run over any implementation of it |
//! | [`node`] | a whole node in virtual time: the daemon's engine around any scheduler of tokens, a meter per process, devices, faults |
//! | [`packing`] | demands that come and go on a pool of GPUs, under any packer |
//! | [`world`] | the whole platform: functions, instances, requests and devices around any engine of it, with faults |
//! | [`scenario`] | such a run in a TOML file |
//!
//! # Rules
//! Like the engines, this crate has no clock, no thread and no randomness of its own. It knows policies by their traits, so that a
//! host can run the same suites over its own policy. It knows only the engines shipped around such policies: in [`node`] the
//! daemon's [`Node`](gshare_sched::node::Node) and the hook's [`Meter`](gshare_meter::Meter), in [`scenario`] and
//! [`conformance::slices()`] the [`Platform`](gshare_sched::platform::Platform).
#![forbid(unsafe_code)]

pub mod arrivals;
pub mod conformance;
pub mod load_trace;
pub mod node;
pub mod packing;
pub mod scenario;
pub mod token;
pub mod virtual_gpu;
pub mod world;

mod event_queue;
mod log;
mod rng;
mod story;

/// A constructor of a policy.
pub type Make<P> = std::sync::Arc<dyn Fn() -> Box<P> + Send + Sync>;

pub use event_queue::EventQueue;
pub use rng::Rng;
pub use story::Story;
