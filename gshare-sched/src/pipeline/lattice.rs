//! The graph of ideals and steps.

use crate::pipeline::{HandOff, Mode};
use gshare_core::dag::{ComponentSet, Dag};
use std::collections::BTreeSet;

/// A passed bound: the quantity beyond it, and the bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Passed {
    pub(super) what: &'static str,
    pub(super) limit: u64,
}

/// A possible stage: the components of ideal `to` outside the ideal with the step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) to: u32,
    /// Time for hand-offs in and out of the stage, in ns, every branch taken.
    pub(super) hand: u64,
    /// The same, expected over branches.
    pub(super) expected_hand: u64,
}

/// Ideals by (size, components as a number): the first is empty, the last is the whole DAG.
#[derive(Debug, Clone)]
pub(super) struct Lattice {
    pub(super) ideals: Vec<ComponentSet>,
    pub(super) steps: Vec<Step>,
    /// The steps of ideal `i` are `steps[first[i]..first[i + 1]]`, by `to`.
    pub(super) first: Vec<u32>,
}

impl Lattice {
    pub(super) fn steps_from(&self, ideal: usize) -> &[Step] {
        &self.steps[self.first[ideal] as usize..self.first[ideal + 1] as usize]
    }

    /// The graph of `mode`.
    pub(super) fn new(
        dag: &Dag,
        mode: Mode,
        hand_off: &HandOff,
        max_ideals: u32,
        max_steps: u32,
    ) -> Result<Self, Passed> {
        let ideals = match mode {
            Mode::SeriesCut => series_boundaries(dag),
            _ => all_ideals(dag, max_ideals)?,
        };
        let hands = Hands::new(dag, hand_off);
        let crossing: Vec<(u64, u64)> = ideals.iter().map(|&ideal| hands.out_of(ideal)).collect();
        let (mut steps, mut first) = (Vec::new(), vec![0]);
        for (i, &from) in ideals.iter().enumerate() {
            let edges = hands.crossing(from);
            for (j, &to) in ideals.iter().enumerate().skip(i + 1) {
                if !from.is_subset(to) {
                    continue;
                }
                let stage = to.without(from);
                if steps.len() == max_steps as usize {
                    return Err(Passed { what: "possible stages", limit: u64::from(max_steps) });
                }
                // Into the stage: edges out of `from` that end in the stage. Out of the stage: edges out of `to`, less the
                // edges that pass the stage by.
                let (mut into, mut into_expected) = (0, 0);
                for edge in &edges {
                    if stage.contains(edge.to) {
                        into += edge.hand;
                        into_expected += edge.expected;
                    }
                }
                steps.push(Step {
                    to: index(j),
                    hand: crossing[j].0 + 2 * into - crossing[i].0,
                    expected_hand: crossing[j].1 + 2 * into_expected - crossing[i].1,
                });
            }
            first.push(index(steps.len()));
        }
        Ok(Self { ideals, steps, first })
    }

    /// The most steps of a path: every component is a stage of its own where the mode allows it.
    pub(super) fn longest(&self) -> usize {
        let mut longest = vec![0usize; self.ideals.len()];
        for i in (0..self.ideals.len()).rev() {
            let steps = self.steps_from(i);
            longest[i] = steps.iter().map(|step| longest[step.to as usize] + 1).max().unwrap_or(0);
        }
        longest[0]
    }
}

