//! Token scheduling: which clients may launch kernels now.
//!
//! The events, actions and errors come from [`gshare_core::token`]. [`MultiToken`] is FaST-GShare's multi-token scheduler, with lag
//! accounting; on a GPU with requests beyond the whole it keeps a slot of every window for each client. [`Leases`] is the base for a
//! policy of your own.

mod client;
mod leases;
mod ledger;
pub mod multi_token;
mod slots;

pub use leases::{Leases, Turn};
pub use multi_token::{MultiToken, MultiTokenConfig};
pub(crate) use slots::MOST_SLOTS;
