//! Pipelines over MIG slices: into which stages to cut a function, and which free slices they run on.
//!
//! # Problem
//! A function is a DAG of components ([`gshare_core::dag`]); a node has free slices of a few sizes. Find a cut into
//! stages and a slice for each, so that the memory fits, the latency is within the SLO, and the pipeline is balanced
//! (FluidFaaS, section 5.2.2), or, better, its slowest slice is as fast as can be. There are 2^(n-1) cuts of a chain and
//! more of anything wider, so none of this may list them all.
//!
//! # Terms
//! - **stage**: components that come one after another in the pipeline. **Part**: what of a stage runs on one slice.
//!   A stage has one part, unless it is a fork whose branches run side by side on a slice each;
//! - **CV**: coefficient of variation of the stages' times, std / mean (equation 1): 0 is perfect balance;
//! - **bottleneck**: the longest time any slice is busy with one batch, hand-offs included; 1 / throughput;
//! - **latency**: time of one batch through the whole pipeline, every branch taken;
//! - **hand-off**: the way of an output from one slice to another through host memory. It occupies the slice that
//!   writes and the slice that reads;
//! - **feasible**: every part's memory with the run-time's own fits its slice, every component has a profile there,
//!   and the latency is within the SLO;
//! - **ideal** (down-set): a set of components with all their predecessors. A pipeline is a chain of ideals from the
//!   empty one to the whole; a stage is the difference of two that follow each other, so every edge goes forward;
//! - **step**: a pair of ideals, one in the other: a possible stage. Ideals and steps are a graph, a pipeline is a path;
//! - **segment**: a component comparable with every other, or all that lies between two such (a fork and its join);
//! - **spread**: a stage that is just one fork may run its branches side by side, a slice each. Its time is then the
//!   longest branch's ("the maximum execution time among them").
//!
//! # The order of pipelines by CV
//! With the times `t` of `k` stages on one reference slice, `T = sum t` and `S = sum t²`:
//! ```text
//! mean = T/k      var = S/k - (T/k)²      CV² = var / mean² = k*S / T² - 1
//! ```
//! so [`Balance`] compares `k*S / T²`, in integers, and the order is the same on every machine. Equal CVs go by fewer
//! stages, then less hand-off, then the cuts.
//!
//! # Algorithm
//! **The graph.** [`Mode::SeriesCut`] has the ideals between segments, the other modes have all; wide DAGs have too many
//! (`max_ideals`, `max_steps`), and then series cuts are used and the answer says so.
//!
//! **By CV** ([`RankMode::PaperCv`], `balanced`). On one reference slice the stages' times add up to the same `T`
//! for every cut, so for a given number `k` of stages the CV grows with the sum of squares alone, and that is a
//! length of a path. For every `k` the paths of exactly `k` steps are listed shortest first by the recursive enumeration
//! of k-best paths (Jiménez and Marzal, 1999): a node knows its shortest ways to the end so far and one candidate per
//! step; the next best is the smallest candidate, which is then replaced by the next best of the node it leads to. A
//! heap over `k` on `k * squares` merges the lists. Paths are compared by (sum of squares, hand-offs, first step, rank
//! of the rest), which at every node is exactly the order by cost and then by cuts, so ties cost nothing. Spreading a
//! set of forks changes `T` and fixes those stages: one graph per set, merged by the exact fraction.
//!
//! Of the chains that differ only by the order of independent stages [`Mode::AcyclicQuotient`] keeps the first, the
//! lexicographic normal form: no stage comes after a larger one that it could have come before. Every tail of a normal
//! form is one, so the others are dropped inside the enumeration, where they have been built from two parts.
//!
//! **By bottleneck** ([`RankMode::Bottleneck`], `bottleneck`). A state is (ideal, slices of each profile used). The least
//! bottleneck of a state is the minimum over the last step and the profile it runs on. Then, with no slice slower than
//! the optimum (plus `tolerance`), the same states with latencies, which add up: of all slice counts that reach the end
//! within the SLO, the fewest compute slices, then the least latency, then the least memory held. Where the latency at
//! the optimum breaks the SLO, the least bottleneck that keeps it is found by bisection. The list goes on with the best
//! that holds fewer compute slices, and so on: the front of the two.
//!
//! **Slices** ([`LeastFragmentation`]). Parts go to profiles by least latency, then least memory left over (an
//! assignment problem, solved by augmenting paths); profiles to slices on the fewest GPUs, then where the idle memory
//! stays most useful. With `carve`, a pipeline that does not fit is tried on each GPU with its idle memory cut into new slices.
//!
//! ## Example
//! A chain of 2, 3, 4 and 1 ms: `T` = 10. One stage has CV 0 and comes first. Two stages: 5|5 has squares 50, `k*S` =
//! 100 = `T²`, CV 0 again, second because it has more stages; 2|8 has 68, 9|1 has 82. Three: 2|3|5 has 38, `k*S` = 114,
//! CV sqrt(0.14) = 0.37; 5|4|1 42; 2|7|1 54. Four stages: 30, 120, CV 0.45. Order: whole, 5|5, 2|3|5, 2|3|4|1,
//! 5|4|1, 2|8, 2|7|1, 9|1. With `1g` and `2g` free, the `2g` twice as fast, and no hand-offs, 5|5 has the bottleneck 5
//! (on the `1g`); the bottleneck rank finds 2 on `1g`, 8 on `2g`: 4.
//!
//! # Invariants
//! Tested against lists made by brute force: the order is that of (CV, stages, hand-off, cuts, spread) to the last tie;
//! each pipeline comes once; its parts are all components; every edge goes forward. The bottleneck is that of exhaustive
//! search, so it is never above the one of the best pipeline by CV on the same slices.
//!
//! # Cost
//! For i ideals, s steps and at most k stages: O(i² + k*s) before the second result, about k steps of a heap for each
//! further one, memory in proportion to what has been listed. Bottleneck: O(s * p * Π(c+1)) for p profiles with c free
//! slices each. Bounds: [`PartitionConfig`].
//!
//! # Differences from the paper
//! - It lists and sorts all 2^(n-1) cuts; here the list is computed as it is read, in the same order.
//! - It speaks of a dominator-based method for DAGs without saying what a cut is; here the modes say it. A component is
//!   comparable with every other exactly when it is on every path of the DAG without its transitive edges.
//! - Reference slice, kind of standard deviation and ties are not given: any slice all components have, population
//!   deviation, and ties as above. With the sample deviation the order of stages differs, not that within a `k`.
//! - The CV sees neither hand-offs nor how fast the free slices are. It is kept as the paper's rank and not the default.
//! - Branches inside a fork are not cut further; the other modes do that.

mod assign;
mod balance;
mod balanced;
mod bottleneck;
mod costs;
mod first_come;
mod free_slices;
mod instances;
mod lattice;
mod partitioner;
mod pipeline_partitioner;
mod plan;
mod router;
mod router_config;
mod routing;
mod service;
mod slice_assigner;

pub use assign::LeastFragmentation;
pub use balance::Balance;
pub use first_come::{FirstCome, FirstComeConfig};
pub use free_slices::*;
pub use instances::*;
pub use partitioner::{PartitionConfig, Partitioner};
pub use pipeline_partitioner::*;
pub use plan::{NoPlan, PassedOver, Plan, plan};
pub use router::*;
pub(crate) use router_config::overdue_after;
pub use router_config::{Late, RouterConfig};
pub use routing::SlackRouter;
pub use slice_assigner::*;
