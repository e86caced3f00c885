//! All tests of the command as one program: their dependencies are linked once, and their waits overlap.

#[path = "../../daemon/tests/common/mod.rs"]
mod common;
#[path = "common/hooked.rs"]
mod hooked;

mod command_line;
mod end_to_end;
mod family;
mod observed;
mod parking;
mod partition_command;
mod profile_command;
mod python_stages;
mod scaling;
mod simulated;
mod store_command;
mod strangers;
mod why_command;
