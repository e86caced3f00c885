//! Pipelines by coefficient of variation, listed lazily.
//!
//! # Algorithm
//! On one reference slice the stages' times add up to the same total for every cut. For a given number `k` of stages the CV
//! therefore grows with the sum of squares alone, which is the length of a path in the graph of ideals. For every `k` the
//! recursive enumeration of k-best paths (Jiménez and Marzal, 1999) lists the paths of exactly `k` steps, shortest first: a
//! node knows its shortest ways to the end so far and one candidate per step. The next best way is the smallest candidate,
//! and the next best way of the node it leads to replaces that candidate. A heap over `k` on `k * squares` merges the
//! lists.
//!
//! Paths are compared by (sum of squares, hand-offs, first step, rank of the rest). At every node this is exactly the order
//! by cost and then by cuts, so ties cost nothing. Spreading a set of forks changes the total and fixes those stages: each
//! set has a graph of its own, and the lists are merged by the exact fraction.
//!
//! Among chains that differ only in the order of independent stages [`Mode::AcyclicQuotient`](super::Mode::AcyclicQuotient)
//! keeps the first, the lexicographic normal form: no stage follows a larger stage that it could precede. Every tail of a
//! normal form is a normal form, so the enumeration drops the other chains as soon as two parts join.
//!
//! # Example
//! A chain of 2, 3, 4 and 1 ms: `T` = 10. One stage has CV 0 and comes first. Two stages: 5|5 has squares 50 and `k*S` =
//! 100 = `T²`, again CV 0, and comes second with its additional stage; 2|8 has 68, 9|1 has 82. Three: 2|3|5 has 38, `k*S` =
//! 114, CV sqrt(0.14) = 0.37; 5|4|1 42; 2|7|1 54. Four stages: 30, 120, CV 0.45. Order: whole, 5|5, 2|3|5, 2|3|4|1, 5|4|1,
//! 2|8, 2|7|1, 9|1.
//!
//! # Differences from the paper
//! - The paper gives neither the reference slice, nor the kind of standard deviation, nor the ties. Here the slice is any
//!   slice for which all components have a profile, the deviation is the population's, and ties go as above. The sample
//!   deviation would change the order between numbers of stages, but not the order within one.
//! - A component is comparable with every other exactly when it lies on every path of the DAG without its transitive edges.
//! - Branches inside a fork stay whole under series cuts; the other modes cut them.

use super::lattice::{self, Lattice, Step, index};
use crate::pipeline::{Balance, Part, Pipeline};
use core::cmp::{Ordering, Reverse};
use gshare_core::dag::{ComponentSet, Dag};
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

/// The most forks to try both ways, since every set of forks has its own graph.
const MAX_FORKS: usize = 6;

/// All pipelines of a graph, by (CV, stages, hand-off, cuts, spread).
#[derive(Debug)]
pub(super) struct Balanced {
    ideals: Vec<ComponentSet>,
    forks: Vec<Fork>,
    searches: Vec<Search>,
    heap: BinaryHeap<Reverse<Entry>>,
    max_stages: usize,
    side_by_side: bool,
    /// False until the first result, which is the whole: lists of two and more stages begin after it.
    begun: bool,
}

/// A segment with branches that may run side by side.
#[derive(Debug, Clone)]
struct Fork {
    /// The segment's first ideal; it ends at the next.
    at: usize,
    branches: Vec<ComponentSet>,
    /// Sum of the times less the longest branch's.
    gain: u64,
}

