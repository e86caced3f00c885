//! A whole node in virtual time: programs under the hook's [`Meter`], the daemon's [`Node`], frames, and devices.
//!
//! # Problem
//! A scheduler may keep its contract to the letter and the node still share badly: frames take time, kernels overrun, a process and
//! the daemon disagree, and both may die in between. Two engines decide on the two sides, [`Node`] and [`Meter`]. The simulation
//! drives both as they ship, and compares the GPU time on the devices with the promises.
//!
//! # Model
//! ```text
//! program ─launch─▶ gate, cost table ─kernel─▶ VirtualGpu ─▶ segments   (stream.rs, as in the hook's launch path)
//!                        ▲ credit                              │ Recorded, Completed
//! helper thread ───── Meter ◀──────────────────────────────────┘        (hooked_process.rs)
//!                        │ frames, each way in order, each with its delay (outside.rs)
//! daemon ────────────  Node around an audited token scheduler             (daemon.rs)
//! ```
//! - A **process** has one thread for kernel launches, one for memory, and a helper that wakes up late. Its program may wait for
//!   each kernel, pause, or fall silent, and its kernels differ from their predicted lengths.
//! - An **instance** has several processes, a device several instances, a node up to four devices.
//! - A **device** runs kernels in the order of their launches, side by side where SMs suffice; no launch can be taken back.
//!
//! A launch takes no time here, and a program uses one stream and one device. Tests with real processes cover the effect of the
//! launch call and of several streams on measurements.
//!
//! # Faults
//! `faults.rs` has all faults, and a seed switches each kind on or off: killed, stopped, leaving and late processes; a killed,
//! stopped or reloaded daemon; late, doubled and lost frames, and frames that arrive after the next connection's frames; a clock set
//! back, which both engines must refuse; a lost device; kernels of 30 to 400 ms; garbage on a connection.
//!
//! # Checks
//! See `node_book.rs` for the rules and the bound of a wait, and [`shares`](ShareReport) for the comparison of shares. Beside these, the
//! [checkers](crate::token::check) look at every call of the token scheduler, and both engines check their own invariants in builds
//! with debug assertions.
//!
//! There are four exceptions, since the node cannot keep its promise there today:
//! - A process started without a daemon knows of no siblings. Until the daemon serves the process and its siblings again, the
//!   process may have the whole share of its instance, so its GPU time does not count. Memory has no exception, since such a
//!   process has none of its own.
//! - The daemon keeps debts in its memory, and they end with it.
//! - A living process with a broken connection keeps its memory. The daemon takes the end of the connection for the end of the process, and
//!   gives the memory to the siblings. So after such a break the memory of the instance is not compared.
//! - A process that waits for each of its kernels is charged mostly by prediction, so these kernels do not vary in length here.
//!
//! # Replay
//! Everything follows from one seed, so the logs of two runs of a seed have the same hash.
//!
//! # Cost
//! Some microseconds for each kernel, in a build with debug assertions.

mod accounts;
mod audited;
mod daemon;
mod faults;
mod hooked_process;
mod node_book;
mod node_plan;
mod node_world;
mod outside;
mod share_report;
mod stream;
mod worker;

pub use accounts::AccountFigures;
pub use faults::{Fault, Kinds};
pub use node_book::Figures;
pub use node_plan::{Delays, GPUS, GpuPlan, INSTANCES, InstancePlan, NodePlan, Program, Shape};
pub use node_world::{Got, NodeWorld};
pub use share_report::{DELIVERED_PERCENT, ERROR_MAX, Errors, SPAN, ShareReport, divide};
pub use worker::Done;

use crate::Make;
use crate::story::Story;
use crate::token::Terms;
use gshare_core::{Duration, TokenScheduler};
use gshare_meter::Meter;
use gshare_sched::node::{Node, vertical_scaler};
use gshare_sched::scale::VerticalScaler;
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use std::sync::Arc;

/// The most clients of a daemon at a time.
const MAX_CLIENTS: u32 = 1_024;

/// The parts of a node not drawn from the seed.
pub struct Setup {
    /// Makes a daemon's token scheduler, which has 1,024 slots and no clients yet.
    pub tokens: Make<dyn TokenScheduler>,
    /// Makes a daemon's vertical scaler, without clients.
    pub vertical: Make<dyn VerticalScaler>,
    /// The token scheduler's own terms.
    pub terms: Terms,
    /// The largest error of a share, in basis points.
    pub error_max: u64,
    /// Whether a user orders each process to park as soon as it has come back, against all claims.
    pub impatient: bool,
}

impl Setup {
    /// The multi-token scheduler in the daemon's default configuration.
    pub fn daemon() -> Self {
        let mut config = MultiTokenConfig::default();
        config.grace = Duration::from_millis(50);
        let terms = Terms::multi_token(
            config.window,
            config.max_token,
            (config.slack, config.grace),
            config.max_debt,
        );
        let tokens = move || -> Box<dyn TokenScheduler> {
            Box::new(MultiToken::new(config.clone()).expect("the settings are within their bounds"))
        };
        let (tokens, vertical) = (Arc::new(tokens), Arc::new(vertical_scaler));
        Self { tokens, vertical, terms, error_max: ERROR_MAX, impatient: false }
    }
}

gshare_core::debug_fields!(Setup { terms });

/// The result of a run of one seed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeReport {
    /// The seed of the run.
    pub seed: u64,
    /// The number of processes in the whole run.
    pub processes: u64,
    /// Calls of the token scheduler.
    pub calls: u64,
    /// Stale frames, and frames after which the node closed the connection.
    pub refused: u64,
    /// The hash of the log, equal for equal runs.
    pub log_hash: u64,
    /// The comparison of measured and entitled shares.
    pub shares: ShareReport,
    /// Further figures of the run.
    pub figures: Figures,
}

/// The names of the driven types.
pub fn driven() -> [&'static str; 2] {
    [core::any::type_name::<Node>(), core::any::type_name::<Meter<Arc<hooked_process::Shared>>>()]
}

/// Runs the node of a seed. After a failure, a second run of the seed tells its story.
pub fn run(seed: u64, setup: &Setup) -> Result<NodeReport, Story> {
    let plan = NodePlan::draw(seed, setup.terms.window);
    NodeWorld::new(&plan, setup, false)
        .run(seed)
        .map_err(|failure| NodeWorld::new(&plan, setup, true).run(seed).err().unwrap_or(failure))
}

/// Runs one seed, and returns the last lines of its log beside its report.
pub fn story(seed: u64, setup: &Setup) -> (Result<NodeReport, Story>, Vec<String>) {
    let plan = NodePlan::draw(seed, setup.terms.window);
    let mut world = NodeWorld::new(&plan, setup, true);
    let result = world.run(seed);
    (result, world.log())
}
