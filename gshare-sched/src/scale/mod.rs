//! Scaling: how many tokens each client of a GPU gets, and how many instances run.
//!
//! # Problem
//! Load changes from second to second. A new instance takes many seconds to start, while running instances share their GPUs with
//! neighbours and could do more for a while if these did less. So there are two scalers (Dilu, section 3.4). A [`VerticalScaler`]
//! moves tokens between the clients of one GPU every few milliseconds. A [`HorizontalScaler`] starts and stops instances when
//! those moves have not been enough for long.
//!
//! # Terms
//! - **token** here: one unit of work for a client to launch in a period: one microsecond of GPU time;
//! - **`MaxTokens`**: the tokens of one GPU in a period, never issued twice;
//! - **owner**: an SLO-sensitive client; the owners on a GPU determine its state;
//! - **KLC**: kernel launching cycle, the time from the first to the last kernel launch of one iteration (Dilu, 3.4.1). It grows
//!   when neighbours take the SMs, long before the application shows a higher latency;
//! - **instance**: one running copy of a function. It is *starting*, then *ready*, then *draining* (it takes no new request and
//!   finishes its present ones), then gone.
//!
//! # Messages
//! ```text
//! host ─ clients, their use and their iterations ─▶ VerticalScaler ─ tokens of each client for the next period ─▶ host
//! host ─ a report of load, and the function's Fleet ─▶ HorizontalScaler ─ Start, Remove, Unmet ─▶ host
//! ```
//!
//! # Policies
//! | policy | for |
//! |---|---|
//! | [`DiluVertical`] | moving tokens between the clients of a GPU every 5 ms (Dilu, Algorithm 2) |
//! | [`LazyHorizontal`] | starting instances when load stays (Dilu, section 3.4.2) |
//! | [`HeuristicHorizontal`] | choosing instances and their points by a profile (FaST-GShare, Algorithm 1) |
//!
//! Together they co-scale (Dilu, section 3.4): the first bad KLC raises an instance within one period, and load that stays starts
//! another one. The vertical scaler runs in a node's daemon, the horizontal one in a platform, and neither needs the other.

pub mod fleet;
pub mod heuristic;
pub mod lazy;

mod apportion;
mod cycle;
mod forecast;
mod horizontal_scaler;
mod queue;
mod vertical;
mod vertical_scaler;

pub use fleet::{Fleet, FleetConfig};
pub use heuristic::{HeuristicHorizontal, HeuristicHorizontalConfig};
pub use horizontal_scaler::*;
pub use lazy::{LazyHorizontal, LazyHorizontalConfig};
pub use vertical::DiluVertical;
pub use vertical_scaler::*;
