//! A whole node in virtual time: programs under the hook's [`Meter`], the daemon's [`Node`], frames, and devices.
//!
//! # Problem
//! A scheduler may keep its contract to the letter and the node still share badly: frames take time, kernels run over, what a
//! process believes differs from what the daemon believes, processes and daemons die in between. What decides on both sides
//! are two engines, [`Node`] and [`Meter`]; both are driven here as they ship, and what is checked in the end is what the devices
//! saw.
//!
//! # Model
//! ```text
//! program ─launch─▶ gate, cost table ─kernel─▶ VirtualGpu ─▶ segments   (stream.rs, as in the hook's launch path)
//!                        ▲ credit                              │ Recorded, Completed
//! helper thread ───── Meter ◀──────────────────────────────────┘        (hooked_process.rs)
//!                        │ frames, each way in order, each with its delay (outside.rs)
//! daemon ────────────  Node around an audited token scheduler             (daemon.rs)
//! ```
//! - A **process** has one thread that launches kernels, one that allocates and frees memory, and a helper that wakes up late. Its
//!   program may wait for each kernel, pause, or fall silent; the lengths of kernels are not what was predicted.
//! - An **instance** has several processes, a device several instances, a node up to four devices.
//! - A **device** runs kernels in the order of their launches, side by side where SMs suffice; none can be taken back.
//!
//! A launch takes no time here, and a program uses one stream and one device: what the launch call and several streams do to
//! measurements is tested with real processes.
//!
//! # Faults
//! All in `faults.rs`. A seed switches each kind on or off: killed, stopped, leaving and late processes; a daemon that is killed,
//! stopped, reloaded; late frames; a clock that was set back, which both engines must refuse; a lost device; kernels of 30 to 400 ms;
//! garbage on a connection.
//!
//! # What is checked
//! See `book.rs` for the rules and the bound of a wait, [`shares`](ShareReport) for what is compared and when. Beside these,
//! the [checkers](crate::token::check) look at every call of the token scheduler, and both engines at their own invariants in
//! builds with debug assertions.
//!
//! Three things are excepted, since they cannot be kept today:
//! - A process that starts while no daemon is there knows of no siblings: until it is served, and its siblings are again, it may
//!   have the whole share of its instance. Its GPU time is not counted. Memory is not excepted: such a process has none of its
//!   own.
//! - Debts are kept in the daemon's memory: they end with it.
//! - Processes that wait for each of their kernels are charged mostly as predicted: here the lengths of these do not vary.
//!
//! # Replay
//! Everything follows from one seed. The hash of the log of two runs of one seed is the same.
//!
//! # Cost
//! Some microseconds for each kernel, in a build with debug assertions.

mod audited;
mod book;
mod daemon;
mod faults;
mod hooked_process;
mod node_plan;
mod outside;
mod share_report;
mod stream;
mod worker;
mod world;

pub use book::Figures;
pub use faults::{Fault, Kinds};
pub use node_plan::{Delays, GPUS, GpuPlan, INSTANCES, InstancePlan, NodePlan, Program, Shape};
pub use share_report::{DELIVERED_PERCENT, ERROR_MAX, Errors, SPAN, ShareReport, divide};
pub use worker::Done;
pub use world::{Got, World};

use crate::Make;
use crate::token::Terms;
use gshare_core::{Duration, TokenScheduler};
use gshare_meter::Meter;
use gshare_sched::node::{Node, vertical_scaler};
use gshare_sched::scale::VerticalScaler;
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use std::sync::Arc;

/// Clients that a daemon takes at a time.
const MAX_CLIENTS: u32 = 1_024;

/// The parts of a node that are not drawn from the seed.
pub struct Setup {
    /// Makes the token scheduler of a daemon: one that has no clients yet, with 1,024 slots.
    pub tokens: Make<dyn TokenScheduler>,
    /// Makes the vertical scaler of a daemon: one that has no clients yet, for 1,024 of them.
    pub vertical: Make<dyn VerticalScaler>,
    /// The token scheduler's own terms.
    pub terms: Terms,
    /// The largest error of a share, in basis points.
    pub error_max: u64,
}

impl Setup {
    /// The multi-token scheduler as the daemon sets it up unless it is told otherwise.
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
        let vertical = || vertical_scaler(MAX_CLIENTS).expect("the settings are within their bounds");
        Self { tokens: Arc::new(tokens), vertical: Arc::new(vertical), terms, error_max: ERROR_MAX }
    }
}

gshare_core::debug_fields!(Setup { terms });

/// The result of a run of one seed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeReport {
    /// The seed.
    pub seed: u64,
    /// Processes that were there at one time or another.
    pub processes: u64,
    /// Calls of the token scheduler.
    pub calls: u64,
    /// Frames that the node found stale, or ended a connection for.
    pub refused: u64,
    /// The same for two runs that were the same.
    pub log_hash: u64,
    /// The shares.
    pub shares: ShareReport,
    /// Further figures that were counted.
    pub figures: Figures,
}

/// A seed that shows something wrong.
#[derive(Clone, thiserror::Error)]
#[error("node, seed {seed}: {what}\n{story}")]
pub struct NodeFailure {
    /// The seed.
    pub seed: u64,
    /// Which rule was broken, when, and how.
    pub what: String,
    /// The plan of the run, and its last events.
    pub story: String,
}

crate::debug_as_text::debug_as_text!(NodeFailure);

/// Names of the types that are driven.
pub fn driven() -> [&'static str; 2] {
    [core::any::type_name::<Node>(), core::any::type_name::<Meter<Arc<hooked_process::Shared>>>()]
}

/// Runs the node of a seed. A seed that fails is run once more, to tell its story.
pub fn run(seed: u64, setup: &Setup) -> Result<NodeReport, NodeFailure> {
    let plan = NodePlan::draw(seed, setup.terms.window);
    World::new(&plan, setup, false)
        .run(seed)
        .map_err(|failure| World::new(&plan, setup, true).run(seed).err().unwrap_or(failure))
}

/// Runs one seed, and gives the last lines of its log with its report.
pub fn story(seed: u64, setup: &Setup) -> (Result<NodeReport, NodeFailure>, Vec<String>) {
    let plan = NodePlan::draw(seed, setup.terms.window);
    let mut world = World::new(&plan, setup, true);
    let result = world.run(seed);
    (result, world.log())
}
