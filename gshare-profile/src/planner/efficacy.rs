//! SM share and batch size of an inference function, by a model of its time. Each trial improves the model.
//!
//! # Problem
//! Of all settings whose execution time is within a bound (half of the SLO), find the one of the highest throughput
//! efficacy, `TE = throughput / SM share` (Dilu, section 3.2), in at most ten trials of half a minute each. Larger batches are
//! more efficient and slower, more SMs are faster and at some point less efficient; how much so differs by function.
//!
//! # Terms
//! - **time**: the p95 of one batch at a setting;
//! - **model**: for each setting a mean and a deviation of the logarithm of its time, given all trials so far;
//! - **expected gain**: the expected efficacy of a setting beyond the best efficacy so far, as a part of the best; a
//!   setting gains nothing if it is too slow.
//!
//! # Algorithm
//! 1. **First**: the third batch size at the third share.
//! 2. **Model**: a Gaussian process over the logarithms of batch and share. Before any trial it expects a time of `batch^0.8 x
//!    share^-0.5`, the exponents give or take 0.7 and 0.1. So a time proportional to the batch is likely, and so is a time
//!    nearly independent of it. Beyond the power law the model allows for bends of 25 %, 2.25 doublings of the batch and 1.25 of the
//!    share long, and for 5 % of noise in a trial.
//! 3. **Next**: the setting of the highest expected gain (constrained expected improvement: Gardner et al., ICML 2014, with the
//!    bound as the constraint). The search passes over settings ruled out by a trial. A setting too slow by more than 2 % rules out
//!    its batch and larger batches at its share and smaller shares. A failed setting rules out its batch and larger batches, since
//!    memory grows with the batch.
//! 4. **End**: after ten trials, or when no setting promises a gain of 0.9 %. If no earlier trial
//!    was within the bound, the last trial is batch 1 with all SMs.
//!
//! ## Example
//! Bound 40 ms, `ResNet152` on an A100, batches to 32, shares by 10 %. (4, 30 %) takes 25.2 ms: within the bound, 5.3 requests/s
//! per per cent of the SMs. (32, 10 %) would have 18.0, but takes 177.9 ms. (8, 30 %) has 9.3, (32, 60 %) is 2.1 ms too slow,
//! (16, 40 %) has 12.4, and (16, 30 %) takes 39.97 ms and has 13.3. This is the answer after seven trials, the best of all sixty.
//!
//! It finds the optima of Dilu's Table 2 in 7, 6 and 9 trials (`ResNet152`, `RoBERTa`, `LLaMA2`), where the paper needs 8, 6 and 9. On
//! the published profiles of 69 vision models on a V100 and 24 bounds each, 97 of 100 searches end within 5 % of the optimum, in 5.1
//! trials; Hybrid Growth Search is 7.2 % below it on average. The largest misses are at bounds within the noise of the
//! measurements, where the optimum is a matter of luck.
//!
//! # Invariants
//! The choice was measured, is within the bound, and is the best measured point within the bound. The model only chooses
//! the trials. The search fails only if batch 1 with all SMs was too slow, or failed.
//!
//! # Cost
//! Less than a millisecond for a step over 200 settings, beside half a minute for a trial.
//!
//! # Differences from the paper
//! - Hybrid Growth Search doubles the batch, adds 10 % of the SMs if the batch is too slow, and stops where the efficacy falls. It
//!   finds an optimum only beside its path: if a function's time hardly depends on the batch (`LLaMA2`, small
//!   vision models), it stops far from the optimum. `replay dilu-table2 --sweep` runs both.
//! - It answers with the last good point; here the answer is the best point.
//! - It has no upper bounds: SMs above 100 %, batches off the grid. Here both axes are given.

use super::{Journal, PlanError, Planner, Step, config, failure};
use gshare_core::profile::{ProfilePoint, Setting};
use gshare_core::{Duration, Quota, SmShare};
use std::f64::consts::{LN_2, SQRT_2};

