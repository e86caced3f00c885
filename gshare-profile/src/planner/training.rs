//! Request and limit of a training function by binary search (Dilu, section 3.2).
//!
//! # Algorithm
//! Measure the throughput `T1` with all SMs. The request is the smallest share on the grid with a throughput of at least
//! `(80 % - 2 %) x T1`, the limit the same with 100 %: bisect between 0 (too little) and 100 % (enough) until the two differ by
//! one step. Both searches use all measured shares.
//!
//! # Example
//! 5 % steps; throughput grows in proportion up to 60 % of the SMs. For 80 %: 50 (83 %, enough), 25 (42 %), 35 (58 %), 40 (67 %),
//! 45 (75 %): too little, so 50. For 100 %: 50 (83 %), 75 (100 %), 60 (100 %), 55 (92 %): 60. Nine trials, of twenty.
//!
//! # Differences from the paper
//! - The paper's search stops where `T` is within 2 % of the aim. If no point of the grid lies in this band, the search never ends;
//!   ours ends when the interval is one step.
//! - The published implementation stops at the first sufficient share and never looks below.
//! - Noise can make the throughput fall with more SMs. The answer is then not the smallest share, but a share that was
//!   measured and is enough.

use super::{Journal, PlanError, Planner, Step, config, failure};
use gshare_core::profile::{RequestRate, Setting};
use gshare_core::{BasisPoints, Quota, SmShare};

/// The grid of shares: steps of 5 %.
const STEP: u16 = 500;

/// Searches for request and limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingSearch {
    batch: u32,
    request_at: BasisPoints,
    tolerance: BasisPoints,
}

/// The shares of a training function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TrainingChoice {
    /// Share of the SMs for 80 % of its throughput alone.
    pub request: SmShare,
    /// Share for all of it.
    pub limit: SmShare,
    /// Throughput alone.
    #[cfg_attr(feature = "serde", serde(rename = "exclusive_milli_rps"))]
    pub exclusive: RequestRate,
    /// Trials it took.
    pub trials: usize,
}

impl TrainingSearch {
    /// The paper's search at one batch size: 80 % and 100 %, to within 2 %, on a grid of 5 %.
    pub fn new(batch: u32) -> Result<Self, PlanError> {
        if batch == 0 {
            return Err(config("batch", &batch, "need at least 1"));
        }
        let (request_at, tolerance) = (BasisPoints::percent(80), BasisPoints::percent(2));
        Ok(Self { batch, request_at, tolerance })
    }

    fn setting(&self, sm: u16) -> Setting {
        let sm = SmShare::new(sm).unwrap_or(SmShare::WHOLE);
        Setting { batch: self.batch, sm, quota: Quota::WHOLE }
    }

    /// The smallest share with a throughput of at least `aim` of `exclusive`.
    fn find(
        &self,
        journal: &Journal,
        exclusive: RequestRate,
        aim: BasisPoints,
        tried: &mut Vec<u16>,
    ) -> Result<u16, Step<TrainingChoice>> {
        let aim = u128::from(aim.saturating_sub(self.tolerance).get()) * u128::from(exclusive.as_milli());
        let (mut low, mut high) = (0, SmShare::WHOLE.get());
        while high - low > STEP {
            // Both are on the grid and more than a step apart, so this lies strictly between them.
            let middle = (low + high) / 2 / STEP * STEP;
            if !tried.contains(&middle) {
                tried.push(middle);
            }
            // A share at which it cannot run is too little.
            let found = journal.point(self.setting(middle))?;
            let reached = found.map_or(0, |found| u128::from(found.point.throughput.as_milli()) * 10_000);
            if reached >= aim {
                high = middle;
            } else {
                low = middle;
            }
        }
        Ok(high)
    }
}

impl Planner for TrainingSearch {
    type Answer = TrainingChoice;

    fn next(&self, journal: &Journal) -> Result<Step<TrainingChoice>, PlanError> {
        let whole = self.setting(SmShare::WHOLE.get());
        let exclusive = match journal.point(whole) {
            Err(step) => return Ok(step),
            Ok(None) => return Err(failure(journal, whole)),
            Ok(Some(found)) => found.point.throughput,
        };
        let mut tried = vec![SmShare::WHOLE.get()];
        let mut find = |aim| self.find(journal, exclusive, aim, &mut tried);
        let found = find(self.request_at).and_then(|request| Ok((request, find(BasisPoints::WHOLE)?)));
        match found {
            Err(step) => Ok(step),
            Ok((request, limit)) => Ok(Step::Done(TrainingChoice {
                request: self.setting(request).sm,
                limit: self.setting(limit.max(request)).sm,
                exclusive,
                trials: tried.len(),
            })),
        }
    }
}
