//! The load of a function in the form of a scenario.

use super::error::ScenarioError;
use super::units::Span;
use crate::arrivals::{ArrivalError, Arrivals};
use crate::load_trace;
use crate::world::Load;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The load of a function. Rates are requests per second.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "shape", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum LoadText {
    /// Independent requests.
    Poisson {
        /// The mean rate.
        rate: f64,
    },
    /// Gaps of a given variability.
    Gamma {
        /// The mean rate.
        rate: f64,
        /// The coefficient of variation of the gaps.
        cv: f64,
    },
    /// Independent requests for a while, then none.
    Bursts {
        /// The length of a burst.
        on: Span,
        /// The length of the silence after a burst.
        off: Span,
        /// The rate in a burst.
        rate: f64,
    },
    /// Steps with one rate each, and no requests after the last step.
    Steps {
        /// The length of a step.
        every: Span,
        /// The rate in each step.
        rates: Vec<f64>,
    },
    /// Clients with one request at a time, and a pause after the end of each request.
    Closed {
        /// The length of the pause.
        think: Span,
        /// The number of clients; default 1, at most 10,000.
        #[serde(default = "super::one")]
        clients: u32,
    },
    /// Rates from a file with one rate per line.
    Rates {
        /// The path of the file.
        file: PathBuf,
        /// The time for each line.
        every: Span,
        /// The factor for all rates; default 1.
        #[serde(default = "unit")]
        scale: f64,
    },
    /// A row of a trace shaped like Azure Functions 2019: a column per minute.
    Trace {
        /// The path of the file.
        file: PathBuf,
        /// The function's name in the trace, its `HashFunction`; or its number, from 0.
        row: String,
        /// The first minute of the trace in use; default 0.
        #[serde(default)]
        from: usize,
        /// The time for each column; default a minute. A shorter time plays the trace faster.
        #[serde(default = "minute")]
        column: Span,
    },
}

const fn unit() -> f64 {
    1.0
}

const fn minute() -> Span {
    Span(gshare_core::Duration::from_secs(60))
}

impl LoadText {
    pub(super) fn build(&self, function: &str, folder: &Path) -> Result<Load, ScenarioError> {
        let failed = |cause: ArrivalError| ScenarioError::Load { function: function.to_owned(), cause };
        let read = |file: &Path| {
            let path = folder.join(file);
            std::fs::read(&path).map_err(|cause| ScenarioError::Read { path: path.clone(), cause })
        };
        let in_trace = |file: &Path| {
            let (function, path) = (function.to_owned(), folder.join(file));
            move |cause| ScenarioError::Trace { function, path, cause }
        };
        let process = match self {
            Self::Poisson { rate } => Arrivals::poisson(*rate),
            Self::Gamma { rate, cv } => Arrivals::gamma(*rate, *cv),
            Self::Bursts { on, off, rate } => Arrivals::on_off(on.0, off.0, *rate),
            Self::Steps { every, rates } => Arrivals::rates(every.0, rates.clone()),
            Self::Closed { think, .. } => {
                Ok(Arrivals::closed_loop(think.positive(&format!("function `{function}`: load.think"))?))
            }
            Self::Rates { file, every, scale } => {
                let rates = load_trace::read_rates(&read(file)?[..]).map_err(in_trace(file))?;
                Arrivals::rates(every.0, rates.into_iter().map(|rate| rate * scale).collect())
            }
            Self::Trace { file, row, from, column } => {
                let rows = load_trace::read_azure_counts(&read(file)?[..]).map_err(in_trace(file))?;
                let named = rows.iter().find(|one| one.function == *row);
                let found = named.or_else(|| rows.get(row.parse::<usize>().ok()?)).ok_or_else(|| {
                    let bound = format!("need a function of the trace, or a number below {}", rows.len());
                    ScenarioError::field(&format!("function `{function}`: load.row"), row, &bound)
                })?;
                let bin = column.positive(&format!("function `{function}`: load.column"))?;
                return Ok(Load::Counts {
                    bin,
                    counts: found.counts.get(*from..).unwrap_or_default().to_vec(),
                });
            }
        };
        process.map(Load::Process).map_err(failed)
    }
}