/// The model's belief about the logarithm of a time before any trial, in doublings of batch and share.
mod prior {
    /// Exponents of batch and share.
    pub(super) const SLOPES: [f64; 2] = [0.8, -0.5];
    /// Their deviations: some functions take a batch in the time of one request.
    pub(super) const SLOPE_DEVIATIONS: [f64; 2] = [0.7, 0.1];
    /// Deviation of the scale: a factor of e.
    pub(super) const SCALE_DEVIATION: f64 = 1.0;
    /// Deviation from a power law, and how many doublings of batch and share it lasts.
    pub(super) const BEND: f64 = 0.25;
    pub(super) const BEND_LENGTH: [f64; 2] = [2.25, 1.25];
    /// Deviation between two trials at the same setting.
    pub(super) const NOISE: f64 = 0.05;
}

/// A setting too slow by more than this factor rules out others.
const RULES_OUT: f64 = 1.02;

/// The least expected gain for another trial.
const WORTH: f64 = 0.009;

/// Searches for the most effective setting within a bound of the execution time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EfficacySearch {
    max_exec: Duration,
    batches: Vec<u32>,
    shares: Vec<SmShare>,
    max_trials: usize,
}

/// The best setting for an inference function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct InferenceChoice {
    /// The setting with its measurement. Its SM share is the request.
    pub point: ProfilePoint,
    /// Twice the request, at most the whole (Dilu, section 3.2).
    pub limit: SmShare,
    /// Trials used by the search.
    pub trials: usize,
}

impl EfficacySearch {
    /// A search for a p95 of at most `max_exec`, more than 0, with the paper's axes: batches of 1, 2, 4 to 32, shares of 10,
    /// 20 to 100 %, and at most ten trials.
    pub fn new(max_exec: Duration) -> Result<Self, PlanError> {
        if max_exec.is_zero() {
            return Err(config("max_exec", &max_exec, "need more than 0"));
        }
        let shares = (1..=10).filter_map(|step| SmShare::from_percent(step * 10)).collect();
        Ok(Self { max_exec, batches: (0..6).map(|power| 1 << power).collect(), shares, max_trials: 10 })
    }

    /// The same with these batch sizes, ascending, none 0.
    pub fn with_batches(mut self, batches: Vec<u32>) -> Result<Self, PlanError> {
        if batches.first().is_none_or(|first| *first == 0) || !batches.is_sorted_by(|a, b| a < b) {
            return Err(config("batches", &format!("{batches:?}"), "need one or more, ascending, none 0"));
        }
        self.batches = batches;
        Ok(self)
    }

    /// The same with these shares of the SMs, ascending, none 0.
    pub fn with_shares(mut self, shares: Vec<SmShare>) -> Result<Self, PlanError> {
        if shares.first().is_none_or(|first| first.is_zero()) || !shares.is_sorted_by(|a, b| a < b) {
            let shares: Vec<_> = shares.iter().map(ToString::to_string).collect();
            return Err(config("shares", &shares.join(", "), "need one or more, ascending, none 0"));
        }
        self.shares = shares;
        Ok(self)
    }

    /// The same with at most this many trials, at least 2.
    pub fn with_max_trials(mut self, max_trials: usize) -> Result<Self, PlanError> {
        if max_trials < 2 {
            return Err(config("max_trials", &max_trials, "need at least 2"));
        }
        self.max_trials = max_trials;
        Ok(self)
    }

