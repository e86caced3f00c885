//! One copy of a model for all who use it.
//!
//! # Problem
//! The weights are most of an instance's memory and most of its cold start (FaST-GShare, sections 3.5 and 5.5). A
//! store loads a model once, keeps it in an arena, and hands read-only maps of that arena to every process that may
//! use it; a process that dies gives its references back by the closing of its socket.

pub mod engine;