/// The next pipeline of one graph with one number of stages.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    balance: Balance,
    hand: u64,
    /// Cuts to compare pipelines of different graphs; empty with a single graph.
    cuts: Vec<u32>,
    search: usize,
    way: u32,
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.balance
            .cmp_cv(&other.balance)
            .then_with(|| self.balance.stages.cmp(&other.balance.stages))
            .then_with(|| self.hand.cmp(&other.hand))
            .then_with(|| self.cuts.cmp(&other.cuts))
            .then_with(|| self.search.cmp(&other.search))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Balanced {
    /// A list over `times`, the expected time in ns of each component on the reference slice. With `normal` it has only
    /// normal forms, in which stages may run side by side; with `spread` it tries forks both ways (for the graph of series
    /// cuts).
    pub(super) fn new(
        dag: &Dag,
        lattice: Lattice,
        times: &[u64],
        max_stages: usize,
        normal: bool,
        spread: bool,
    ) -> Self {
        let forks = if spread { forks(dag, &lattice.ideals, times) } else { Vec::new() };
        let sum = |set: ComponentSet| set.iter().map(|component| times[component]).sum::<u64>();
        let before: Vec<u64> = lattice.ideals.iter().map(|&ideal| sum(ideal)).collect();
        let descendants = normal.then(|| lattice::descendants(dag));
        let max_stages = max_stages.min(lattice.longest()).max(1);
        let mut searches = Vec::with_capacity(1 << forks.len());
        for chosen in 1..1usize << forks.len() {
            let spread: Vec<&Fork> =
                forks.iter().enumerate().filter(|(bit, _)| chosen >> bit & 1 == 1).map(|(_, f)| f).collect();
            searches.push(Search::new(with_spread(&lattice, &before, &spread), None));
        }
        let ideals = lattice.ideals.clone();
        searches.insert(0, Search::new(Graph::new(lattice, before), descendants));
        let mut list = Self {
            ideals,
            forks,
            searches,
            heap: BinaryHeap::new(),
            max_stages,
            side_by_side: normal,
            begun: false,
        };
        list.heap.extend(entry(&mut list.searches, 0, 1, None).map(Reverse));
        list
    }
}

/// The pipeline of `stages` stages that follows `after` in its graph, or the first of them.
fn entry(searches: &mut [Search], search: usize, stages: usize, after: Option<u32>) -> Option<Entry> {
    let alone = searches.len() == 1;
    let found = &mut searches[search];
    let way = match after {
        None => found.first(stages, 0),
        Some(way) => found.after(stages, 0, way),
    }?;
    let cost = found.ways[way as usize].cost();
    let cuts = if alone { Vec::new() } else { found.cuts(stages, way) };
    let total = found.graph.before[found.graph.end()];
    let balance = Balance::new(index(stages), total, cost.squares);
    Some(Entry { balance, hand: cost.hand, cuts, search, way })
}

/// The parts of a pipeline.
fn parts(ideals: &[ComponentSet], forks: &[Fork], search: &Search, entry: &Entry) -> Vec<Part> {
    let stages = entry.balance.stages as usize;
    let mut parts = Vec::with_capacity(stages);
    let mut from = 0;
    search.walk(stages, entry.way, |stage, to| {
        let fork = forks
            .iter()
            .enumerate()
            .find(|(bit, fork)| fork.at == from && to == from + 1 && entry.search >> bit & 1 == 1);
        match fork {
            Some((_, fork)) => {
                parts.extend(fork.branches.iter().map(|&components| part(stage, components)));
            }
            None => parts.push(part(stage, ideals[to].without(ideals[from]))),
        }
        from = to;
    });
    parts
}

fn part(stage: usize, components: ComponentSet) -> Part {
    Part { stage: index(stage), components, slice: None }
}

impl Iterator for Balanced {
    type Item = Pipeline;

