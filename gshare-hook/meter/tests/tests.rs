//! All tests of the meter as one program, so that their dependencies are linked once.

mod common;

mod accounts;
mod daemon_loss;
mod launch_model;
mod long_waits;
mod parking;
mod parts;
mod property;
mod turns;
mod unlimited;
