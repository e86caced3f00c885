//! Functions that run as pipelines: a process per stage, each on its slice.
//!
//! # Problem
//! The partitioner cuts a function into stages and the assigner finds a slice for each; a host has to start the
//! processes, connect them, and keep every request that was accepted while processes die (FluidFaaS, section 5.2.1 and
//! Listing 1).
//!
//! # Terms
//! - **assignment**: which components run in which stage, on which slice, and by what command. It is a file, the paper's
//!   configuration layer, that host and stages read ([`Assignment`]);
//! - **accepted**: [`FfsFunction::submit`] answered with a [`Ticket`]. Such a request is answered once, or fails once with a
//!   [`FfsError`] that says why;
//! - **host**: the process with the [`FfsFunction`]. **Stage**: one with a [`Stage`];
//! - **mode**: `RUN`, a process is a stage; `BUILD_DAG`, it tells its components and is measured, before it is deployed.
//!   A [`Graph`] is a function for both, as is one of the Python package `gshare_ffs`.
//!
//! # Algorithm
//! 1. The host makes a channel ([`crate::channel`]) before, between and after the stages, and starts each stage's
//!    command with `CUDA_VISIBLE_DEVICES` set to its slice. A stage opens its two channels through the host's file table.
//! 2. A request gets the next number as its tag. A stage copies its input out, runs, copies its output in with the same
//!    tag, publishes it, and only then releases the input. It works on a copy because no process can be kept from writing to memory
//!    that it maps.
//! 3. A stage that dies is started again on the same channels. The request that it died over is still in its input; one that
//!    it had published already is recognised by the tag and only released.
//! 4. A request over which a stage died [`Assignment::max_attempts`] times is failed in the stage's place.
//! 5. A stage that answers with an error, or was given one from before it, passes it on as such.
//! 6. Stages die with the host: they ask the kernel for that first of all, and watch the host's pidfd while they wait.
//!    Channels are memory files without a name, so nothing is left of them.
//!
//! ## Example
//! Stages A and B. B is killed while it works on request 7. Requests 8 and 9 wait in front of it, A waits for a slot. B
//! starts again, finds 7 in its input and 6 as the last tag it published, and runs 7 again. No stage upstream noticed.
//!
//! # Differences from the paper
//! Its processes share a queue and a segment per stage, and end with an instance; a crash ends the function. Eviction is
//! the keeper's order here, not a flag that stages poll.

mod function;
mod graph;
mod stage;

pub use function::{FfsFunction, StageStatus, Ticket};
pub use graph::{Graph, Run};
pub use stage::Stage;

use crate::channel::ChannelError;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Environment of a stage.
pub(crate) const ENV_ASSIGNMENT: &str = "GSHARE_FFS_ASSIGNMENT";
pub(crate) const ENV_STAGE: &str = "GSHARE_FFS_STAGE";
pub(crate) const ENV_HOST: &str = "GSHARE_FFS_HOST";
pub(crate) const ENV_INPUT: &str = "GSHARE_FFS_INPUT";
pub(crate) const ENV_OUTPUT: &str = "GSHARE_FFS_OUTPUT";

/// Environment of a process in `BUILD_DAG` mode: the folder for what it tells, see [`Graph`].
pub const ENV_BUILD: &str = "GSHARE_FFS_BUILD";
/// With [`ENV_BUILD`]: the component that is measured. Without it the process tells the shape.
pub const ENV_COMPONENT: &str = "GSHARE_FFS_COMPONENT";

/// Set in the tag of a message that is a failure.
pub(crate) const FAILED: u64 = 1 << 63;

/// The most stages of a function.
pub const MAX_STAGES: usize = 128;
/// The largest assignment file.
const MAX_FILE: u64 = 16 << 20;

/// The place of each stage: the configuration layer of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Assignment {
    /// Name of the function.
    pub function: String,
    /// The stages, first to last.
    pub stages: Vec<StageSpec>,
    /// Slots of each channel: a power of two, at least 2. 4 by default: one that is read, one that is written, two between.
    #[serde(default = "four")]
    pub slots: u32,
    /// Bytes of the largest message between two stages.
    pub slot_bytes: u64,
    /// How often a stage may die over one request. 3 by default.
    #[serde(default = "three")]
    pub max_attempts: u32,
}

const fn four() -> u32 {
    4
}

const fn three() -> u32 {
    3
}

/// One stage of an [`Assignment`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageSpec {
    /// Its components, by name.
    pub components: Vec<String>,
    /// The value of `CUDA_VISIBLE_DEVICES`: the UUID of a MIG device, or a number.
    pub slice: String,
    /// Program and arguments.
    pub command: Vec<String>,
}