    fn next(&mut self) -> Option<Pipeline> {
        // No CV is below 0 and no pipeline has fewer stages, so the whole on one slice needs no other list.
        let first = self.searches[0].listed == 0 && !self.heap.is_empty();
        if !first && !self.begun {
            self.begun = true;
            for search in 0..self.searches.len() {
                self.searches[search].prepare(self.max_stages);
                for stages in 1..=self.max_stages {
                    if (search, stages) != (0, 1) {
                        self.heap.extend(entry(&mut self.searches, search, stages, None).map(Reverse));
                    }
                }
            }
        }
        let mut top = self.heap.peek_mut()?;
        let (search, balance, way) = (top.0.search, top.0.balance, top.0.way);
        let parts = parts(&self.ideals, &self.forks, &self.searches[search], &top.0);
        self.searches[search].listed += 1;
        // The whole of the first graph is the only pipeline of one stage there, so none follows before lists are begun.
        let next = self.begun.then(|| entry(&mut self.searches, search, balance.stages as usize, Some(way)));
        match next.flatten() {
            Some(next) => *top = Reverse(next),
            None => drop(PeekMut::pop(top)),
        }
        Some(Pipeline::new(parts, balance, self.side_by_side))
    }
}

/// Segments of several branches; above [`MAX_FORKS`] segments, those with the greatest gain from spreading.
fn forks(dag: &Dag, ideals: &[ComponentSet], times: &[u64]) -> Vec<Fork> {
    let sum = |set: ComponentSet| set.iter().map(|component| times[component]).sum::<u64>();
    let fork = |(at, branches): (usize, Vec<ComponentSet>)| {
        let longest = branches.iter().map(|&branch| sum(branch)).max().unwrap_or(0);
        let gain = branches.iter().map(|&branch| sum(branch)).sum::<u64>() - longest;
        Fork { at, branches, gain }
    };
    let mut forks: Vec<Fork> = lattice::forks(dag, ideals).into_iter().map(fork).collect();
    forks.sort_by_key(|fork| (Reverse(fork.gain), fork.at));
    forks.truncate(MAX_FORKS);
    forks.sort_by_key(|fork| fork.at);
    forks
}

/// The graph in which `forks` are spread: each is a stage of its own and lasts as long as its longest branch.
fn with_spread(lattice: &Lattice, before: &[u64], forks: &[&Fork]) -> Graph {
    let saved = |ideal: usize| forks.iter().filter(|fork| fork.at < ideal).map(|fork| fork.gain).sum::<u64>();
    let times: Vec<u64> = before.iter().enumerate().map(|(ideal, time)| time - saved(ideal)).collect();
    let (mut steps, mut first) = (Vec::new(), vec![0]);
    for from in 0..lattice.ideals.len() {
        let allowed = |step: &&Step| {
            let to = step.to as usize;
            to == from + 1 || forks.iter().all(|fork| fork.at < from || fork.at >= to)
        };
        steps.extend(lattice.steps_from(from).iter().filter(allowed));
        first.push(index(steps.len()));
    }
    Graph::new(Lattice { ideals: lattice.ideals.clone(), steps, first }, times)
}

#[derive(Debug)]
struct Graph {
    lattice: Lattice,
    /// Time of the components of each ideal: a step takes the difference.
    before: Vec<u64>,
}

impl Graph {
    const fn new(lattice: Lattice, before: Vec<u64>) -> Self {
        Self { lattice, before }
    }

    fn end(&self) -> usize {
        self.before.len() - 1
    }

    fn cost(&self, from: usize, step: &Step) -> Cost {
        let time = u128::from(self.before[step.to as usize] - self.before[from]);
        Cost { squares: time * time, hand: step.hand }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    squares: u128,
    hand: u64,
}

impl Cost {
    const ZERO: Self = Self { squares: 0, hand: 0 };
    const NO_WAY: Self = Self { squares: u128::MAX, hand: u64::MAX };

    fn plus(self, other: Self) -> Self {
        Self { squares: self.squares + other.squares, hand: self.hand + other.hand }
    }
}

/// A way to the end: its cost, its first step, and the way that continues from there.
///
/// The derived order is by cost and then by cuts: `to` is the first cut, and the search finds better continuations earlier. The
/// struct is flat to take 32 bytes, since the search spends its time on heaps of ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    squares: u128,
    hand: u64,
    to: u32,
    /// Number of the continuation; `NONE` at the end, and before the search has looked for the best continuation.
    rest: u32,
}

const NONE: u32 = u32::MAX;