/// An index into a short table: `u32` limits bound steps and ideals.
pub(super) fn index(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

#[derive(Debug, Clone, Copy)]
struct Hand {
    from: usize,
    to: usize,
    hand: u64,
    expected: u64,
}

/// The cost of each edge to the slice at either end, if its ends are on different slices.
#[derive(Debug)]
pub(super) struct Hands(Vec<Hand>);

impl Hands {
    pub(super) fn new(dag: &Dag, hand_off: &HandOff) -> Self {
        let hand = |edge: &gshare_core::dag::Edge| {
            let time = hand_off.time(edge.bytes);
            // Rounded up, as expected times are.
            let expected = (u128::from(time.as_nanos()) * u128::from(dag.taken(edge).get())).div_ceil(10_000);
            Hand {
                from: edge.from,
                to: edge.to,
                hand: time.as_nanos(),
                expected: u64::try_from(expected).unwrap_or(u64::MAX),
            }
        };
        Self(dag.edges().iter().map(hand).collect())
    }

    fn crossing(&self, ideal: ComponentSet) -> Vec<Hand> {
        let out = |hand: &&Hand| ideal.contains(hand.from) && !ideal.contains(hand.to);
        self.0.iter().filter(out).copied().collect()
    }

    /// Hand-offs out of a set: in full, and expected.
    fn out_of(&self, set: ComponentSet) -> (u64, u64) {
        let out = self.0.iter().filter(|hand| set.contains(hand.from) && !set.contains(hand.to));
        out.fold((0, 0), |sum, hand| (sum.0 + hand.hand, sum.1 + hand.expected))
    }

    /// Hand-offs of a part on a slice of its own: in and out, in full and expected.
    pub(super) fn of_part(&self, part: ComponentSet) -> (u64, u64) {
        let cut = self.0.iter().filter(|hand| part.contains(hand.from) != part.contains(hand.to));
        cut.fold((0, 0), |sum, hand| (sum.0 + hand.hand, sum.1 + hand.expected))
    }

    /// Whether data goes from one set to the other.
    pub(super) fn leads(&self, from: ComponentSet, to: ComponentSet) -> bool {
        self.0.iter().any(|hand| from.contains(hand.from) && to.contains(hand.to))
    }
}

/// All ideals, level by level.
fn all_ideals(dag: &Dag, limit: u32) -> Result<Vec<ComponentSet>, Passed> {
    let passed = Passed { what: "ideals (max_ideals)", limit: u64::from(limit) };
    let mut ideals = vec![ComponentSet::EMPTY];
    let mut level = BTreeSet::from([ComponentSet::EMPTY]);
    for _ in 0..dag.len() {
        let mut next = BTreeSet::new();
        for &ideal in &level {
            for component in dag.all().without(ideal).iter() {
                if dag.ancestors(component).is_subset(ideal) {
                    next.insert(ideal.union(ComponentSet::one(component)));
                }
            }
            if ideals.len() + next.len() > limit as usize {
                return Err(passed);
            }
        }
        ideals.extend(&next);
        level = next;
    }
    Ok(ideals)
}

/// For each component its direct and indirect successors.
pub(super) fn descendants(dag: &Dag) -> Vec<ComponentSet> {
    let mut descendants = vec![ComponentSet::EMPTY; dag.len()];
    for component in 0..dag.len() {
        for ancestor in dag.ancestors(component).iter() {
            descendants[ancestor] = descendants[ancestor].union(ComponentSet::one(component));
        }
    }
    descendants
}

/// The ideals between segments.
fn series_boundaries(dag: &Dag) -> Vec<ComponentSet> {
    let descendants = descendants(dag);
    let mut boundaries = BTreeSet::from([(0, ComponentSet::EMPTY), (dag.len(), dag.all())]);
    for (component, &after) in descendants.iter().enumerate() {
        let (before, it) = (dag.ancestors(component), ComponentSet::one(component));
        if before.union(after).union(it) == dag.all() {
            for ideal in [before, before.union(it)] {
                boundaries.insert((ideal.len(), ideal));
            }
        }
    }
    boundaries.into_iter().map(|(_, ideal)| ideal).collect()
}

/// For each component the components that share an edge with it.
fn neighbours(dag: &Dag) -> Vec<ComponentSet> {
    let mut neighbours = vec![ComponentSet::EMPTY; dag.len()];
    for edge in dag.edges() {
        neighbours[edge.from] = neighbours[edge.from].union(ComponentSet::one(edge.to));
        neighbours[edge.to] = neighbours[edge.to].union(ComponentSet::one(edge.from));
    }
    neighbours
}

/// The connected component of `set` with the first member.
fn component_of(set: ComponentSet, neighbours: &[ComponentSet]) -> ComponentSet {
    let mut reached: ComponentSet = set.iter().take(1).collect();
    let mut new = reached;
    while !new.is_empty() {
        let around = new.iter().fold(ComponentSet::EMPTY, |all, one| all.union(neighbours[one]));
        new = around.intersection(set).without(reached);
        reached = reached.union(new);
    }
    reached
}

/// The branches of a fork: the connected parts of `set`, by first component.
fn branches(set: ComponentSet, neighbours: &[ComponentSet]) -> Vec<ComponentSet> {
    let (mut rest, mut branches) = (set, Vec::new());
    while !rest.is_empty() {
        let branch = component_of(rest, neighbours);
        branches.push(branch);
        rest = rest.without(branch);
    }
    branches
}

/// Segments of several branches: the place of the ideal each begins at (it ends at the next), and its branches.
pub(super) fn forks(dag: &Dag, ideals: &[ComponentSet]) -> Vec<(usize, Vec<ComponentSet>)> {
    let neighbours = neighbours(dag);
    let segments = ideals.windows(2).map(|pair| pair[1].without(pair[0])).enumerate();
    let forks = segments.map(|(at, segment)| (at, branches(segment, &neighbours)));
    forks.filter(|(_, branches)| branches.len() > 1).collect()
}
