//! Scaling: how many tokens each client of a GPU gets, and how many instances run.
//!
//! The events, actions and errors are those of [`gshare_core::scale`]; a policy is one file here.
//!
//! | policy | for |
//! |---|---|
//! | [`DiluVertical`] | moving tokens between the clients of a GPU every 5 ms (Dilu, Algorithm 2) |
//! | [`LazyHorizontal`] | starting instances when load stays (Dilu, section 3.4.2) |
//! | [`PeakHorizontal`] | the same, but only what peaks need that the running ones cannot take at their limits |
//! | [`HeuristicHorizontal`] | choosing instances and their points by a profile (FaST-GShare, Algorithm 1) |
//! | [`CoScaler`] | a vertical and a horizontal one together (Dilu, section 3.4) |

pub mod co_scaler;
pub mod heuristic;
pub mod lazy;
pub mod peaks;
pub mod vertical;

mod apportion;
mod cycle;
mod fleet;
mod forecast;
mod queue;

pub use co_scaler::{CoScaleAction, CoScaleError, CoScaleEvent, CoScaler};
pub use fleet::FleetConfig;
pub use heuristic::{HeuristicHorizontal, HeuristicHorizontalConfig};
pub use lazy::{LazyHorizontal, LazyHorizontalConfig};
pub use peaks::{PeakHorizontal, PeakHorizontalConfig};
pub use vertical::{DiluVertical, DiluVerticalConfig};
