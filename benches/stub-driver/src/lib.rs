//! A driver of its own for the benches: what a hook may take for granted of one driver, it must find here as well.
//!
//! # Problem
//! The hook and the simulated driver come from the same hands, and may share a mistake about what a driver does. This library has the
//! driver's C functions that a small program and the hook need, written from the driver's documentation alone.
//!
//! # Model
//! A device works on one kernel at a time, in the order in which kernels become ready, and knows no more than until when it is busy.
//! An entry of a stream is timed at once when everything before it is timed: a kernel begins when the stream and the device are
//! free, an event has the time of the work before it. Behind a wait (a host function, a word of memory, an event without a time) entries queue, and
//! are timed when a thread of the library, or any call of the program, sees the wait end.
//!
//! A launch call spins for as long as it is told, then queues; with `STUB_EARLY` it queues first. Every other call takes what its
//! code takes. A kernel's duration is in its name: `spin_5us`, or `zero`.
//!
//! | variable | what |
//! |---|---|
//! | `STUB_CALL_NS` | duration of a launch call, in ns; 0 without it |
//! | `STUB_DEVICE` | file that processes share one device by; a process without it has its own |
//! | `STUB_EARLY` | a launch call queues its work at its beginning |
//! | `STUB_WITHOUT_WORDS` | streams cannot wait for a word of memory |
//!
//! `stub_busy_ns` tells for how long kernels of the process have had the device.
#![allow(unsafe_code, reason = "the driver's C functions")]
#![allow(missing_docs, reason = "the driver's own documentation has them")]

mod device;
mod exports;
mod streams;
