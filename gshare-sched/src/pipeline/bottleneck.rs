//! Joint partition and assignment with the least bottleneck.
//!
//! # Algorithm
//! A state is (ideal, slices of each profile used). The least bottleneck of a state is the minimum over its last step and that step's
//! profile. A second pass covers the same states with latencies, which add up, and with no slice slower than the optimum.
//! Of all slice counts at the end within the SLO, the pass takes the fewest compute slices, then the least latency, then
//! the least memory held. If the latency at the optimum breaks the SLO, bisection finds the least bottleneck that keeps it. The list
//! continues with the best pipeline of fewer compute slices, and so on: the front of bottleneck and compute slices.
//!
//! # Example
//! Take the chain of 2, 3, 4 and 1 ms with a free `1g`, a free `2g` that is twice as fast, and no hand-offs. The best pair by CV, 5|5,
//! has the bottleneck 5 on the `1g`. The search finds 2 on the `1g` and 8 on the `2g`, with the bottleneck 4.

use super::costs::{Need, Offer};
use super::cuts::{Cuts, Hands, Step, count};
use crate::pipeline::{Part, PartitionError, Pipeline};
use gshare_core::Duration;
use gshare_core::dag::ComponentSet;

/// No way there.
const NEVER: u64 = u64::MAX;
/// The most ways to put the branches of a fork on profiles; a fork with more is not spread.
const MAX_SPREADS: usize = 1024;

/// The front of bottleneck and compute slices held, fastest first.
#[derive(Debug)]
pub(super) struct Front {
    tables: Tables,
    /// Least bottleneck of the whole by code, in ns, up to `upto`; `NEVER` above it.
    least: Vec<u64>,
    upto: u64,
    /// The longest stage, in ns.
    longest: u64,
    slo: u64,
    /// Compute slices of the last pipeline: the next holds fewer.
    below: u32,
}

/// The bounds of the search, and its goal.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) max_stages: usize,
    pub(super) max_transitions: u64,
    pub(super) slo: Option<Duration>,
}

/// The states and the cost of a stage. A state's slices are a number in a mixed radix: digit `p` counts the used slices of
/// `offers[p]`.
#[derive(Debug)]
struct Tables {
    cuts: Cuts,
    offers: Vec<Offer>,
    /// `sums[offer][ideal]`: total need of the ideal's components with a profile there, and the number of components without.
    sums: Vec<Vec<(Need, u32)>>,
    /// Value of one in each digit.
    strides: Vec<usize>,
    /// The most of each digit.
    counts: Vec<usize>,
    codes: usize,
    /// The slices that each code holds.
    held: Vec<Held>,
    /// The most slices.
    most: usize,
    /// Ways to spread forks, by the ideal they begin at.
    spreads: Vec<Vec<Spread>>,
}

/// The parts of a stage, each with the number of its offer.
type Parts = Vec<(ComponentSet, usize)>;

/// A fork as a stage of its own, its branches on a slice each; it ends at the next ideal.
#[derive(Debug)]
struct Spread {
    parts: Parts,
    /// Slices used, by offer, and their contribution to a code.
    used: Vec<usize>,
    adds: usize,
    stage: Stage,
}

/// Slices, and their compute and memory slices.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    slices: usize,
    compute: u32,
    memory: u32,
}

/// A stage on a slice: how long the slice is busy, and its share of the latency, in ns.
#[derive(Debug, Clone, Copy)]
struct Stage {
    busy: u64,
    latency: u64,
}

impl Front {
    pub(super) fn new(
        cuts: Cuts,
        offers: Vec<Offer>,
        forks: &[(usize, Vec<ComponentSet>)],
        hands: &Hands,
        limits: Limits,
    ) -> Result<Self, PartitionError> {
        let tables = Tables::new(cuts, offers, forks, hands, &limits)?;
        let upto = tables.a_component_takes().saturating_mul(2);
        let longest = tables.stage_times().into_iter().max().unwrap_or(0);
        let least = tables.bottlenecks(upto);
        let slo = limits.slo.map_or(NEVER - 1, Duration::as_nanos);
        Ok(Self { tables, least, upto, longest, slo, below: u32::MAX })
    }

