//! Time to load a model, and time to infer by batch size (GPU-enabled FaaS, the profile of its LALB scheduler).
//!
//! The scheduler compares waiting for a busy GPU that has the model with loading it on an idle one; so it needs the time to
//! load, and the time to infer for any batch that comes. The second is a line over the batch size: a fixed cost and a
//! cost per request. A few batch sizes are measured and a line is fitted by least squares.

use super::{Journal, PlanError, Planner, Step, config, failure};
use gshare_core::profile::Setting;
use gshare_core::{Duration, Quota, SmShare};

/// Measures some batch sizes at one share of the GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchLine {
    sm: SmShare,
    quota: Quota,
    batches: Vec<u32>,
}

/// `fixed + slope * batch`, in nanoseconds. A predictor: its figures are floating point.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Line {
    /// Time that does not depend on the batch size, in ns.
    pub fixed_ns: f64,
    /// Time per request of the batch, in ns.
    pub slope_ns: f64,
    /// Part of the variance that the line explains, 0 to 1.
    pub r_squared: f64,
}

impl Line {
    /// Least squares; at least two points with different `x`.
    #[expect(clippy::cast_precision_loss, reason = "predictor")]
    fn fit(points: &[(u32, Duration)]) -> Self {
        let n = points.len() as f64;
        let xy = || points.iter().map(|&(x, y)| (f64::from(x), y.as_nanos() as f64));
        let (mean_x, mean_y) = (xy().map(|(x, _)| x).sum::<f64>() / n, xy().map(|(_, y)| y).sum::<f64>() / n);
        let sxx: f64 = xy().map(|(x, _)| (x - mean_x).powi(2)).sum();
        let syy: f64 = xy().map(|(_, y)| (y - mean_y).powi(2)).sum();
        let sxy: f64 = xy().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
        let slope_ns = sxy / sxx;
        let r_squared = if syy > 0.0 { sxy * sxy / (sxx * syy) } else { 1.0 };
        Self { fixed_ns: mean_y - slope_ns * mean_x, slope_ns, r_squared }
    }

    /// The time at a batch size; not below 0.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
    pub fn at(&self, batch: u32) -> Duration {
        Duration::from_nanos((self.fixed_ns + self.slope_ns * f64::from(batch)).max(0.0) as u64)
    }
}

/// The result of the planner.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BatchTimes {
    /// Median time to infer a batch.
    pub infer: Line,
    /// Time to load the model, if each trial measured it.
    pub load: Option<Line>,
}

impl BatchLine {
    /// A planner for these batch sizes, at least two, none twice or 0.
    pub fn new(sm: SmShare, quota: Quota, batches: Vec<u32>) -> Result<Self, PlanError> {
        if sm.is_zero() || quota.is_zero() {
            return Err(config(
                "share",
                &format!("{sm} of the SMs, {quota} of the time"),
                "need both above 0",
            ));
        }
        let mut sorted = batches.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != batches.len() || sorted.len() < 2 || sorted[0] == 0 {
            return Err(config("batches", &format!("{batches:?}"), "need at least two, none twice or 0"));
        }
        Ok(Self { sm, quota, batches })
    }
}

impl Planner for BatchLine {
    type Answer = BatchTimes;

    fn next(&self, journal: &Journal) -> Result<Step<BatchTimes>, PlanError> {
        let (mut infers, mut loads, mut failed) = (Vec::new(), Vec::new(), None);
        for &batch in &self.batches {
            let setting = Setting { batch, sm: self.sm, quota: self.quota };
            match journal.point(setting) {
                Err(step) => return Ok(step),
                Ok(Some(found)) => {
                    infers.push((batch, found.point.p50));
                    loads.extend(found.load.map(|load| (batch, load)));
                }
                // A batch that does not fit says nothing about those that do.
                Ok(None) => failed = Some(setting),
            }
        }
        match failed {
            Some(setting) if infers.len() < 2 => Err(failure(journal, setting)),
            _ => {
                let load = (loads.len() == infers.len()).then(|| Line::fit(&loads));
                Ok(Step::Done(BatchTimes { infer: Line::fit(&infers), load }))
            }
        }
    }
}
