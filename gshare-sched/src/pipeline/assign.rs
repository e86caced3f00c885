//! Slices for a pipeline: least latency, then least memory left over, fewest GPUs, least fragmentation.

use super::costs::{Need, Offer, misfit, offers};
use super::cuts::{Hands, count};
use crate::mig::{GpuModel, SliceAt};
use crate::pipeline::{AssignedSlice, Assignment, Goal, Node, NodeGpu, Pipeline, Unfit};
use gshare_core::dag::Dag;
use gshare_core::{Bytes, Duration, GpuId};
use std::collections::BTreeSet;

/// Up to this many GPUs every set of them is looked at; above, they are taken one by one.
const EXACT_GPUS: usize = 10;

/// Assigns slices so that the node's idle memory stays useful.
///
/// 1. Each part gets a profile: among all ways with the least sum of the parts' times, the way with the least memory left over.
///    For stages in sequence the sum is the latency. Where parts run side by side (a spread fork) the sum stands in for it, but the
///    reported latency and the SLO check use the real latency.
/// 2. The profiles' slices come from the fewest GPUs; among equal sets of GPUs, from the set with the least growth of fragmentation.
///    The **fragmentation** of a GPU is, summed over all profiles, the idle memory slices that cannot form slices of the
///    profile because of their positions.
///
/// # Cost
/// O(p² t²) for p parts on t profiles with free slices, then 2^g sets of g <= 10 GPUs.
#[derive(Debug, Clone, Copy, Default)]
pub struct LeastFragmentation;

impl LeastFragmentation {
    /// Slices of `node` for the parts of `pipeline`: free and distinct, each part fits its slice, and the latency is within the SLO.
    ///
    /// # Errors
    /// [`Unfit`]: why there are none.
    pub fn assign(
        self,
        dag: &Dag,
        goal: &Goal,
        pipeline: &Pipeline,
        node: &Node,
    ) -> Result<Assignment, Unfit> {
        let offers = offers(dag, goal, node);
        let free: u32 = offers.iter().map(|offer| offer.count).sum();
        let parts = count(pipeline.parts.len());
        let needs = needs(dag, goal, pipeline, node, &offers)?;
        if parts > free {
            return Err(Unfit::TooFewSlices { parts, free });
        }
        let chosen = cheapest(&needs, &offers).ok_or(Unfit::NotTogether)?;
        let hands = Hands::new(dag, &goal.hand_off);
        let mut assignment = Assignment::new(Vec::new());
        let mut latencies = Vec::with_capacity(chosen.len());
        for (part, (&offer, needs)) in pipeline.parts.iter().zip(chosen.iter().zip(&needs)) {
            let need = needs[offer].unwrap_or_default();
            let (hand, expected) = hands.of_part(part.components);
            latencies.push(need.full + hand);
            let busy = Duration::from_nanos(need.expected + expected);
            assignment.bottleneck = assignment.bottleneck.max(busy);
            assignment.compute_slices += offers[offer].compute_slices;
            let used = need.memory.saturating_add(goal.runtime_memory.get());
            assignment.waste = Bytes(assignment.waste.get() + offers[offer].memory.saturating_sub(used));
        }
        assignment.latency = Duration::from_nanos(latency(pipeline, &latencies));
        if let Some(slo) = goal.slo.filter(|&slo| assignment.latency > slo) {
            return Err(Unfit::SloMissed { latency: assignment.latency, slo });
        }
        place(&mut assignment, node, &offers, &chosen);
        Ok(assignment)
    }
}

/// Each part's need of memory and time on each offer, where it fits.
fn needs(
    dag: &Dag,
    goal: &Goal,
    pipeline: &Pipeline,
    node: &Node,
    offers: &[Offer],
) -> Result<Vec<Vec<Option<Need>>>, Unfit> {
    let of = |part: &crate::pipeline::Part| {
        let need = |offer: &Offer| {
            let allowed = part.slice.is_none_or(|slice| slice == offer.profile);
            if allowed { offer.need(part.components) } else { None }
        };
        let needs: Vec<Option<Need>> = offers.iter().map(need).collect();
        if needs.iter().all(Option::is_none) {
            return Err(Unfit::NoSlice {
                stage: part.stage,
                why: misfit(dag, goal, node, offers, part.components),
            });
        }
        Ok(needs)
    };
    pipeline.parts.iter().map(of).collect()
}

