//! Keeping instances: which instances a node has, in which state, on which slices.
//!
//! # Problem
//! A function that holds a slice while no client calls it wastes the slice, and loading it for every call is slow. A keeper decides which
//! instances a node has, which own slices and which take turns on a shared one, which are evicted, and when a pipeline moves to better
//! slices (FluidFaaS, section 5.3 and Figure 8).
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
//! **Exclusive** instances own their slices and are never evicted; **shared** ones take turns on a slice ("time sharing"), resident or
//! evicted.
//!
//! # Algorithm
//! 1. **First request**: a shared instance on a shared slice with time left, else on the smallest suitable free slice. A function that
//!    fits no slice as a whole gets an exclusive pipeline.
//! 2. **Busy** (30 % of a window, section 5.3), or **short** (requests cannot be served in time): an exclusive instance. A busy instance
//!    alone on its slice keeps it; otherwise the whole starts on a free slice, else a pipeline.
//! 3. **Not busy** for some windows in a row, below a second, lower threshold: the slowest of several exclusive instances drains if the
//!    others can do its work. The last one shares its slice; a pipeline makes place for a shared instance, or is given up when unused.
//! 4. **Eviction**: a shared instance that must serve is loaded, and others leave its slice until it fits ([`EvictionOrder`]). Weights
//!    stay in host memory (warm) while that pays, and are fetched when it pays again ([`KeepAlive`]).
//! 5. **Migration**: after a window without a lack of slices a pipeline moves to one slice for the whole, draining when that is up.
//! 6. **Reclaim**: a function without slices takes an idle exclusive instance's, or the least used of several shared slices. Neighbours of
//!    a busy shared instance leave if served elsewhere too.
//! 7. **Minimum** ([`InstanceEvent::MinimumSet`]): as many instances start at once, shared ones first, and no rule above gives them up.
//!
//! # Invariants
//! Every slice has one owner; residents of a shared slice fit its memory; no exclusive instance is evicted; a function has at most
//! `max_shared` shared instances; instances and slices agree on each instance's place.
//!
//! # Cost
//! O(log n) for a request, a use or a victim; a plan (see [`super`]) per start, and at most one per function and change of the free slices
//! while none fits; O(n) per window. The deviations from the paper can be switched off: [`KeeperConfig::paper`].

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
pub use keeper_config::{HOT_ABOVE, KeeperConfig, LoadCosts};
