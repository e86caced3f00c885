//! What a process that shares a GPU decides by itself.
#![forbid(unsafe_code)]

mod allowance;
pub mod cost;
pub mod cycle;
pub mod timing;

pub use allowance::MemoryAccount;