    fn settings(&self) -> impl Iterator<Item = Setting> + '_ {
        let at = |&batch| self.shares.iter().map(move |&sm| Setting { batch, sm, quota: Quota::WHOLE });
        self.batches.iter().flat_map(at)
    }

    /// The setting expected to be the fastest: the smallest batch with the largest share.
    fn fastest(&self) -> Setting {
        let batch = self.batches.first().copied().unwrap_or(1);
        let sm = self.shares.last().copied().unwrap_or(SmShare::WHOLE);
        Setting { batch, sm, quota: Quota::WHOLE }
    }

    fn first(&self) -> Setting {
        let fastest = self.fastest();
        let batch = self.batches.get(2).or(self.batches.last()).copied().unwrap_or(fastest.batch);
        let sm = self.shares.get(2).or(self.shares.last()).copied().unwrap_or(fastest.sm);
        Setting { batch, sm, ..fastest }
    }

    /// The setting of the highest expected gain, given the trials so far.
    fn next_setting(&self, seen: &[(Setting, Option<ProfilePoint>)]) -> Option<Setting> {
        let best = best(self.max_exec, seen);
        let bound = log(&self.max_exec);
        let model = Model::new(bound, seen);
        let candidates = self.settings().filter(|at| !seen.iter().any(|(other, _)| other == at));
        let candidates = candidates.filter(|at| !seen.iter().any(|trial| self.rules_out(trial, *at)));
        let gains = candidates.map(|at| {
            let (mean, deviation) = model.at(at);
            // The logarithm of the efficacy is `reach` minus the time's logarithm.
            let reach = model.per_time + (f64::from(at.batch) / at.sm.as_fraction()).ln();
            (at, gain(mean, deviation, bound, reach, best.map(|point| efficacy(&point).ln())))
        });
        let top = gains.reduce(|top, one| if one.1 > top.1 { one } else { top });
        // Without a best point a gain has no scale, and any gain is worth a trial.
        top.filter(|(_, gain)| *gain > if best.is_some() { WORTH } else { 0.0 }).map(|(at, _)| at)
    }

    /// Whether a trial proves `at` too slow for the bound, or unable to run.
    fn rules_out(&self, trial: &(Setting, Option<ProfilePoint>), at: Setting) -> bool {
        let (other, found) = trial;
        let harder = at.batch >= other.batch && at.sm <= other.sm;
        match found {
            Some(point) => harder && log(&point.p95) > log(&self.max_exec) + RULES_OUT.ln(),
            // Out of memory, most likely, unless the smallest batch failed.
            None if other.batch > self.batches.first().copied().unwrap_or(1) => at.batch >= other.batch,
            None => harder,
        }
    }
}

/// The most effective point within the bound; the smallest among equals.
fn best(max_exec: Duration, seen: &[(Setting, Option<ProfilePoint>)]) -> Option<ProfilePoint> {
    let points = seen.iter().filter_map(|(_, found)| *found).filter(|point| point.p95 <= max_exec);
    points.min_by(|a, b| b.cmp_efficacy(a).then(a.area().cmp(&b.area())).then(a.batch.cmp(&b.batch)))
}

fn efficacy(point: &ProfilePoint) -> f64 {
    point.throughput.as_f64().max(1e-3) / point.sm.as_fraction()
}

/// Logarithm of a time in seconds.
fn log(time: &Duration) -> f64 {
    time.as_secs_f64().max(1e-9).ln()
}

/// Expected gain of a setting. Its time's logarithm has this mean and deviation, and its efficacy is `e^reach` over its
/// time, but 0 above the bound. A part of the best efficacy so far; without one in requests/s.
fn gain(mean: f64, deviation: f64, bound: f64, reach: f64, best: Option<f64>) -> f64 {
    // Below this time the setting is within the bound and better than the best.
    let below = best.map_or(bound, |best| bound.min(reach - best));
    let part = normal((below - mean) / deviation);
    let shifted = normal((below - mean + deviation * deviation) / deviation);
    let mean_efficacy = (reach - mean + deviation * deviation / 2.0 - best.unwrap_or(0.0)).exp();
    mean_efficacy * shifted - if best.is_some() { part } else { 0.0 }
}

/// Probability of a standard normal variable below `x`.
fn normal(x: f64) -> f64 {
    libm::erfc(-x / SQRT_2) / 2.0
}