    /// Least latency of every state when no slice is busy for longer than `limit`.
    fn latencies(&self, limit: u64) -> Vec<u64> {
        self.tables.sweep(limit, |stage, before, after| {
            for (after, before) in after.iter_mut().zip(before) {
                *after = (*after).min(before.saturating_add(stage.latency));
            }
        })
    }

    /// The slices to use: fewest compute slices, then least latency, then least memory, then the code.
    fn choose(&self, latencies: &[u64]) -> Option<usize> {
        let last = &latencies[latencies.len() - self.tables.codes..];
        let held = &self.tables.held;
        let key = |code: &usize| (held[*code].compute, last[*code], held[*code].memory, *code);
        let allowed = |&code: &usize| last[code] != NEVER && last[code] <= self.slo && self.may_hold(code);
        (0..self.tables.codes).filter(allowed).min_by_key(key)
    }

    fn may_hold(&self, code: usize) -> bool {
        let held = self.tables.held[code];
        held.compute < self.below && held.slices <= self.tables.most
    }

    /// The least bottleneck for pipelines below the compute bound. Most stages are far longer, so the search starts with short
    /// stages and admits longer ones only while it finds no pipeline.
    fn least(&mut self) -> Option<u64> {
        loop {
            let codes = (0..self.tables.codes).filter(|&code| self.may_hold(code));
            let least = codes.map(|code| self.least[code]).min().filter(|&least| least != NEVER);
            if least.is_some() || self.upto >= self.longest {
                return least;
            }
            self.upto = self.upto.saturating_mul(4);
            self.least = self.tables.bottlenecks(self.upto);
        }
    }

    /// The least limit on every slice under which a choice remains.
    fn limit(&mut self) -> Option<u64> {
        let least = self.least()?;
        let enough = |limit| self.choose(&self.latencies(limit)).is_some();
        if enough(least) {
            return Some(least);
        }
        let mut limits = self.tables.stage_times();
        limits.retain(|&limit| limit > least);
        limits.sort_unstable();
        limits.dedup();
        let (mut low, mut high) = (0, limits.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            if enough(limits[middle]) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        limits.get(low).copied()
    }
}

impl Iterator for Front {
    type Item = Pipeline;

    fn next(&mut self) -> Option<Pipeline> {
        let limit = self.limit()?;
        let latencies = self.latencies(limit);
        let code = self.choose(&latencies)?;
        self.below = self.tables.held[code].compute;
        Some(self.tables.trace(&latencies, limit, code))
    }
}

impl Tables {
    fn new(
        cuts: Cuts,
        offers: Vec<Offer>,
        forks: &[(usize, Vec<ComponentSet>)],
        hands: &Hands,
        limits: &Limits,
    ) -> Result<Self, PartitionError> {
        let branches: usize = forks.iter().map(|(_, branches)| branches.len()).sum();
        let most = limits.max_stages.min(cuts.ideals.len() - 1 + branches);
        let counts: Vec<usize> = offers.iter().map(|offer| most.min(offer.count as usize)).collect();
        let (mut strides, mut codes) = (Vec::with_capacity(counts.len()), 1usize);
        for &count in &counts {
            strides.push(codes);
            codes = codes.saturating_mul(count + 1);
        }
        let mut spreads: Vec<Vec<Spread>> = cuts.ideals.iter().map(|_| Vec::new()).collect();
        for (at, branches) in forks {
            spreads[*at] = spread(branches, &offers, &strides, &counts, hands);
        }
        let ways = cuts.steps.iter().map(Vec::len).sum::<usize>() * offers.len()
            + spreads.iter().map(Vec::len).sum::<usize>();
        let transitions = (ways.max(cuts.ideals.len()) as u64).saturating_mul(codes as u64);
        if transitions > limits.max_transitions {
            let limit = limits.max_transitions;
            return Err(PartitionError::TooManyTransitions { transitions, limit });
        }
        let sums = offers.iter().map(|offer| sums(&cuts, offer)).collect();
        let held = |code: usize| {
            let mut held = Held::default();
            for (digit, offer) in offers.iter().enumerate() {
                let used = code / strides[digit] % (counts[digit] + 1);
                held.slices += used;
                held.compute += count(used) * offer.compute_slices;
                held.memory += count(used) * offer.memory_slices;
            }
            held
        };
        let held = (0..codes).map(held).collect();
        Ok(Self { cuts, offers, sums, strides, counts, codes, held, most, spreads })
    }