/// An offer for every part with the least sum of (time, memory left over): parts are added one by one, each along the
/// cheapest chain of moves of those before it (successive shortest paths over the few profiles).
fn cheapest(needs: &[Vec<Option<Need>>], offers: &[Offer]) -> Option<Vec<usize>> {
    let cost = |part: usize, offer: usize| -> Option<i128> {
        let need = needs[part][offer]?;
        let left = offers[offer].room?.saturating_sub(need.memory);
        Some((i128::from(need.full) << 64) + i128::from(left))
    };
    let mut chosen: Vec<usize> = Vec::with_capacity(needs.len());
    let mut free: Vec<u32> = offers.iter().map(|offer| offer.count).collect();
    for part in 0..needs.len() {
        // Least cost of one more slice of each offer, with the move before it.
        let mut least: Vec<Option<i128>> = (0..offers.len()).map(|offer| cost(part, offer)).collect();
        let mut moved: Vec<Option<usize>> = vec![None; offers.len()];
        for _ in 0..offers.len() {
            let mut changed = false;
            for (other, &from) in chosen.iter().enumerate() {
                for to in 0..offers.len() {
                    let (Some(start), Some(there), Some(here)) =
                        (least[from], cost(other, to), cost(other, from))
                    else {
                        continue;
                    };
                    let sum = start + there - here;
                    if to != from && least[to].is_none_or(|least| sum < least) {
                        (least[to], moved[to]) = (Some(sum), Some(other));
                        changed = true;
                    }
                }
            }
            if !changed {
                break;
            }
        }
        let open = (0..offers.len()).filter(|&offer| free[offer] > 0 && least[offer].is_some());
        let mut offer = open.min_by_key(|&offer| (least[offer], offer))?;
        free[offer] -= 1;
        while let Some(other) = moved[offer] {
            offer = core::mem::replace(&mut chosen[other], offer);
        }
        chosen.push(offer);
    }
    Some(chosen)
}

/// Time of one batch through all parts.
fn latency(pipeline: &Pipeline, latencies: &[u64]) -> u64 {
    let mut stages = vec![0; pipeline.stages() as usize];
    for (part, &latency) in pipeline.parts.iter().zip(latencies) {
        let stage = &mut stages[part.stage as usize];
        *stage = latency.max(*stage);
    }
    stages.into_iter().sum()
}

/// Takes slices of the chosen profiles and fills in the figures.
fn place(assignment: &mut Assignment, node: &Node, offers: &[Offer], chosen: &[usize]) {
    let mut wanted = vec![0u32; offers.len()];
    for &offer in chosen {
        wanted[offer] += 1;
    }
    let gpus: Vec<&NodeGpu> = node
        .gpus()
        .iter()
        .filter(|gpu| gpu.free.iter().any(|slice| wants(offers, &wanted, slice.profile)))
        .collect();
    let mut best: Option<(i64, Taken)> = None;
    let mut lost = Lost::new();
    if gpus.len() <= EXACT_GPUS {
        let mut sets = distinct_sets(node, offers, &wanted, &gpus);
        sets.sort_by_key(|set| (set.count_ones(), *set));
        let mut size = 0;
        for set in sets {
            if best.is_some() && set.count_ones() > size {
                break;
            }
            let some: Vec<&NodeGpu> =
                gpus.iter().enumerate().filter(|(bit, _)| set >> bit & 1 == 1).map(|(_, gpu)| *gpu).collect();
            if let Some(taken) = take(node, offers, &wanted, &some, &mut lost)
                && best.as_ref().is_none_or(|(growth, _)| taken.0 < *growth)
            {
                size = set.count_ones();
                best = Some(taken);
            }
        }
    } else {
        best = take(node, offers, &wanted, &most_useful(&gpus, offers, &wanted), &mut lost);
    }
    let Some((growth, mut taken)) = best else { return };
    assignment.fragmentation = growth;
    for slices in &mut taken {
        slices.reverse();
    }
    for &offer in chosen {
        if let Some((gpu, slice)) = taken[offer].pop() {
            assignment.slices.push(AssignedSlice { gpu, slice });
        }
    }
    let used: BTreeSet<GpuId> = assignment.slices.iter().map(|slice| slice.gpu).collect();
    assignment.gpus = count(used.len());
}

/// Slices of each offer.
type Taken = Vec<Vec<(GpuId, SliceAt)>>;

fn wants(offers: &[Offer], wanted: &[u32], profile: gshare_core::ProfileId) -> bool {
    offers.iter().zip(wanted).any(|(offer, &wanted)| wanted > 0 && offer.profile == profile)
}