/// Distribution of the logarithm of each setting's time, given trials. The figures of a predictor are floating point.
struct Model {
    /// Coordinates of the trials.
    trials: Vec<[f64; 2]>,
    /// Expected time before any trial, at batch 1 and the whole: the bound's logarithm.
    scale: f64,
    /// Lower triangle L of the trials' covariance `L L^T`, by rows.
    triangle: Vec<Vec<f64>>,
    /// The solution `x` of `L x = d`, where `d` is the trials' differences from the expected times.
    solved: Vec<f64>,
    /// Logarithm of throughput times time over batch, the mean of the trials: above 0 where batches overlap.
    per_time: f64,
}

/// Doublings of the batch, and of the share.
fn coordinates(at: Setting) -> [f64; 2] {
    [f64::from(at.batch).log2(), at.sm.as_fraction().log2()]
}

/// Prior covariance of two settings.
fn covariance(a: [f64; 2], b: [f64; 2]) -> f64 {
    let squared = |x: f64| x * x;
    let slopes =
        a.iter().zip(&b).zip(prior::SLOPE_DEVIATIONS).map(|((a, b), off)| squared(off * LN_2) * a * b);
    let slopes: f64 = slopes.sum();
    let apart: f64 =
        a.iter().zip(&b).zip(prior::BEND_LENGTH).map(|((a, b), long)| squared((a - b) / long)).sum();
    squared(prior::SCALE_DEVIATION) + slopes + squared(prior::BEND) * (-apart / 2.0).exp()
}

impl Model {
    fn new(scale: f64, seen: &[(Setting, Option<ProfilePoint>)]) -> Self {
        let points: Vec<&ProfilePoint> = seen.iter().filter_map(|(_, found)| found.as_ref()).collect();
        let trials: Vec<_> = points.iter().map(|point| coordinates(point.setting())).collect();
        let overlap = |point: &&ProfilePoint| {
            (point.throughput.as_f64().max(1e-3) * point.p95.as_secs_f64() / f64::from(point.batch)).ln()
        };
        let per_time = points.iter().map(overlap).sum::<f64>() / (points.len().max(1) as f64);
        let mut model = Self { trials, scale, triangle: Vec::new(), solved: Vec::new(), per_time };
        // Cholesky's decomposition, a row per trial, and forward substitution along with it.
        for (number, point) in points.iter().enumerate() {
            let at = model.trials[number];
            let mut row = model.forward(&model.covariances(at, number));
            let rest = model.variance(at) - row.iter().map(|one| one * one).sum::<f64>();
            let corner = rest.max(1e-12).sqrt();
            let known: f64 = row.iter().zip(&model.solved).map(|(a, b)| a * b).sum();
            model.solved.push((log(&point.p95) - model.expected(at) - known) / corner);
            row.push(corner);
            model.triangle.push(row);
        }
        model
    }

    /// The logarithm of the time expected before any trial.
    fn expected(&self, [batch, share]: [f64; 2]) -> f64 {
        self.scale + LN_2 * (prior::SLOPES[0] * batch + prior::SLOPES[1] * share)
    }

    fn variance(&self, at: [f64; 2]) -> f64 {
        covariance(at, at) + prior::NOISE * prior::NOISE
    }

    /// Covariances with the first `trials` trials.
    fn covariances(&self, at: [f64; 2], trials: usize) -> Vec<f64> {
        self.trials.iter().take(trials).map(|trial| covariance(*trial, at)).collect()
    }

    /// The solution `x` of `L x = right`.
    fn forward(&self, right: &[f64]) -> Vec<f64> {
        let mut found: Vec<f64> = Vec::with_capacity(right.len() + 1);
        for (row, right) in self.triangle.iter().zip(right) {
            let known: f64 = row.iter().zip(&found).map(|(a, b)| a * b).sum();
            let corner = row.last().copied().unwrap_or(1.0);
            found.push((right - known) / corner);
        }
        found
    }

    /// Mean and deviation of the logarithm of a setting's time.
    fn at(&self, at: Setting) -> (f64, f64) {
        let at = coordinates(at);
        let row = self.forward(&self.covariances(at, self.trials.len()));
        let mean = self.expected(at) + row.iter().zip(&self.solved).map(|(a, b)| a * b).sum::<f64>();
        let variance = self.variance(at) - row.iter().map(|one| one * one).sum::<f64>();
        (mean, variance.max(1e-9).sqrt())
    }
}

