//! Scaling: how many tokens each client of a GPU gets, and how many instances run.
//!
//! # Problem
//! Load changes from second to second. A new instance takes many seconds to start, while the instances that run sit
//! beside others on their GPUs and could do more for a while if their neighbours did less. So there are two scalers
//! (Dilu, section 3.4): a [`VerticalScaler`] moves tokens between the clients of one GPU every few milliseconds, a
//! [`HorizontalScaler`] starts and stops instances when that has not been enough for long.
//!
//! # Terms
//! - **token** here: one unit of work that a client may launch in a period. One predicted microsecond of GPU time, or
//!   one kernel block; the scaler does not care which, the host says it once ([`TokenUnit`]);
//! - **`MaxTokens`**: tokens that one GPU can do in a period; they are never issued twice;
//! - **owner**: an SLO-sensitive client; the state of a GPU is owned by those;
//! - **KLC**: kernel launching cycle, the time from the first to the last kernel launch of one iteration (Dilu, 3.4.1).
//!   It grows when neighbours take the SMs, long before a latency at the application shows it;
//! - **instance**: one running copy of a function. It is *starting*, then *ready*, then *draining* (it takes no new
//!   request and finishes those it has), then gone.
//!
//! # Who says what
//! ```text
//! host ─ ClientJoined, UsageReported, IterationFinished, DeadlineReached ─▶ VerticalScaler ─ Issue, StateChanged ─▶ host
//! host ─ FunctionAdded, LoadReported, InstanceReady, InstanceGone ─▶ HorizontalScaler ─ Start, Drain, Stop, Unmet ─▶ host
//! ```
//! [`VerticalAction::Issue`] holds from period to period until the next one for that client, so a period in which
//! nothing changes costs no message.
//!
//! # Policies
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
mod horizontal_scaler;
mod queue;
mod vertical_scaler;

pub use co_scaler::{CoScaleAction, CoScaleError, CoScaleEvent, CoScaler};
pub use fleet::FleetConfig;
pub use heuristic::{HeuristicHorizontal, HeuristicHorizontalConfig};
pub use horizontal_scaler::*;
pub use lazy::{LazyHorizontal, LazyHorizontalConfig};
pub use peaks::{PeakHorizontal, PeakHorizontalConfig};
pub use vertical::{DiluVertical, DiluVerticalConfig};
pub use vertical_scaler::*;
