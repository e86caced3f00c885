//! Conformance suites: one per policy trait, to run over any implementation of it.
//!
//! A suite is a plain function, which builds the instances it needs and returns the first broken claim of the trait's contract,
//! with its seed, its time and the story so far. Call it from an ordinary test:
//!
//! ```
//! use gshare_sched::pack::{MaxRects, MaxRectsConfig};
//! use gshare_sim::conformance::{Shares, packer};
//!
//! packer(&|| Box::new(MaxRects::new(MaxRectsConfig::default())), Shares::Rectangles, 0..3)?;
//! # Ok::<(), gshare_sim::Story>(())
//! ```
//!
//! | suite | trait |
//! |---|---|
//! | [`packer()`] | [`Packer`](gshare_sched::pack::Packer) |
//! | [`horizontal_scaler()`] | [`HorizontalScaler`](gshare_sched::scale::HorizontalScaler) |
//! | [`vertical_scaler()`] | [`VerticalScaler`](gshare_sched::scale::VerticalScaler) |
//! | [`whole_policy()`] | [`WholePolicy`](gshare_sched::platform::WholePolicy) |
//! | [`slices()`] | [`Route`](gshare_sched::pipeline::Route), [`Place`](gshare_sched::pipeline::Place) |
//! | [`token_scheduler()`] | [`TokenScheduler`](gshare_core::TokenScheduler) |

mod horizontal;
mod in_world;
mod packer_trial;
#[cfg(test)]
mod pool_tests;
#[cfg(test)]
mod pool_trial;
mod slices;
mod story;
mod token_scheduler;
mod vertical;
mod whole_policy;

pub use horizontal::horizontal_scaler;
pub use packer_trial::{Shares, packer};
pub use slices::{chain, slices};
pub use token_scheduler::{Conformance, Report, token_scheduler};
pub use vertical::vertical_scaler;
pub use whole_policy::whole_policy;
