//! Packing quota x SM rectangles onto GPUs: maximal free rectangles, with release.
//!
//! # Problem
//! A GPU is a bin: its width is the time of a window, its height its SMs, both in basis points (FaST-GShare, section
//! 3.4.2). A demand is a rectangle that may not be turned, with memory as a side condition. Demands come and go; each is
//! placed at once, on as few GPUs as possible, and no two rectangles of a GPU may overlap.
//!
//! # Terms
//! - *demand*: shares and memory for an instance ([`Demand`]); *placement*: its place on a GPU ([`Placement`]);
//! - *rectangle*: the part of a GPU that a placement holds ([`Rectangle`]): time runs along x, SMs along y (FaST-GShare,
//!   section 3.4.2). Dilu's packer keeps sums only and leaves the offsets at zero;
//! - *gang*: demands that need one GPU each, all different, or nothing at all (Dilu, Algorithm 1: `n_j`);
//! - *open*: a GPU that holds a placement; *hole*: a maximal free rectangle;
//! - *re-arranging* changes the rectangles inside one GPU; the offsets are virtual, so no process moves.
//!
//! # Algorithm
//! 1. Each GPU keeps the exact set of its holes, recomputed locally on place and release (`geometry`).
//! 2. A class index over all holes of all GPUs answers "the smallest hole that fits" in a few node visits, whether there
//!    are ten GPUs or a hundred thousand (`index`).
//! 3. In the hole, the demand takes the lowest, leftmost corner.
//! 4. Where no open GPU has a hole, the freest few are re-arranged to make one (`rearrange`); only then is an empty GPU
//!    opened.
//!
//! Worked example, in per cent: a GPU holds 40 x 12 at (0, 0). Its holes are 60 x 100 at (40, 0) and 100 x 88 at (0, 12). A
//! demand of 60 x 50 fits both; the first is smaller (6000 against 8800), so it goes to (40, 0).
//!
//! Ties: area, short side, GPU id, then y, x.
//!
//! # Invariants
//! Placements lie inside their GPU and do not overlap; memory is never passed; holes are free and none lies in another; the
//! ledgers of area and memory are the sums; the index holds each size of each open, uncordoned GPU once.
//!
//! # Cost
//! `place` and `release`: a fraction of a microsecond for eight placements a GPU, independent of the number of GPUs, no
//! allocation in steady state. Memory: about half a kilobyte per GPU with eight placements.
//!
//! # Differences from the paper
//! - Algorithm 2, line 1 prints the fit test the wrong way round, and lines 8-14 never take the intersected rectangle out
//!   of the list, so space would be handed out twice; here it is removed.
//! - Of two equal free rectangles lines 15-19 would remove both; here one stays.
//! - Algorithm 2 never looks at memory; here it is a filter on the GPU.
//! - The keep-restructure policy leaves released rectangles unmerged until a threshold; here release restores the exact
//!   set, so there is no threshold. The paper's policy stands beside the benches, for comparison.
//! - A packing proves only that *some* schedule keeps every quota. [`SlotTable`] is that schedule, and
//!   [`MultiToken`](crate::token::MultiToken) keeps it.
//!
//! # Which policy when
//! | policy | for |
//! |---|---|
//! | [`MaxRectsConfig::default`] | best area fit, and a GPU is re-arranged before another is opened: 0.4 to 2 per cent fewer GPUs |
//! | ... with `rearrange_gpus` 0 | the paper's rule alone |
//! | ... with [`Packer::place_all`] | a set that is known beforehand |
//! | [`DiluPacker`](crate::place::DiluPacker) | requests and limits of SMs that are re-divided at run time; no time quotas |

mod areas;
mod geometry;
mod ids;
mod index;
mod list;
mod max_rects;
mod packer;
pub mod picture;
pub(crate) mod pool;
mod rearrange;
pub(crate) mod runs;
pub(crate) mod sets;
pub mod slot_table;

pub use max_rects::{MaxRects, MaxRectsConfig};
pub use packer::*;
pub use slot_table::{Slot, SlotTable};
