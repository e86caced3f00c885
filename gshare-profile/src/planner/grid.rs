//! Every point of a grid (FaST-GShare, section 3.2).

use super::{Journal, PlanError, Planner, Step, config};
use gshare_core::profile::{ProfileTable, Setting};
use gshare_core::{Quota, SmShare};

/// Measures every SM share x quota x batch size, batch by batch, each from the smallest share up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    sms: Vec<SmShare>,
    quotas: Vec<Quota>,
    batches: Vec<u32>,
}

/// The result of a grid.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GridOutcome {
    /// The measurable points.
    pub table: ProfileTable,
    /// Where a trial failed: holes of the table. Their reasons are in the journal.
    pub failed: Vec<Setting>,
}

impl Grid {
    /// A grid of these values; each list has at least one and none twice or 0.
    pub fn new(sms: Vec<SmShare>, quotas: Vec<Quota>, batches: Vec<u32>) -> Result<Self, PlanError> {
        let check = |field, values: Vec<u64>| {
            if values.is_empty() {
                return Err(config(field, &"empty", "need at least one value"));
            }
            if values.contains(&0) {
                return Err(config(field, &0, "need values above 0"));
            }
            match values.iter().enumerate().find(|(place, value)| values[..*place].contains(value)) {
                Some((_, value)) => Err(config(field, &value, "need each value once")),
                None => Ok(()),
            }
        };
        check("sms", sms.iter().map(|sm| u64::from(sm.get())).collect())?;
        check("quotas", quotas.iter().map(|quota| u64::from(quota.get())).collect())?;
        check("batches", batches.iter().map(|&batch| u64::from(batch)).collect())?;
        Ok(Self { sms, quotas, batches })
    }

    /// Number of points.
    pub const fn len(&self) -> usize {
        self.sms.len() * self.quotas.len() * self.batches.len()
    }

    /// Whether there are none: never, a grid is checked when it is made.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn settings(&self) -> impl Iterator<Item = Setting> + '_ {
        self.batches.iter().flat_map(move |&batch| {
            let of = move |sm: SmShare| self.quotas.iter().map(move |&quota| Setting { batch, sm, quota });
            self.sms.iter().flat_map(move |&sm| of(sm))
        })
    }
}

impl Planner for Grid {
    type Answer = GridOutcome;

    fn next(&self, journal: &Journal) -> Result<Step<GridOutcome>, PlanError> {
        let (mut points, mut failed) = (Vec::new(), Vec::new());
        for setting in self.settings() {
            match journal.point(setting) {
                Err(step) => return Ok(step),
                Ok(Some(measurement)) => points.push(measurement.point),
                Ok(None) => failed.push(setting),
            }
        }
        let table =
            if failed.is_empty() { ProfileTable::grid(points)? } else { ProfileTable::sparse(points)? };
        Ok(Step::Done(GridOutcome { table, failed }))
    }
}
