//! All tests of the daemon as one program: their dependencies are linked once, and their waits overlap.

mod common;

mod charges;
mod embed;
mod garbage;
mod guards;
mod page;
mod registry;
mod restart;
