//! Pipelines over MIG slices: the cut of a function into stages, and the free slices on which the stages run.
//!
//! # Problem
//! A function is a DAG of components ([`gshare_core::dag`]), and a node has free slices of a few sizes. Wanted are a cut into stages and a
//! slice for each stage: the memory fits, the latency meets the SLO, and the slowest slice is as fast as possible. A chain has 2^(n-1)
//! cuts, so no step may list them all.
//!
//! # Terms
//! - **stage**: components that follow one another in the pipeline. **Part**: a stage's components on one slice. A stage has several parts
//!   only as a **spread** fork, with a slice per branch and the time of its longest branch ("the maximum execution time among them");
//! - **bottleneck**: the longest time any slice is busy with one batch, hand-offs included; 1 / throughput. **Latency**: time of one batch
//!   through the whole pipeline, every branch taken;
//! - **hand-off**: an output's way between two slices through host memory, which occupies both the writing and the reading slice;
//! - **feasible**: each part and the run-time fit a slice's memory, all components have a profile for it, and the latency meets the SLO;
//! - **segment**: a component comparable with every other, or everything between two such (a fork and its join). **Ideal**: the components
//!   before a segment. **Step**: two ideals, hence a possible stage; a path of steps is a pipeline.
//!
//! # Algorithm
//! - **Cuts**: a pipeline is cut between segments, where the whole flow passes.
//! - **Rank** ([`Partitioner`]): a dynamic program over (ideal, slices of each profile used) finds the least bottleneck within the SLO,
//!   then the fewest compute slices at that bottleneck.
//! - **Slices** ([`LeastFragmentation`]): parts go to profiles by least latency, then least memory left over; profiles go to slices on the
//!   fewest GPUs, then by least fragmentation.
//!
//! # Invariants
//! Tests compare with brute force: the bottleneck equals an exhaustive search's. Each pipeline has every component in one part, and every
//! edge goes forward.
//!
//! # Cost
//! O(s * p * Π(c+1)) for s steps and p profiles with c free slices each, up to a bound of transitions.
//!
//! # Differences from the paper
//! The paper ranks cuts by the coefficient of variation of the stages' times (section 5.2.2), which sees neither hand-offs nor the speed of
//! the free slices; its rank is a policy of the replay. The paper does not define the cut of a DAG with branches.

mod assign;
mod bottleneck;
mod costs;
mod cuts;
mod eviction;
mod free_slices;
mod home;
mod keep_alive;
mod keeper_config;
mod offers;
mod partitioner;
mod pipeline_partitioner;
mod route;
mod router_config;
mod routing;
mod slice_assigner;

pub use assign::LeastFragmentation;
pub use eviction::{EvictionOrder, EvictionPolicy};
pub use free_slices::*;
pub(crate) use home::whole;
pub use home::{Home, Place, PlacedPart};
pub use keep_alive::{Gaps, KeepAlive, Stay};
pub use keeper_config::{HOT_ABOVE, KeeperConfig, LoadCosts};
pub use offers::{Offer, Offers, Service};
pub use partitioner::Partitioner;
pub use pipeline_partitioner::*;
pub use route::{Change, Route};
pub(crate) use router_config::overdue_after;
pub use router_config::{Late, RouterConfig};
pub use routing::SlackRouter;
pub use slice_assigner::*;