impl Planner for EfficacySearch {
    type Answer = InferenceChoice;

    fn next(&self, journal: &Journal) -> Result<Step<InferenceChoice>, PlanError> {
        let mut seen: Vec<(Setting, Option<ProfilePoint>)> = Vec::new();
        let mut next = Some(self.first());
        while let Some(at) = next {
            match journal.point(at) {
                Err(step) => return Ok(step),
                Ok(found) => seen.push((at, found.map(|found| found.point))),
            }
            let none = best(self.max_exec, &seen).is_none();
            let tried = seen.iter().any(|(at, _)| *at == self.fastest());
            next = if seen.len() >= self.max_trials || (none && tried) {
                None
            } else if none && seen.len() + 1 == self.max_trials {
                Some(self.fastest())
            } else {
                self.next_setting(&seen).or_else(|| Some(self.fastest()).filter(|_| none))
            };
        }
        let Some(point) = best(self.max_exec, &seen) else {
            let measured = seen.iter().filter_map(|(_, found)| *found);
            let Some(fastest) = measured.min_by_key(|point| point.p95) else {
                return Err(failure(journal, self.fastest()));
            };
            let (max_exec, best, setting) = (self.max_exec, fastest.p95, fastest.setting());
            return Err(PlanError::SloUnreachable { max_exec, best, setting });
        };
        let limit = SmShare::from(point.sm.basis_points().saturating_add(point.sm.basis_points()));
        Ok(Step::Done(InferenceChoice { point, limit, trials: seen.len() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(batch: u32, percent: u16, ms: f64) -> ProfilePoint {
        let sm = SmShare::from_percent(percent).unwrap();
        let exec = Duration::from_nanos((ms * 1e6) as u64);
        ProfilePoint::measured(sm, Quota::WHOLE, batch, f64::from(batch) / ms * 1e3, exec, exec).unwrap()
    }

    /// The model repeats the measurements, to the noise, and is less sure far from them.
    #[test]
    fn the_model_knows_what_it_was_told() {
        let trials = [(8, 20, 38.0), (16, 30, 40.0), (1, 100, 4.0)].map(|(b, s, ms)| point(b, s, ms));
        let seen: Vec<_> = trials.iter().map(|trial| (trial.setting(), Some(*trial))).collect();
        let model = Model::new((0.040_f64).ln(), &seen);
        for trial in &trials {
            let (mean, deviation) = model.at(trial.setting());
            assert!((mean - log(&trial.p95)).abs() < prior::NOISE, "{mean} for {}", trial.p95);
            assert!(deviation < 2.0 * prior::NOISE);
        }
        assert!(model.at(point(32, 10, 1.0).setting()).1 > 4.0 * prior::NOISE);
        assert!(model.per_time.abs() < 1e-6, "a batch at a time");
    }

    /// The closed form of the gain equals a sum over the distribution.
    #[test]
    fn the_expected_gain_is_the_integral() {
        for (mean, deviation, bound, reach, best) in
            [(-3.0, 0.2, -2.9, 1.0, 3.9), (-3.0, 0.5, -3.4, 1.5, 4.2), (-2.0, 0.1, -1.0, 2.0, 4.0)]
        {
            let steps = 200_000;
            let sum: f64 = (0..steps)
                .map(|step| {
                    let z = -8.0 + 16.0 * (f64::from(step) + 0.5) / f64::from(steps);
                    let time = mean + deviation * z;
                    let more = if time <= bound { ((reach - time - best).exp() - 1.0).max(0.0) } else { 0.0 };
                    more * (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * 16.0
                        / f64::from(steps)
                })
                .sum();
            let found = gain(mean, deviation, bound, reach, Some(best));
            assert!((found - sum).abs() < 1e-4 * (1.0 + sum), "{found} for {sum}");
        }
    }
}