impl Assignment {
    /// An assignment with the default numbers.
    pub fn new(function: impl Into<String>, stages: Vec<StageSpec>, slot_bytes: u64) -> Self {
        Self { function: function.into(), stages, slots: four(), slot_bytes, max_attempts: three() }
    }

    /// Reads and checks an assignment file.
    ///
    /// # Errors
    /// [`FfsError::BadAssignment`] with the file's name and what is wrong.
    pub fn read(path: &Path) -> Result<Self, FfsError> {
        let bad = |what: String| FfsError::BadAssignment { what: format!("{}: {what}", path.display()) };
        let size = std::fs::metadata(path).map_err(|error| bad(error.to_string()))?.len();
        if size > MAX_FILE {
            return Err(bad(format!("{size} bytes: at most {MAX_FILE}")));
        }
        let text = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
        let assignment: Self = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        assignment.check()?;
        Ok(assignment)
    }

    /// Checks what the channels do not check themselves.
    fn check(&self) -> Result<(), FfsError> {
        let bad = |what: String| Err(FfsError::BadAssignment { what });
        if self.stages.is_empty() || self.stages.len() > MAX_STAGES {
            return bad(format!("stages: {} of them, need 1 to {MAX_STAGES}", self.stages.len()));
        }
        if self.max_attempts == 0 {
            return bad("max_attempts is 0: need more than 0".to_owned());
        }
        for (index, stage) in self.stages.iter().enumerate() {
            if stage.command.is_empty() {
                return bad(format!("stages[{index}].command is empty"));
            }
            if stage.slice.contains('\0') || stage.command.iter().any(|word| word.contains('\0')) {
                return bad(format!("stages[{index}] has a zero byte"));
            }
        }
        Ok(())
    }
}

/// Why a function or one of its requests failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FfsError {
    /// An assignment that cannot be.
    #[error("assignment: {what}")]
    BadAssignment {
        /// The fault, in words.
        what: String,
    },
    /// A channel could not be made or used.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The request was not accepted: no slot became free in time.
    #[error("busy: the first stage took nothing for the time given")]
    Busy,
    /// A stage answered with an error.
    #[error("stage {stage}: {reason}")]
    Stage {
        /// Which, from 0.
        stage: u32,
        /// The error that it answered.
        reason: String,
    },
    /// A stage died over the request as often as is allowed.
    #[error("stage {stage} died {attempts} times over this request")]
    StageDied {
        /// Which, from 0.
        stage: u32,
        /// How often.
        attempts: u32,
    },
    /// A stage cannot be started, or dies as soon as it is: the function is over.
    #[error("stage {stage} does not run: {reason}")]
    StageDoesNotRun {
        /// Which, from 0.
        stage: u32,
        /// The cause of its death.
        reason: String,
    },
    /// The function was stopped.
    #[error("the function was stopped")]
    Stopped,
    /// A function whose components cannot be, or a folder that cannot be used.
    #[error("function: {what}")]
    BadGraph {
        /// The fault, in words.
        what: String,
    },
    /// A component could not be loaded, or failed while it was measured.
    #[error("component `{component}`: {reason}")]
    Component {
        /// Name of the component that failed.
        component: String,
        /// The error that it reported.
        reason: String,
    },
    /// The process was not started as a stage.
    #[error("not a stage: {what}")]
    NotAStage {
        /// The thing that is missing.
        what: String,
    },
}

/// A failure as it travels through the channels.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) stage: u32,
    /// None when the stage died.
    pub(crate) reason: Option<String>,
    pub(crate) attempts: u32,
}

impl Failure {
    /// In at most `room` bytes.
    pub(crate) fn encode(&self, room: usize) -> Vec<u8> {
        let mut text = serde_json::to_vec(self).unwrap_or_default();
        if text.len() > room {
            // The reason is what is long.
            let short = Self { reason: self.reason.as_ref().map(|_| String::new()), ..*self };
            text = serde_json::to_vec(&short).unwrap_or_default();
            text.truncate(room);
        }
        text
    }

    pub(crate) fn decode(bytes: &[u8]) -> FfsError {
        match serde_json::from_slice::<Self>(bytes) {
            Ok(Self { stage, reason: Some(reason), .. }) => FfsError::Stage { stage, reason },
            Ok(Self { stage, reason: None, attempts }) => FfsError::StageDied { stage, attempts },
            Err(_) => FfsError::Stage { stage: 0, reason: "a failure without a text".to_owned() },
        }
    }
}