impl Way {
    const fn new(cost: Cost, to: u32) -> Self {
        Self { squares: cost.squares, hand: cost.hand, to, rest: NONE }
    }

    const fn cost(self) -> Cost {
        Cost { squares: self.squares, hand: self.hand }
    }
}

/// The ways of exactly `k` steps from one ideal.
#[derive(Debug)]
struct Node {
    /// Numbers of the best way found and of the worst; `NONE` before there is one.
    best: u32,
    worst: u32,
    candidates: BinaryHeap<Reverse<Way>>,
    /// The last way taken from the candidates; its successor joins them when it is needed.
    last: Option<Way>,
}

/// Recursive enumeration: the ways of exactly `k` steps from each ideal to the end, best first.
#[derive(Debug)]
struct Search {
    graph: Graph,
    /// Descendants of each component when only normal forms are wanted.
    descendants: Option<Vec<ComponentSet>>,
    /// `best[k * ideals + i]`: cost of the best of `k` steps from `i`. Layers are filled in order.
    best: Vec<Cost>,
    /// Number of the node for (k, i) in `nodes`, plus 1; 0 where there is none yet. Laid out as `best`.
    numbers: Vec<u32>,
    nodes: Vec<Node>,
    /// All ways found, each with the number of the next way of its node.
    ways: Vec<Way>,
    next: Vec<u32>,
    listed: usize,
}

impl Search {
    fn new(graph: Graph, descendants: Option<Vec<ComponentSet>>) -> Self {
        let size = graph.before.len();
        let mut best = vec![Cost::NO_WAY; size];
        best[size - 1] = Cost::ZERO;
        Self {
            graph,
            descendants,
            best,
            numbers: vec![0; size],
            nodes: Vec::new(),
            ways: Vec::new(),
            next: Vec::new(),
            listed: 0,
        }
    }

    fn size(&self) -> usize {
        self.graph.before.len()
    }

    /// Fills the layers up to `k` steps.
    fn prepare(&mut self, k: usize) {
        let size = self.size();
        for layer in self.best.len() / size..=k {
            let done = (layer - 1) * size;
            self.best.resize((layer + 1) * size, Cost::NO_WAY);
            self.numbers.resize((layer + 1) * size, 0);
            for from in 0..size {
                let mut best = Cost::NO_WAY;
                for step in self.graph.lattice.steps_from(from) {
                    let rest = self.best[done + step.to as usize];
                    if rest.squares != u128::MAX {
                        best = best.min(self.graph.cost(from, step).plus(rest));
                    }
                }
                self.best[layer * size + from] = best;
            }
        }
    }

    fn number(&self, k: usize, from: usize) -> usize {
        self.numbers[k * self.size() + from] as usize - 1
    }

    /// Makes the node for (k, from) with a candidate for each step.
    fn open(&mut self, k: usize, from: usize) -> usize {
        let place = k * self.size() + from;
        if self.numbers[place] == 0 {
            let mut node = Node { best: NONE, worst: NONE, candidates: BinaryHeap::new(), last: None };
            if k > 0 {
                let rest = &self.best[(k - 1) * self.size()..k * self.size()];
                let way = |step: &Step| {
                    let rest = rest[step.to as usize];
                    (rest.squares != u128::MAX)
                        .then(|| Reverse(Way::new(self.graph.cost(from, step).plus(rest), step.to)))
                };
                let ways: Vec<Reverse<Way>> =
                    self.graph.lattice.steps_from(from).iter().filter_map(way).collect();
                node.candidates = BinaryHeap::from(ways);
            }
            self.nodes.push(node);
            self.numbers[place] = index(self.nodes.len());
            if k == 0 {
                // The end of every way: one way of no steps.
                self.add(self.nodes.len() - 1, Way::new(Cost::ZERO, index(from)));
            }
        }
        self.number(k, from)
    }

