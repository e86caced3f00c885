//! Dilu's complementary placement: jobs by `<request, limit>` of SMs and memory, as sums per GPU.
//!
//! # Problem
//! Dilu (section 3.3) does not divide a GPU by rectangles: its token scheduler moves SM share between the instances of a
//! GPU at run time, so a placement need only keep three sums: requests at most all SMs, limits at most gamma of
//! them (gamma > 1 is the planned oversubscription), memory at most the GPU's. The fewest GPUs win.
//!
//! # Terms
//! [`Demand::sm`] is the request, [`Demand::limit`] the limit. A *gang* is a training job's workers, each on a GPU of its
//! own. The share of time in a demand is not looked at.
//!
//! # Algorithm
//! (Dilu, Algorithm 1, with the gaps closed as listed under Differences.)
//! 1. *Affinity*: take the training jobs with a worker that already shares a GPU with an instance of `f`. A new inference
//!    instance of `f` first tries GPUs with other workers of these jobs, so that all workers of a job see equal neighbours.
//! 2. *Best fit*: else the open GPU with the least `alpha * free SM share + beta * free memory share` that fits.
//! 3. *New GPU*: else the smallest empty GPU that fits.
//!
//! The score before placing orders GPUs of one size as the score after does (they differ by a constant of the demand), so
//! the order depends on the GPUs alone and an index answers: a grid of free request (per cent) by free memory (1/127 of the
//! largest GPU), with a bit per cell that is not empty, and per cell an ordered set of (score, GPU, free limit in 256
//! steps), its least key and its largest step. A query walks rows from the request upwards, and in each the set bits from
//! the memory upwards, while the least score a cell can hold is below the best found; a cell with too small a largest free
//! limit, or with a least key worse than the best, is skipped without a look into its set; the bits are kept once for each
//! of 16 classes of free limit.
//!
//! Worked example (40 GB GPUs, alpha 0.6, beta 0.4): A has 0.5 of its SMs and 10 GB free: 0.6 x 0.5 + 0.4 x 0.25 = 0.40. B
//! has 0.3 and 30 GB free: 0.18 + 0.30 = 0.48. A demand of (0.2, 5 GB) fits both and goes to A; one of (0.2, 20 GB) to B.
//!
//! # Invariants
//! The three sums are the sums over the placements and within their bounds; each open GPU is in the index once,
//! in the cell of its free request and memory.
//!
//! # Cost
//! A place looks at the cells between the demand's corner and the best score: half of the 0.5 us (median) that it takes at
//! 30 000 GPUs. A filter that refuses most GPUs makes it walk on. Memory: about 60 bytes a placement and 150 a GPU.
//!
//! # Differences from the paper
//! - The printed loop may choose the same GPU for two workers and end with fewer than `n_j`; here a gang has distinct GPUs
//!   or fails whole. Any node will do (the published simulation wants one node).
//! - "Start a new GPU" does not check that the job fits an empty one, or that one exists; here both are errors.
//! - Sums are integers (basis points, bytes): `0.1 + 0.2` is `0.3`, and a GPU is empty after its last job.
//! - Large models are placed like others. The paper leaves room for their growth by the worst fit in memory, and splits a model over
//!   several GPUs; `replay dilu-fig20` does both around this packer.
//! - On GPUs of unequal size the score is taken before placing, with 20 fractional bits, rounded down.
//! - Ties: lowest GPU id.

mod dilu;
mod grid;

pub use dilu::{DiluConfig, DiluPacker};

#[cfg(doc)]
use crate::pack::Demand;
