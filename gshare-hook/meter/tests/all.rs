//! All tests of the meter as one program: what they use is linked once.

mod common;

mod daemon_loss;
mod leases;
mod long_waits;
mod parts;
mod property;
