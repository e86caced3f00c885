//! All tests of the daemon as one program: what they use is linked once, and those that wait do so side by side.

mod common;

mod charges;
mod embed;
mod garbage;
mod guards;
mod page;
mod registry;
mod restart;
