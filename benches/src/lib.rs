//! The parts that the benches and the replays share: seeded inputs, peers, and one module per replayed figure.

pub mod cases;
pub mod churn;
pub mod mixes;
pub mod peers;
pub mod replay;
pub mod seeds;
pub mod world;

/// The example of the README is run as a test: here, since the packages of other crates do not contain that file.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