/// Sets of GPUs with the wanted slices, as bit masks. Among GPUs with the same idle and free slices a set takes the first:
/// other choices would give the same result, only later.
fn distinct_sets(node: &Node, offers: &[Offer], wanted: &[u32], gpus: &[&NodeGpu]) -> Vec<u32> {
    let mut before = vec![0u32; gpus.len()];
    let mut has = Vec::with_capacity(gpus.len());
    for (place, gpu) in gpus.iter().enumerate() {
        let alike = |other: &&&NodeGpu| other.free == gpu.free && node.idle(other) == node.idle(gpu);
        if let Some(last) = gpus[..place].iter().rposition(|other| alike(&other)) {
            before[place] = 1 << last;
        }
        let count = |offer: &Offer| gpu.free.iter().filter(|slice| slice.profile == offer.profile).count();
        has.push(offers.iter().map(count).collect::<Vec<usize>>());
    }
    let members = |set: u32| (0..gpus.len()).filter(move |place| set >> place & 1 == 1);
    let suffices = |set: u32| {
        let enough = |(offer, &wanted): (usize, &u32)| {
            members(set).map(|place| has[place][offer]).sum::<usize>() >= wanted as usize
        };
        wanted.iter().enumerate().all(enough)
    };
    let first = |set: u32| members(set).all(|place| before[place] & !set == 0);
    (1..1u32 << gpus.len()).filter(|&set| first(set) && suffices(set)).collect()
}

/// GPUs in greedy order: each covers most of the remaining demand, until the demand is met.
fn most_useful<'a>(gpus: &[&'a NodeGpu], offers: &[Offer], wanted: &[u32]) -> Vec<&'a NodeGpu> {
    let (mut rest, mut left, mut chosen) = (gpus.to_vec(), wanted.to_vec(), Vec::new());
    let has = |gpu: &NodeGpu, offer: &Offer| {
        count(gpu.free.iter().filter(|slice| slice.profile == offer.profile).count())
    };
    while left.iter().any(|&left| left > 0) && !rest.is_empty() {
        let covers = |gpu: &NodeGpu| {
            offers.iter().zip(&left).map(|(offer, &left)| left.min(has(gpu, offer))).sum::<u32>()
        };
        let best = (0..rest.len()).max_by_key(|&place| (covers(rest[place]), core::cmp::Reverse(place)));
        let Some(best) = best else { break };
        let gpu = rest.remove(best);
        for (offer, left) in offers.iter().zip(&mut left) {
            *left -= (*left).min(has(gpu, offer));
        }
        chosen.push(gpu);
    }
    chosen
}

/// Slices of each offer from these GPUs, large profiles first, each where fragmentation grows least, and the growth; `None`
/// when the GPUs have too few slices.
fn take(
    node: &Node,
    offers: &[Offer],
    wanted: &[u32],
    gpus: &[&NodeGpu],
    lost: &mut Lost,
) -> Option<(i64, Taken)> {
    let model = node.model();
    let mut idle: Vec<u8> = gpus.iter().map(|gpu| node.idle(gpu)).collect();
    let mut order: Vec<usize> = (0..offers.len()).filter(|&offer| wanted[offer] > 0).collect();
    order.sort_by_key(|&offer| (core::cmp::Reverse(offers[offer].memory_slices), offer));
    let (mut growth, mut taken) = (0, vec![Vec::new(); offers.len()]);
    for offer in order {
        let profile = offers[offer].profile;
        let size = model.get(profile)?;
        for _ in 0..wanted[offer] {
            let mut best: Option<(i64, usize, SliceAt, u8)> = None;
            for (place, gpu) in gpus.iter().enumerate() {
                for &slice in gpu.free.iter().filter(|slice| slice.profile == profile) {
                    let Some(mask) = size.mask_at(slice.start) else { continue };
                    if idle[place] & mask == 0 {
                        continue;
                    }
                    let after = idle[place] & !mask;
                    let grows = lost.of(model, after) - lost.of(model, idle[place]);
                    if best.is_none_or(|(least, ..)| grows < least) {
                        best = Some((grows, place, slice, after));
                    }
                }
            }
            let (grows, place, slice, after) = best?;
            idle[place] = after;
            growth += grows;
            taken[offer].push((gpus[place].gpu, slice));
        }
    }
    Some((growth, taken))
}

/// The fragmentation of each mask of idle memory slices, computed when it is first asked for.
struct Lost([Option<i64>; 256]);

impl Lost {
    const fn new() -> Self {
        Self([None; 256])
    }

    fn of(&mut self, model: &GpuModel, idle: u8) -> i64 {
        *self.0[usize::from(idle)].get_or_insert_with(|| fragmentation(model, idle))
    }
}

/// Over all profiles: idle memory slices that suffice for slices of the profile by number, but not by position.
fn fragmentation(model: &GpuModel, idle: u8) -> i64 {
    let lost = |profile: &crate::mig::MigProfile| {
        let by_number =
            (idle.count_ones() / u32::from(profile.memory_slices.max(1))).min(profile.max_count.into());
        let (mut left, mut by_place) = (idle, 0);
        // The earliest of equal slices' places is always a good choice.
        for start in profile.start_places() {
            if let Some(mask) = profile.mask_at(start)
                && left & mask == mask
                && by_place < by_number
            {
                left &= !mask;
                by_place += 1;
            }
        }
        i64::from(by_number - by_place) * i64::from(profile.memory_slices)
    };
    model.profiles.iter().map(lost).sum()
}
