//! Scaling: how many tokens each client of a GPU gets, and how many instances run.
//!
//! The events, actions and errors are those of [`gshare_core::scale`]; a policy is one file here.
//!
//! | policy | for |
//! |---|---|
//! | [`DiluVertical`] | moving tokens between the clients of a GPU every 5 ms (Dilu, Algorithm 2) |

pub mod vertical;

mod apportion;
mod cycle;

pub use crate::token::ConfigError;
pub use vertical::{DiluVertical, DiluVerticalConfig};
