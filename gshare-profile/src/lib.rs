//! Profiling of GPU functions: the choice of the next point, and a journal of the results.
//!
//! # Problem
//! Requests and limits cannot be guessed: a function's throughput is not proportional to its share of time or of SMs
//! (FaST-GShare, Figure 8; Dilu, Figure 7). Measuring every point of the grid costs hours of GPU time. So a planner
//! chooses the few points of interest, and a journal keeps each result. A killed run continues from its journal.
//!
//! # What is here
//! | strategy | answers | source |
//! |---|---|---|
//! | [`planner::Grid`] | a whole [`ProfileTable`](gshare_core::profile::ProfileTable) | FaST-GShare, section 3.2 |
//! | [`planner::TrainingSearch`] | request and limit of a training function | Dilu, section 3.2 |
//! | [`planner::EfficacySearch`] | SM share and batch size of an inference function | Dilu, section 3.2, by a search of our own |
//!
//! | module | |
//! |---|---|
//! | [`planner`] | which setting next |
//! | [`trial`], [`load`], [`stats`] | one trial: calls, warm-up, steady state, throughput with its interval |
//! | [`executor`] | the ways to run the function. Feature `process`: a program of the user's, `http`: an HTTP server |
//! | [`mod@batch`] | what a batch is on the wire |
//! | [`meter`] | how busy the GPU was meanwhile; feature `nvml`: by NVML |
//! | [`record`] | a strategy from its first trial to its answer |
//! | `store` (feature) | trials in one file, which survive a killed run |
//!
//! Without features this crate is pure: it has no clock, thread, process or file.
//!
//! # Example
//! ```
//! use gshare_core::profile::ProfilePoint;
//! use gshare_core::{Duration, Quota, SmShare};
//! use gshare_profile::planner::{EfficacySearch, Journal, Measurement, Planner, Step, Trial};
//!
//! // Stands for a run on a GPU: up to 50 % of the SMs twice as many are twice as fast.
//! let measure = |setting: gshare_core::profile::Setting| {
//!     let sm = f64::from(setting.sm.get().min(5_000)) / 1e4;
//!     let seconds = (0.002 + 0.001 * f64::from(setting.batch)) / sm;
//!     let exec = Duration::from_nanos((seconds * 1e9) as u64);
//!     ProfilePoint::measured(setting.sm, setting.quota, setting.batch, f64::from(setting.batch) / seconds, exec, exec)
//! };
//! let planner = EfficacySearch::new(Duration::from_millis(50))?;
//! let mut journal = Journal::default();
//! let choice = loop {
//!     match planner.next(&journal)? {
//!         Step::Measure(setting) => {
//!             let point = measure(setting)?;
//!             journal.add(Trial::done(Measurement { point, load: None }))?;
//!         }
//!         Step::Done(choice) => break choice,
//!     }
//! };
//! assert!(choice.point.p95 <= Duration::from_millis(50));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]

pub mod batch;
pub mod executor;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "process")]
pub mod line_program;
pub mod load;
pub mod meter;
pub mod planner;
pub mod record;
pub mod stats;
pub mod trial;
#[cfg(feature = "store")]
pub mod trial_file;
