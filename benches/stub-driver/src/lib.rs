//! A second driver for the benches: the hook must not depend on traits of the simulated driver alone.
//!
//! # Problem
//! The hook and the simulated driver come from the same hands, and may share a mistake about real drivers. This library has the driver's C
//! functions for a small program and the hook, written from the driver's documentation alone.
//!
//! # Model
//! A device works on one kernel at a time, in the order in which kernels become ready, and knows only the end of its work. An entry of a
//! stream is timed at once when everything before it is timed: a kernel begins when the stream and the device are free, an event has the
//! time of the work before it. Behind a wait (a host function, a word of memory, an event without a time) entries queue, and are timed when
//! a thread of the library, or any call of the program, sees the wait end.
//!
//! A launch call spins for its set duration, then queues; with `STUB_EARLY` it queues first. Every other call takes no longer than its
//! code. A kernel's duration is in its name: `spin_5us`, or `zero`.
//!
//! | variable | meaning |
//! |---|---|
//! | `STUB_CALL_NS` | duration of a launch call, in ns; 0 without it |
//! | `STUB_DEVICE` | file of a device shared by processes; a process without it has its own device |
//! | `STUB_EARLY` | a launch call queues its work at its beginning |
//! | `STUB_WITHOUT_WORDS` | streams cannot wait for a word of memory |
//!
//! `stub_busy_ns` returns the device time of the process's kernels.
#![allow(unsafe_code, reason = "the driver's C functions")]
#![allow(missing_docs, reason = "the driver's own documentation has them")]

mod device;
mod exports;
mod streams;
