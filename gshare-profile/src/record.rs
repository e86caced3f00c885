//! A whole run: a planner asks, an executor measures, a sink keeps.
//!
//! Each trial is handed to the sink before the next begins, so a killed run loses at most its current
//! trial. Started again with the kept trials, the run continues with the next trial ([`planner`](crate::planner)).

use crate::executor::Executor;
use crate::planner::{Journal, JournalError, PlanError, Planner, Step, Trial};
use crate::trial::{Measured, TrialConfig, TrialError, measure};
use gshare_core::profile::Setting;

/// A trial with all its figures.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Record {
    /// The part of the trial for the planner.
    pub trial: Trial,
    /// The rest, if it was measured.
    pub measured: Option<Measured>,
}

/// Keeps the results of trials.
pub trait Sink {
    /// A trial begins; for progress bars.
    fn began(&mut self, setting: Setting) {
        let _ = setting;
    }

    /// A trial has ended. When this returns, it must survive the death of the process.
    fn keep(&mut self, record: &Record) -> Result<(), Box<dyn core::error::Error + Send + Sync>>;
}

/// Keeps nothing, for runs that need not survive.
impl Sink for () {
    fn keep(&mut self, _: &Record) -> Result<(), Box<dyn core::error::Error + Send + Sync>> {
        Ok(())
    }
}

/// Why a run ended without an answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// There is no answer.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Nothing can be measured at all.
    #[error(transparent)]
    Trial(TrialError),
    /// A trial could not be kept.
    #[error("cannot keep a trial: {0}")]
    Sink(#[source] Box<dyn core::error::Error + Send + Sync>),
    /// The planner asked for a setting tried before.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// Runs a strategy to its end, from the trials in `journal` on. A failed setting is kept as failed, unless
/// every setting would fail in the same way, which ends the run.
pub fn run<P: Planner>(
    planner: &P,
    executor: &mut dyn Executor,
    config: &TrialConfig,
    journal: &mut Journal,
    sink: &mut dyn Sink,
) -> Result<P::Answer, RunError> {
    loop {
        let setting = match planner.next(journal)? {
            Step::Done(answer) => return Ok(answer),
            Step::Measure(setting) => setting,
        };
        sink.began(setting);
        let record = match measure(executor, setting, config) {
            Ok(measured) => Record { trial: Trial::done(measured.measurement), measured: Some(measured) },
            Err(error) if error.is_fatal() => return Err(RunError::Trial(error)),
            Err(error) => Record { trial: Trial::failed(setting, error.to_string()), measured: None },
        };
        sink.keep(&record).map_err(RunError::Sink)?;
        journal.add(record.trial)?;
    }
}
