//! The parts that the benches and the replays share: seeded inputs, peers, and one module per replayed figure.

pub mod cases;
pub mod churn;
pub mod first_come;
pub mod mixes;
pub mod peaks;
pub mod peers;
pub mod replay;
pub mod seeds;
pub mod world;

/// Whether a bench runs as a test: `cargo test --bench NAME -- --test` asks only that it works, so little is enough.
pub fn runs_as_test() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

/// Resident memory of this process in bytes, from the kernel.
pub fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4_096)
}
