//! Token scheduling: who may launch kernels now.
//!
//! The events, actions and errors are those of [`gshare_core::token`]; a policy is one file here.
//!
//! | policy | for |
//! |---|---|
//! | [`MultiToken`] | FaST-GShare's multi-token scheduler: quotas by window, several holders side by side |
//! | [`SlotScheduler`] | a packing kept as a schedule: the only one that proves the quotas of a GPU packed to the brim |

mod ledger;
pub mod multi_token;
pub mod slot_table;

pub use multi_token::{MultiToken, MultiTokenConfig};
pub use slot_table::SlotScheduler;