    /// How many slices of an offer a code uses.
    fn digit(&self, code: usize, offer: usize) -> usize {
        code / self.strides[offer] % (self.counts[offer] + 1)
    }

    fn has_room(&self, code: usize, spread: &Spread) -> bool {
        let mut offers = 0..self.offers.len();
        offers.all(|offer| self.digit(code, offer) + spread.used[offer] <= self.counts[offer])
    }

    /// The stage of `step` from ideal `from` on a slice of `offer`, if it fits.
    fn stage(&self, from: usize, step: &Step, offer: usize) -> Option<Stage> {
        let ((before, missing_before), (after, missing)) =
            (self.sums[offer][from], self.sums[offer][step.to]);
        let fits = missing == missing_before && after.memory - before.memory <= self.offers[offer].room?;
        fits.then(|| Stage {
            busy: after.expected - before.expected + step.expected_hand,
            latency: after.full - before.full + step.hand,
        })
    }

    /// The time of the longest component where it is fastest, at least 1 ns: a lower bound for every pipeline.
    fn a_component_takes(&self) -> u64 {
        let components = self.offers.first().map_or(0, |offer| offer.needs.len());
        let fastest = |one: usize| {
            let on = self.offers.iter().filter_map(|offer| offer.needs[one]);
            on.map(|need| need.expected).min().unwrap_or(0)
        };
        (0..components).map(fastest).max().unwrap_or(0).max(1)
    }

    /// Least bottleneck of the whole by code, as far as it is at most `upto`.
    fn bottlenecks(&self, upto: u64) -> Vec<u64> {
        let all = self.sweep(upto, |stage, before, after| {
            for (after, before) in after.iter_mut().zip(before) {
                *after = (*after).min(stage.busy.max(*before));
            }
        });
        all[all.len() - self.codes..].to_vec()
    }

    /// Goes forward over all states by stages with a slice busy for at most `limit`. `relax` receives a stage, the values of a
    /// run of states before the stage, and the values of those states after it.
    fn sweep(&self, limit: u64, relax: impl Fn(Stage, &[u64], &mut [u64])) -> Vec<u64> {
        let codes = self.codes;
        let mut values = vec![NEVER; self.cuts.ideals.len() * codes];
        values[0] = 0;
        for from in 0..self.cuts.ideals.len() {
            let (done, later) = values.split_at_mut((from + 1) * codes);
            let before = &done[from * codes..];
            for step in &self.cuts.steps[from] {
                let start = (step.to - from - 1) * codes;
                let after = &mut later[start..start + codes];
                for (offer, (&stride, &count)) in self.strides.iter().zip(&self.counts).enumerate() {
                    let stage = self.stage(from, step, offer).filter(|stage| stage.busy <= limit);
                    let Some(stage) = stage else { continue };
                    // All codes in which this digit is below its most, as runs.
                    for run in (0..codes).step_by(stride * (count + 1)) {
                        let run = run..run + stride * count;
                        relax(stage, &before[run.clone()], &mut after[run.start + stride..run.end + stride]);
                    }
                }
            }
            for spread in self.spreads[from].iter().filter(|spread| spread.stage.busy <= limit) {
                for code in (0..codes).filter(|&code| self.has_room(code, spread)) {
                    let after = code + spread.adds;
                    relax(spread.stage, &before[code..=code], &mut later[after..=after]);
                }
            }
        }
        values
    }

    fn stage_times(&self) -> Vec<u64> {
        let mut times = Vec::new();
        for from in 0..self.cuts.ideals.len() {
            for step in &self.cuts.steps[from] {
                let on = (0..self.offers.len()).filter_map(|offer| self.stage(from, step, offer));
                times.extend(on.map(|stage| stage.busy));
            }
            times.extend(self.spreads[from].iter().map(|spread| spread.stage.busy));
        }
        times
    }