    /// Numbers a way of a node, the worst so far.
    fn add(&mut self, node: usize, way: Way) -> u32 {
        let number = index(self.ways.len());
        self.ways.push(way);
        self.next.push(NONE);
        let node = &mut self.nodes[node];
        match core::mem::replace(&mut node.worst, number) {
            NONE => node.best = number,
            before => self.next[before as usize] = number,
        }
        number
    }

    /// The best way of `k` steps from `from`.
    fn first(&mut self, k: usize, from: usize) -> Option<u32> {
        self.prepare(k);
        let node = self.open(k, from);
        match self.nodes[node].best {
            NONE => self.find(k, from, node),
            best => Some(best),
        }
    }

    /// The next best after one of the ways of `k` steps from `from`.
    fn after(&mut self, k: usize, from: usize, way: u32) -> Option<u32> {
        match self.next[way as usize] {
            NONE => self.find(k, from, self.number(k, from)),
            next => Some(next),
        }
    }

    /// Finds one more way of a node.
    fn find(&mut self, k: usize, from: usize, node: usize) -> Option<u32> {
        loop {
            // The successor of the last way: it goes on with the next best from where it leads to.
            let mut next = None;
            if let Some(last) = self.nodes[node].last.take()
                && let Some(rest) = self.after(k - 1, last.to as usize, last.rest)
            {
                let (old, new) = (self.ways[last.rest as usize], self.ways[rest as usize]);
                next = Some(Way {
                    squares: last.squares - old.squares + new.squares,
                    hand: last.hand - old.hand + new.hand,
                    to: last.to,
                    rest,
                });
            }
            // The smallest of that successor and the candidates; the successor takes its place among the candidates.
            let candidates = &mut self.nodes[node].candidates;
            let mut way = match (next, candidates.peek_mut()) {
                (Some(next), Some(mut top)) if top.0 < next => core::mem::replace(&mut *top, Reverse(next)).0,
                (Some(next), _) => next,
                (None, Some(top)) => PeekMut::pop(top).0,
                (None, None) => return None,
            };
            // Until now only the cost of the first continuation has entered the sum.
            if way.rest == NONE {
                let Some(rest) = self.first(k - 1, way.to as usize) else { continue };
                way.rest = rest;
            }
            self.nodes[node].last = Some(way);
            if self.is_normal(from, way) {
                return Some(self.add(node, way));
            }
        }
    }

    /// Whether every later stage of `way` that could precede the first stage is larger than the first stage.
    fn is_normal(&self, from: usize, way: Way) -> bool {
        let Some(descendants) = &self.descendants else { return true };
        let ideals = &self.graph.lattice.ideals;
        let key = |stage: ComponentSet| (stage.len(), stage);
        let all = ideals[self.graph.end()];
        let mut at = ideals[way.to as usize];
        let first = at.without(ideals[from]);
        // `free` has the later components that need no passed stage; for most ways it is soon empty.
        let passed = |free: ComponentSet, stage: ComponentSet| {
            stage.iter().fold(free.without(stage), |free, one| free.without(descendants[one]))
        };
        let (mut free, mut rest) = (passed(all.without(at), first), way.rest);
        while !free.is_empty() {
            let next = self.ways[rest as usize];
            let stage = ideals[next.to as usize].without(at);
            if stage.is_subset(free) && key(stage) < key(first) {
                return false;
            }
            free = passed(free, stage);
            (at, rest) = (ideals[next.to as usize], next.rest);
        }
        true
    }

    /// Visits the stages of a way of `k` steps: number, and the ideal it ends with.
    fn walk(&self, k: usize, way: u32, mut visit: impl FnMut(usize, usize)) {
        let mut at = way;
        for stage in 0..k {
            let way = self.ways[at as usize];
            visit(stage, way.to as usize);
            at = way.rest;
        }
    }

    fn cuts(&self, k: usize, way: u32) -> Vec<u32> {
        let mut cuts = Vec::with_capacity(k);
        self.walk(k, way, |_, ideal| cuts.push(index(ideal)));
        cuts
    }
}
