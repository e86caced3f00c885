//! Pipelines over MIG slices: the cut of a function into stages, and the free slices on which the stages run.
//!
//! # Problem
//! A function is a DAG of components ([`gshare_core::dag`]), and a node has free slices of a few sizes. Wanted are a cut into stages and a
//! slice for each stage: the memory fits, the latency meets the SLO, and the pipeline is balanced (FluidFaaS, section 5.2.2) or its
//! slowest slice is as fast as possible. A chain has 2^(n-1) cuts and a wider DAG has more, so no step may list them all.
//!
//! # Terms
//! - **stage**: components that follow one another in the pipeline. **Part**: a stage's components on one slice. A stage has several parts
//!   only as a **spread** fork, with a slice per branch and the time of its longest branch ("the maximum execution time among them");
//! - **CV**: coefficient of variation of the stages' times, std / mean (equation 1). A CV of 0 is perfect balance;
//! - **bottleneck**: the longest time any slice is busy with one batch, hand-offs included; 1 / throughput. **Latency**: time of one batch
//!   through the whole pipeline, every branch taken;
//! - **hand-off**: an output's way between two slices through host memory, which occupies both the writing and the reading slice;
//! - **feasible**: each part and the run-time fit a slice's memory, all components have a profile for it, and the latency meets the SLO;
//! - **ideal** (down-set): a set of components with all their predecessors. **Step**: two nested ideals, hence a possible stage; a path of
//!   steps is a pipeline. **Segment**: a component comparable with every other, or everything between two such (a fork and its join).
//!
//! # Algorithm
//! - **Graph**: [`Mode::SeriesCut`] has the ideals between segments, the other modes have all of them. A wide DAG has too many
//!   (`max_ideals`): series cuts then take their place, and the answer reports the change.
//! - **By CV** ([`RankMode::PaperCv`], `balanced`): for `k` stages with times `t` on one reference slice, `T = sum t` and `S = sum t²`,
//!   `CV² = k*S / T² - 1`. [`Balance`] compares `k*S / T²` in integers, so every machine has the same order. Equal CVs go by fewer stages,
//!   less hand-off, then the cuts. For a fixed `k` only `S` varies, the length of a path: the k best paths are listed lazily.
//! - **By bottleneck** ([`RankMode::Bottleneck`], `bottleneck`): a dynamic program over (ideal, slices of each profile used) finds the
//!   least bottleneck within the SLO, then the fewest compute slices at that bottleneck.
//! - **Slices** ([`LeastFragmentation`]): parts go to profiles by least latency, then least memory left over; profiles go to slices on the
//!   fewest GPUs, then by least fragmentation. With `carve`, the idle memory of a GPU may be cut into new slices.
//!
//! # Invariants
//! Tests compare with brute force: the CV order is exact to the last tie; each pipeline comes once; its parts hold every component; every
//! edge goes forward. The bottleneck equals an exhaustive search's, so it never exceeds the bottleneck of the best pipeline by CV.
//!
//! # Cost
//! For i ideals, s steps and at most k stages: O(i² + k*s) before the second result, about k heap steps per further result, and memory in
//! proportion to the listed results. Bottleneck: O(s * p * Π(c+1)) for p profiles with c free slices each. Bounds: [`PartitionConfig`].
//!
//! # Differences from the paper
//! The paper sorts all cuts; here the list is computed as it is read, in the same order. The modes define a cut of a DAG, which the paper
//! does not. The default rank is the bottleneck, since the CV sees neither hand-offs nor the speed of the free slices.

mod assign;
mod balance;
mod balanced;
mod bottleneck;
mod costs;
mod eviction;
mod free_slices;
mod home;
mod keep_alive;
mod keeper_config;
mod lattice;
mod offers;
mod partitioner;
mod pipeline_partitioner;
mod plan;
mod route;
mod router_config;
mod routing;
mod slice_assigner;

pub use assign::LeastFragmentation;
pub use balance::Balance;
pub use eviction::{EvictionOrder, EvictionPolicy};
pub use free_slices::*;
pub(crate) use home::whole;
pub use home::{Home, Place, PlacedPart};
pub use keep_alive::{Gaps, KeepAlive, Stay};
pub use keeper_config::{HOT_ABOVE, KeeperConfig, LoadCosts};
pub use offers::{Offer, Offers, Service};
pub use partitioner::{PartitionConfig, Partitioner};
pub use pipeline_partitioner::*;
pub use plan::{NoPlan, PassedOver, Plan, plan};
pub use route::{Change, Route};
pub(crate) use router_config::overdue_after;
pub use router_config::{Late, RouterConfig};
pub use routing::SlackRouter;
pub use slice_assigner::*;
