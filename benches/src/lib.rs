//! The parts that the benches and the replays share: seeded inputs, peers, and one module per replayed figure.

pub mod cases;
pub mod churn;
pub mod mixes;
pub mod peers;
pub mod replay;
pub mod seeds;
