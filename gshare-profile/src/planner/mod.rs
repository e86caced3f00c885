//! Strategies, which choose the next point to measure.
//!
//! # Problem
//! A trial takes half a minute of a GPU (Dilu, Table 2), a grid has sixty points or more, and a run of an hour
//! is killed half-way sooner or later. So a strategy measures few points, and may be stopped and started at will.
//!
//! # Terms
//! - **trial**: one setting and its result: a measurement, or a failure with its reason;
//! - **journal**: the trials so far. A planner has no other state.
//!
//! # Algorithm
//! [`Planner::next`] runs its whole search again on each call, and reads the result of each step from the journal. At
//! the first missing result the search stops and answers the setting. So the next step depends on nothing but the journal: a
//! killed run continues with its journal, takes the same path to the same answer, and measures no point twice. A
//! strategy also uses the trials of other strategies.
//!
//! ## Example
//! A training search over 5 % steps: the empty journal answers `Measure(100 %)`, then `Measure(50 %)`. The process is
//! killed after both were written. Started again, it reads two trials, and asks for 25 %.
//!
//! # Invariants
//! - a planner never asks for a setting in the journal;
//! - there are finitely many settings, so each search ends;
//! - a choice is a measured point within the bounds; without such a point, an error names the bound.
//!
//! # Cost
//! O(trials^2) lookups for a whole search: microseconds, beside half a minute per trial.

mod efficacy;
mod grid;
mod training;

pub use efficacy::{EfficacySearch, InferenceChoice};
pub use grid::{Grid, GridOutcome};
pub use training::{TrainingChoice, TrainingSearch};

use gshare_core::profile::{ProfileError, ProfilePoint, Setting};
use gshare_core::{ConfigError, Duration};
use std::collections::BTreeMap;

/// The measured figures of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Measurement {
    /// Throughput and latency.
    pub point: ProfilePoint,
    /// Time to load the model, in ns, if it was measured.
    #[cfg_attr(feature = "serde", serde(default, rename = "load_ns"))]
    pub load: Option<Duration>,
}

/// The result of a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Outcome {
    /// The setting was measured.
    Measured(Measurement),
    /// The setting could not be measured: out of memory, a crash, or a hang.
    Failed {
        /// Why, for people.
        reason: String,
    },
}

/// One setting and its result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Trial {
    /// The tried setting.
    pub setting: Setting,
    /// The measurement, or the reason of the failure.
    pub outcome: Outcome,
}

impl Trial {
    /// A successful trial.
    pub const fn done(measurement: Measurement) -> Self {
        Self { setting: measurement.point.setting(), outcome: Outcome::Measured(measurement) }
    }

    /// A failed trial.
    pub const fn failed(setting: Setting, reason: String) -> Self {
        Self { setting, outcome: Outcome::Failed { reason } }
    }
}

/// The trials so far, in their order; each setting once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Vec<Trial>", into = "Vec<Trial>"))]
pub struct Journal {
    trials: Vec<Trial>,
    places: BTreeMap<Setting, usize>,
}

impl Journal {
    /// Appends a trial, unless the journal has its setting, or its measurement belongs to another setting.
    pub fn add(&mut self, trial: Trial) -> Result<(), JournalError> {
        let setting = trial.setting;
        if let Outcome::Measured(measurement) = &trial.outcome
            && measurement.point.setting() != setting
        {
            return Err(JournalError::Mismatch { asked: setting, measured: measurement.point.setting() });
        }
        if self.places.contains_key(&setting) {
            return Err(JournalError::Duplicate { setting });
        }
        self.places.insert(setting, self.trials.len());
        self.trials.push(trial);
        Ok(())
    }

    /// The trials, the oldest first.
    pub fn trials(&self) -> &[Trial] {
        &self.trials
    }

    /// The result at a setting, if it was tried.
    pub fn at(&self, setting: Setting) -> Option<&Outcome> {
        self.places.get(&setting).and_then(|&place| self.trials.get(place)).map(|trial| &trial.outcome)
    }

    /// The point measured at a setting; `Ok(None)` if the trial failed, `Err` with the next step if there is no trial.
    fn point<R>(&self, setting: Setting) -> Result<Option<&Measurement>, Step<R>> {
        match self.at(setting) {
            Some(Outcome::Measured(measurement)) => Ok(Some(measurement)),
            Some(Outcome::Failed { .. }) => Ok(None),
            None => Err(Step::Measure(setting)),
        }
    }
}

impl TryFrom<Vec<Trial>> for Journal {
    type Error = JournalError;
    fn try_from(trials: Vec<Trial>) -> Result<Self, JournalError> {
        let mut journal = Self::default();
        trials.into_iter().try_for_each(|trial| journal.add(trial))?;
        Ok(journal)
    }
}

impl From<Journal> for Vec<Trial> {
    fn from(journal: Journal) -> Self {
        journal.trials
    }
}

/// Why a trial was not taken into the journal. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The journal has a trial of the setting.
    #[error("({setting}) was tried before")]
    Duplicate {
        /// The setting.
        setting: Setting,
    },
    /// A measurement of another setting than the trial's.
    #[error("the trial is of ({asked}), its measurement of ({measured})")]
    Mismatch {
        /// The trial's setting.
        asked: Setting,
        /// The measurement's setting.
        measured: Setting,
    },
}

/// The next step of a plan.
#[derive(Debug, Clone, PartialEq)]
pub enum Step<R> {
    /// Measure here, and add the trial to the journal.
    Measure(Setting),
    /// Nothing is left to measure.
    Done(R),
}

/// Why there is no answer, or cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A field of a strategy is out of bounds.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No point meets the latency asked for.
    #[error("no setting has a p95 of at most {max_exec}; the shortest is {best}, at ({setting})")]
    SloUnreachable {
        /// The bound.
        max_exec: Duration,
        /// The shortest measured latency.
        best: Duration,
        /// The setting with the shortest latency.
        setting: Setting,
    },
    /// A trial failed, and there is no answer without its result.
    #[error("({setting}) failed, and without it there is no answer: {reason}")]
    TrialFailed {
        /// The trial's setting.
        setting: Setting,
        /// Why, as the trial said.
        reason: String,
    },
    /// The measured points make no table.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

fn config(field: &'static str, value: &dyn core::fmt::Display, bound: &'static str) -> PlanError {
    ConfigError::new(field, value, bound).into()
}

/// The reason a setting's trial failed for.
fn failure(journal: &Journal, setting: Setting) -> PlanError {
    let reason = match journal.at(setting) {
        Some(Outcome::Failed { reason }) => reason.clone(),
        _ => "it was not tried".to_owned(),
    };
    PlanError::TrialFailed { setting, reason }
}

/// A strategy. See the [module](self) for how it keeps its place.
pub trait Planner {
    /// The result of the plan.
    type Answer;

    /// The next step, given the trials so far.
    fn next(&self, journal: &Journal) -> Result<Step<Self::Answer>, PlanError>;
}
