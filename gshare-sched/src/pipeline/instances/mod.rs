//! Keeping instances: which there are on a node, in which state, on which slices.
//!
//! # Problem
//! A function that holds a slice while no client calls it wastes the slice; one that is loaded for every call is slow. A
//! keeper of instances decides which instances there are on a node, which own slices and which take turns on a shared one,
//! which are evicted, and when a pipeline moves to better slices (FluidFaaS, section 5.3 and Figure 8).
//!
//! # States
//! ```text
//!              first request                    busy, or short
//!   cold ───────────────────────▶ shared ───────────────────────▶ exclusive (hot)
//!    ▲                            │    ▲ ◀───────────────────────  │  whole, or a pipeline
//!    │ keep-alive over     evicted│    │needed      no longer busy │ idle pipeline
//!    └──────────────── warm ◀─────┘────┘                           ▼
//!                       ▲ (weights in host memory) ◀───────────────┘
//! ```
//! - **exclusive**: owns its slices and is never evicted ("exclusive hot");
//! - **shared**: takes turns on a slice ("time sharing"); resident or evicted;
//! - **warm**: its weights are in host memory; **cold**: nowhere on the node.
//!
//! # Algorithm
//! 1. **First request** of a function: a shared instance on a slice that is shared already and not full of work, else on
//!    the smallest free slice that will do. A function that fits no slice as a whole gets an exclusive pipeline.
//! 2. **Busy** (30 % of a window, section 5.3), or **short** (its requests cannot be served in time): an exclusive
//!    instance. A busy one that is alone on its slice just keeps it; else it is the whole on the smallest free slice that
//!    will do, and without one the first pipeline of the partitioner's list for which the assigner finds slices. With
//!    [`Choice::PerSlice`] it is the plan with the least `bottleneck * compute slices`, and as long as no function lacks
//!    slices the fastest of those that need a tenth more at most.
//! 3. **Not busy** for some windows in a row, below a second, lower threshold: of several exclusive instances the
//!    slowest is drained if the others can do its work; the last one shares its slice from now on, or, a pipeline, makes
//!    place for a shared instance, or is given up when it is not used at all.
//! 4. **Eviction**: a shared instance that must serve is loaded, and others leave its slice until it fits
//!    ([`EvictionOrder`]). Weights stay in host memory (warm) as long as that pays, and are fetched when it pays again
//!    ([`KeepAlive`]).
//! 5. **Migration**: at the end of a window in which no function lacked slices, a pipeline moves to one slice that suits
//!    the whole. The new instance is started first; when it is up the old one drains.
//! 6. **Reclaim**: a function that finds no slices takes those of an instance that was idle for a window, or of the least
//!    used of several shared slices. Neighbours of a busy instance on a shared slice leave it when they are served
//!    elsewhere too. What becomes free that way goes to the function for which it was taken.
//! 7. **Evening out** ([`KeeperConfig::even_out`], off): it also takes them of a function that needs them clearly less: one
//!    that is not short now and can spare an instance, or would still be less than a third as far behind without it
//!    ([`InstanceEvent::Short`] says how far a function is behind; one that is not short is not behind as long as its others
//!    can do its work). The gap has to exceed the time of a start, or half of it for what can be spared, and an instance
//!    stays for a window at least.
//!
//! 8. **Minimum** ([`InstanceEvent::MinimumSet`], 0): that number of instances of a function is started at once, shared ones
//!    first; no rule above gives up one of them, and idle ones share their slice as far as they may. One that is gone is
//!    started again when the host tells the minimum again, since with several nodes another one may be to do it.
//!
//! ## Example
//! On slices of 1g, 2g and 4g a function that needs 2g as a whole is called for the first time: it shares the 2g. At 35 %
//! use it keeps the 2g for itself. Requests wait too long: a plan on the free 1g and 4g is started. When use of both falls
//! below 15 % for a minute the larger instance is drained, and a minute later the other shares the 2g again.
//!
//! # Invariants
//! Every slice has one owner; residents of a shared slice fit its memory; no instance is evicted from an exclusive slice; a
//! function has at most `max_shared` shared instances; instances and slices agree on where each instance is.
//!
//! # Cost
//! O(log n) for a request, a use and the choice of a victim; a plan (see [`super`]) for each instance that is started, and
//! at most one per function and change of the free slices when there is none; O(n) at the end of a window.
//!
//! # Differences from the paper
//! - Two thresholds and windows in a row where it has one threshold: see the simulation without flapping.
//! - Pipelines that are not used are given up; in the paper they stay hot. Idle slices can be reclaimed.
//! - Eviction by cost and keep-alive by gaps, beside LRU and ten minutes. A function may have two shared instances.
//! - Several instances may be resident on a shared slice while its memory lasts; still only one runs at a time.
//! - All of it can be switched off: [`KeeperConfig::paper`].

mod eviction;
mod instance_keeper;
mod keep_alive;
mod keeper;
mod keeper_config;
mod scale;
mod slices;

pub use eviction::{EvictionOrder, EvictionPolicy};
pub use instance_keeper::*;
pub use keep_alive::{Gaps, KeepAlive, Stay};
pub use keeper::Keeper;
pub use keeper_config::{Choice, KeeperConfig, LoadCosts};