    /// The pipeline behind a value of the last ideal; the earliest cuts where several lead there.
    fn trace(&self, latencies: &[u64], limit: u64, code: usize) -> Pipeline {
        let (mut to, mut code) = (self.cuts.ideals.len() - 1, code);
        let mut stages: Vec<Parts> = Vec::new();
        while to > 0 {
            let Some((from, parts)) = self.before(latencies, limit, to, code) else { break };
            code -= parts.iter().map(|&(_, offer)| self.strides[offer]).sum::<usize>();
            to = from;
            stages.push(parts);
        }
        stages.reverse();
        let parts = (0..).zip(&stages).flat_map(|(stage, parts)| {
            parts.iter().map(move |&(components, offer)| Part {
                stage,
                components,
                slice: Some(self.offers[offer].profile),
            })
        });
        Pipeline::new(parts.collect())
    }

    /// The ideal before the last stage of (to, code), with the parts of the stage and their offers.
    fn before(&self, latencies: &[u64], limit: u64, to: usize, code: usize) -> Option<(usize, Parts)> {
        let wanted = latencies[to * self.codes + code];
        let leads = |from: usize, adds: usize, stage: Stage| {
            let before = latencies[from * self.codes + code - adds];
            stage.busy <= limit && before != NEVER && before.saturating_add(stage.latency) == wanted
        };
        for from in 0..to {
            let step = &self.cuts.steps[from][to - from - 1];
            let offer = (0..self.offers.len()).find(|&offer| {
                self.digit(code, offer) > 0
                    && self
                        .stage(from, step, offer)
                        .is_some_and(|stage| leads(from, self.strides[offer], stage))
            });
            if let Some(offer) = offer {
                let stage = self.cuts.ideals[to].without(self.cuts.ideals[from]);
                return Some((from, vec![(stage, offer)]));
            }
            if from + 1 == to {
                let spread = self.spreads[from].iter().find(|spread| {
                    let used = |offer: usize| self.digit(code, offer) >= spread.used[offer];
                    (0..self.offers.len()).all(used) && leads(from, spread.adds, spread.stage)
                });
                if let Some(spread) = spread {
                    return Some((from, spread.parts.clone()));
                }
            }
        }
        None
    }
}

/// All ways to put `branches` on offers, a slice each; none when there are more than [`MAX_SPREADS`] to look at.
fn spread(
    branches: &[ComponentSet],
    offers: &[Offer],
    strides: &[usize],
    counts: &[usize],
    hands: &Hands,
) -> Vec<Spread> {
    let ways = u32::try_from(branches.len()).ok().and_then(|power| offers.len().checked_pow(power));
    let Some(ways) = ways.filter(|&ways| ways <= MAX_SPREADS) else { return Vec::new() };
    let way = |number: usize| {
        let (mut number, mut parts, mut used) = (number, Vec::new(), vec![0; offers.len()]);
        let mut whole = Stage { busy: 0, latency: 0 };
        for &branch in branches {
            let offer = number % offers.len();
            number /= offers.len();
            let need = offers[offer].need(branch)?;
            let (hand, expected) = hands.of_part(branch);
            whole.busy = whole.busy.max(need.expected + expected);
            whole.latency = whole.latency.max(need.full + hand);
            used[offer] += 1;
            parts.push((branch, offer));
        }
        let room = used.iter().zip(counts).all(|(used, count)| used <= count);
        let adds = used.iter().zip(strides).map(|(used, stride)| used * stride).sum();
        room.then_some(Spread { parts, used, adds, stage: whole })
    };
    (0..ways).filter_map(way).collect()
}

fn sums(cuts: &Cuts, offer: &Offer) -> Vec<(Need, u32)> {
    let sum = |ideal: &ComponentSet| {
        ideal.iter().fold((Need::default(), 0), |(sum, missing), one| match offer.needs[one] {
            Some(need) => (sum.plus(need), missing),
            None => (sum, missing + 1),
        })
    };
    cuts.ideals.iter().map(sum).collect()
}
