//! Why a process waited, in a ring of records that others may read while it runs.
//!
//! # Problem
//! A person sees a program stand still and asks why: has it used up its share, does it wait for another process, is the
//! daemon gone? Only the hooked process knows. So it writes what it waits for, which memory it was denied and what the
//! daemon said into a small shared file, `gshare trace` reads that at any time, and neither waits for the other.
//!
//! # Terms
//! - [`Event`]: what happened. [`Why`]: what a launch waits for. [`Record`]: an event with time, thread and device.
//! - **lane**: a ring of its own. What happens often ([`Lane::Often`]: waits, tokens, memory charges) must not
//!   overwrite what happens rarely ([`Lane::Seldom`]: connections, refusals, denials).
//!
//! # Layout
//! The file is [`WORDS`] words of 64 bits in the machine's order:
//!
//! ```text
//! word 0   magic                 4  when the ring was made, ns of CLOCK_MONOTONIC (as all times)
//!      1   version               6  records begun in lane 0
//!      2   process id            7  records begun in lane 1
//!      3   categories traced
//!      16  records of lane 0, then of lane 1, eight words each:
//!          number + 1 | time | kind, device, thread | four fields | check
//! ```
//!
//! # Algorithm
//! A writer takes a number by one atomic addition, and stores its words in the slot of that number with no further order.
//! The last word is a checksum of the others: a reader takes a slot whose words it does not fit for torn, be it that the
//! writer has not finished, that two writers a lap apart have met in the slot, or that the process died in it.
//!
//! # Invariants
//! A record that is read is one that was written, but for a chance of 2^-64. Any bytes are read without a panic.
//!
//! # Cost
//! A record is an addition, eight stores and seven multiplications; no lock, allocation or system call.

mod event;
mod ring;
mod text;

pub use event::{Category, Denial, End, Event, FromDaemon, Lane, Why};
pub use ring::{MAGIC, Recorder, RingError, Snapshot, VERSION, WORDS};

/// An event with its time, thread and device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Record {
    /// How many records of its lane were written before it.
    pub number: u64,
    /// When, in ns of `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// The thread, as its own process numbers it.
    pub thread: u32,
    /// The process's own number of the device, where there is one.
    pub device: Option<u16>,
    /// The event itself.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub event: Event,
}
