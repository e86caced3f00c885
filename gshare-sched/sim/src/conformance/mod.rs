//! Conformance suites: one per policy trait, to run over any implementation of it.
//!
//! A suite is a plain function that builds as many instances as it needs and answers with the first violation, printed
//! with its seed and a picture. Call it from an ordinary test.

mod pool;
mod token;

pub use pool::{PoolReport, PoolTrial, pool};
pub use token::{Conformance, Failure, Report, token_scheduler};
