//! All tests of the meter as one program, so that their dependencies are linked once.

mod common;

mod accounts;
mod daemon_loss;
mod long_waits;
mod parts;
mod property;
mod run;
mod turns;
mod unlimited;
