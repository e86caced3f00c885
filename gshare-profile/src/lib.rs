//! Profiling of GPU functions: which point to measure next, how to measure it, and what was measured.
//!
//! # Problem
//! Requests and limits cannot be guessed: a function's throughput is not proportional to its share of time or of SMs
//! (FaST-GShare, Figure 8; Dilu, Figure 7). Measuring every point of the grid costs hours of GPU time. So a planner
//! chooses the few points that matter, an executor measures one of them in the steady state, and a store keeps what
//! was measured, with its confidence interval, so that a run that was killed goes on where it was.
//!
//! # Status
//! This version holds the place of the crate in the family and no planner yet; nothing here may be relied on.
#![forbid(unsafe_code)]
