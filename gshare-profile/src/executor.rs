//! Executors, which run a function at a setting.
//!
//! # Problem
//! The same trial must run against a process, against an HTTP server, and in a test against every possible failure. So a
//! trial knows five calls, and asks for the time like for everything else: a test runs a whole grid in virtual time.
//!
//! | executor | runs |
//! |---|---|
//! | `line_program::Process` (feature `process`) | a program of the user's, by a line protocol |
//! | `http::Http` (feature `http`) | a program that serves HTTP |

use crate::meter::Utilisation;
use gshare_core::profile::Setting;
use gshare_core::{Duration, Timestamp};

/// Why a trial cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// Nothing can be run at all: the run ends, and no trial is kept.
    #[error("cannot run the function: {0}")]
    Unavailable(String),
    /// The function cannot run at this setting; others may be possible.
    #[error("cannot run at this setting: {0}")]
    Refused(String),
    /// The function ended by itself.
    #[error("the function ended: {0}")]
    Ended(String),
    /// The function writes answers and does not read its requests.
    #[error("the function does not read its input; one that computes by itself has the protocol of steps")]
    Deaf,
    /// The function was not ready in time.
    #[error("not ready within {within}{}", .why.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    NotReady {
        /// The time allowed.
        within: Duration,
        /// The cause, if it was seen.
        why: Option<String>,
    },
}

/// A ready function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ready {
    /// Time to load, if it was seen.
    pub load: Option<Duration>,
}

/// Runs a function at one setting after the other.
pub trait Executor {
    /// Makes the function ready at a setting, within a time.
    fn start(&mut self, setting: Setting, within: Duration) -> Result<Ready, ExecError>;

    /// The time, by the executor's clock. It does not go back.
    fn now(&self) -> Timestamp;

    /// Gives the function a batch.
    fn submit(&mut self) -> Result<(), ExecError>;

    /// Waits until a batch is answered and gives the time of the answer, or `None` at `until`. Never waits longer.
    fn wait(&mut self, until: Timestamp) -> Result<Option<Timestamp>, ExecError>;

    /// The measured part of the trial begins now. Called between [`start`](Self::start) and
    /// [`stop`](Self::stop).
    fn begin_metering(&mut self) {}

    /// The measured part has ended: how busy the GPU was during it. `None` if the executor cannot know, as in virtual time.
    fn end_metering(&mut self) -> Option<Utilisation> {
        None
    }

    /// Ends the function, also while it computes. After this it can be started again.
    fn stop(&mut self);
}
