//! Where a DAG may be cut, and the hand-offs of its stages.
//!
//! A cut lies beside a component that is comparable with every other component: the whole flow passes there. The components between two
//! cuts, a fork and its join, stay together on a slice or each on a slice of its own.

use crate::pipeline::HandOff;
use gshare_core::dag::{ComponentSet, Dag};
use std::collections::BTreeSet;

/// A possible stage: the components of ideal `to` outside the ideal with the step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) to: usize,
    /// Time for hand-offs in and out of the stage, in ns, every branch taken.
    pub(super) hand: u64,
    /// The same, expected over branches.
    pub(super) expected_hand: u64,
}

/// The ideals between segments, the smallest first: the first is empty, the last is the whole DAG.
#[derive(Debug, Clone)]
pub(super) struct Cuts {
    pub(super) ideals: Vec<ComponentSet>,
    /// For each ideal its steps to all later ideals, the nearest first.
    pub(super) steps: Vec<Vec<Step>>,
}

impl Cuts {
    pub(super) fn new(dag: &Dag, hands: &Hands) -> Self {
        let ideals = boundaries(dag);
        let steps_from = |(i, &from): (usize, &ComponentSet)| {
            let step = |to: usize| {
                let (hand, expected_hand) = hands.of_part(ideals[to].without(from));
                Step { to, hand, expected_hand }
            };
            (i + 1..ideals.len()).map(step).collect()
        };
        let steps = ideals.iter().enumerate().map(steps_from).collect();
        Self { ideals, steps }
    }
}

/// A count of slices.
pub(super) fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
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

    /// Hand-offs of a part on a slice of its own: in and out, in full and expected.
    pub(super) fn of_part(&self, part: ComponentSet) -> (u64, u64) {
        let cut = self.0.iter().filter(|hand| part.contains(hand.from) != part.contains(hand.to));
        cut.fold((0, 0), |sum, hand| (sum.0 + hand.hand, sum.1 + hand.expected))
    }
}

/// The ideals between segments.
fn boundaries(dag: &Dag) -> Vec<ComponentSet> {
    let mut boundaries = BTreeSet::from([(0, ComponentSet::EMPTY), (dag.len(), dag.all())]);
    for component in 0..dag.len() {
        let (before, it) = (dag.ancestors(component), ComponentSet::one(component));
        let after = (0..dag.len()).filter(|&other| dag.ancestors(other).contains(component)).collect();
        if before.union(after).union(it) == dag.all() {
            boundaries.extend([before, before.union(it)].map(|ideal| (ideal.len(), ideal)));
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
