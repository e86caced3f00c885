//! Pipelines by their definition: everything is listed, nothing is clever.
#![allow(dead_code, reason = "each test file uses its share")]

use gshare_core::dag::{Component, ComponentSet, Dag};
use gshare_core::{BasisPoints, Bytes, Duration};
use gshare_sched::pipeline::{Balance, HandOff, Mode, Pipeline};
use proptest::prelude::*;
use std::cmp::Ordering;

/// One ns per byte and one per edge: hand-offs can be read off the DAG.
pub(crate) const ONE_PER_BYTE: HandOff =
    HandOff { fixed: Duration::from_nanos(1), bytes_per_second: 1_000_000_000 };

/// Stages, each as its parts; the form in which lists are compared.
pub(crate) type Stages = Vec<Vec<ComponentSet>>;

pub(crate) fn stages_of(pipeline: &Pipeline) -> Stages {
    let mut stages = vec![Vec::new(); pipeline.stages() as usize];
    for part in &pipeline.parts {
        stages[part.stage as usize].push(part.components);
    }
    stages
}

/// A DAG with these times in ns on `1g.10gb`, named `c0`, `c1`, ...; edges as pairs with bytes.
pub(crate) fn dag_of(times: &[u64], edges: &[(usize, usize, u64)]) -> Dag {
    dag_with_runs(times, &vec![10_000; times.len()], edges)
}

pub(crate) fn dag_with_runs(times: &[u64], runs: &[u16], edges: &[(usize, usize, u64)]) -> Dag {
    let mut builder = Dag::builder("test");
    for (index, (&time, &runs)) in times.iter().zip(runs).enumerate() {
        let component = Component::new(format!("c{index}"))
            .with_profile("1g.10gb", 1, Duration::from_nanos(time), Bytes::from_mib(100))
            .with_runs(BasisPoints::new(runs).unwrap());
        builder = builder.component(component);
    }
    for &(from, to, bytes) in edges {
        builder = builder.edge(format!("c{from}"), format!("c{to}"), Bytes(bytes));
    }
    builder.build().unwrap()
}

pub(crate) fn chain_of(times: &[u64]) -> Dag {
    let edges: Vec<(usize, usize, u64)> = (1..times.len()).map(|to| (to - 1, to, to as u64 % 3)).collect();
    dag_of(times, &edges)
}

/// A pipeline with all that ranks it.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) stages: Stages,
    pub(crate) balance: Balance,
    pub(crate) hand: u64,
    pub(crate) cuts: Vec<(usize, ComponentSet)>,
    pub(crate) spread: usize,
}

fn time_on_reference(dag: &Dag, set: ComponentSet) -> u64 {
    set.iter()
        .map(|one| dag.components()[one].expected(dag.components()[one].profiles[0].time).as_nanos())
        .sum()
}

fn new_listed(dag: &Dag, stages: Stages, hand_off: &HandOff, spread: usize) -> Listed {
    let time = |stage: &Vec<ComponentSet>| {
        Duration::from_nanos(stage.iter().map(|&part| time_on_reference(dag, part)).max().unwrap())
    };
    let balance = Balance::of(stages.iter().map(time));
    let part_of = |one: usize| stages.iter().flatten().position(|part| part.contains(one)).unwrap();
    let cut = dag.edges().iter().filter(|edge| part_of(edge.from) != part_of(edge.to));
    let hand = cut.map(|edge| 2 * hand_off.time(edge.bytes).as_nanos()).sum();
    let mut ideal = ComponentSet::EMPTY;
    let cuts = stages
        .iter()
        .map(|stage| {
            ideal = stage.iter().fold(ideal, |ideal, part| ideal.union(*part));
            (ideal.len(), ideal)
        })
        .collect();
    Listed { stages, balance, hand, cuts, spread }
}

/// The order of the notes: CV (as a fraction, multiplied out), stages, hand-off, cuts, spread.
pub(crate) fn order(a: &Listed, b: &Listed) -> Ordering {
    let fraction =
        |l: &Listed| (u128::from(l.balance.stages) * l.balance.squares, u128::from(l.balance.total).pow(2));
    let ((an, ad), (bn, bd)) = (fraction(a), fraction(b));
    (an * bd)
        .cmp(&(bn * ad))
        .then(a.balance.stages.cmp(&b.balance.stages))
        .then(a.hand.cmp(&b.hand))
        .then_with(|| a.cuts.cmp(&b.cuts))
        .then(a.spread.cmp(&b.spread))
}

pub(crate) fn is_ideal(dag: &Dag, set: ComponentSet) -> bool {
    set.iter().all(|one| dag.ancestors(one).is_subset(set))
}

pub(crate) fn ideals(dag: &Dag) -> Vec<ComponentSet> {
    (0..1u128 << dag.len()).map(ComponentSet).filter(|&set| is_ideal(dag, set)).collect()
}

/// All chains of ideals from nothing to everything, as stages.
fn ideal_chains(dag: &Dag, ideals: &[ComponentSet]) -> Vec<Stages> {
    fn go(
        from: ComponentSet,
        all: ComponentSet,
        ideals: &[ComponentSet],
        chain: &mut Stages,
        out: &mut Vec<Stages>,
    ) {
        if from == all {
            out.push(chain.clone());
        }
        for &to in ideals {
            if from != to && from.is_subset(to) {
                chain.push(vec![to.without(from)]);
                go(to, all, ideals, chain, out);
                chain.pop();
            }
        }
    }
    let mut out = Vec::new();
    go(ComponentSet::EMPTY, dag.all(), ideals, &mut Vec::new(), &mut out);
    out
}

/// All set partitions with an acyclic quotient, blocks in the smallest order that the edges allow.
fn quotients(dag: &Dag) -> Vec<Stages> {
    fn go(next: usize, dag: &Dag, blocks: &mut Vec<ComponentSet>, out: &mut Vec<Stages>) {
        if next == dag.len() {
            out.extend(smallest_order(dag, blocks));
            return;
        }
        for block in 0..=blocks.len() {
            if block == blocks.len() {
                blocks.push(ComponentSet::EMPTY);
            }
            let before = blocks[block];
            blocks[block] = before.union(ComponentSet::one(next));
            go(next + 1, dag, blocks, out);
            blocks[block] = before;
            if before.is_empty() {
                blocks.pop();
            }
        }
    }
    fn smallest_order(dag: &Dag, blocks: &[ComponentSet]) -> Option<Stages> {
        let (mut done, mut left, mut stages) = (ComponentSet::EMPTY, blocks.to_vec(), Vec::new());
        while !left.is_empty() {
            let ready = |block: &ComponentSet| is_ideal(dag, done.union(*block));
            let place = (0..left.len())
                .filter(|&place| ready(&left[place]))
                .min_by_key(|&place| (left[place].len(), left[place]))?;
            let block = left.remove(place);
            done = done.union(block);
            stages.push(vec![block]);
        }
        Some(stages)
    }
    let mut out = Vec::new();
    go(0, dag, &mut Vec::new(), &mut out);
    out
}

/// The sets of components inside `set` that are connected by edges.
pub(crate) fn pieces(dag: &Dag, set: ComponentSet) -> Vec<ComponentSet> {
    let mut pieces: Vec<ComponentSet> = set.iter().map(ComponentSet::one).collect();
    for edge in dag.edges() {
        if set.contains(edge.from) && set.contains(edge.to) {
            let holds = |one: usize| move |piece: &ComponentSet| piece.contains(one);
            let from = pieces.iter().position(holds(edge.from)).unwrap();
            let to = pieces.iter().position(holds(edge.to)).unwrap();
            if from != to {
                let joined = pieces[from].union(pieces[to]);
                pieces.retain(|piece| !piece.is_subset(joined));
                pieces.push(joined);
            }
        }
    }
    pieces.sort_by_key(|piece| piece.iter().next());
    pieces
}

/// Series cuts: cuts next to components that are comparable with all others; forks that are a stage also spread.
fn series_cuts(dag: &Dag, spread_forks: bool) -> Vec<(Stages, usize)> {
    let comparable =
        |a: usize, b: usize| a == b || dag.ancestors(a).contains(b) || dag.ancestors(b).contains(a);
    let passed_by_all: Vec<usize> =
        (0..dag.len()).filter(|&one| (0..dag.len()).all(|other| comparable(one, other))).collect();
    let boundary = |set: &ComponentSet| {
        set.is_empty()
            || *set == dag.all()
            || passed_by_all.iter().any(|&one| {
                *set == dag.ancestors(one) || *set == dag.ancestors(one).union(ComponentSet::one(one))
            })
    };
    let boundaries: Vec<ComponentSet> = ideals(dag).into_iter().filter(boundary).collect();
    let is_segment = |stage: ComponentSet| {
        let inside = |set: &&ComponentSet| {
            let within = set.intersection(stage);
            !within.is_empty() && within != stage
        };
        boundaries.iter().find(inside).is_none()
    };
    let mut forks: Vec<ComponentSet> = Vec::new();
    for pair in ideal_chains(dag, &boundaries).iter().flatten().flatten() {
        if is_segment(*pair) && pieces(dag, *pair).len() > 1 && !forks.contains(pair) {
            forks.push(*pair);
        }
    }
    forks.sort_by_key(|fork| fork.iter().next());
    // Segments follow each other, so the order of forks is the order of their places.
    forks.sort_by_key(|fork| {
        boundaries.iter().filter(|set| set.intersection(*fork).is_empty()).map(|s| s.len()).max()
    });
    let mut out = Vec::new();
    for chain in ideal_chains(dag, &boundaries) {
        for spread in 0..1usize << if spread_forks { forks.len() } else { 0 } {
            let chosen: Vec<ComponentSet> = forks
                .iter()
                .enumerate()
                .filter(|(bit, _)| spread >> bit & 1 == 1)
                .map(|(_, fork)| *fork)
                .collect();
            if chosen.iter().all(|fork| chain.contains(&vec![*fork])) {
                let stages = chain.iter().map(|stage| {
                    if chosen.contains(&stage[0]) { pieces(dag, stage[0]) } else { stage.clone() }
                });
                out.push((stages.collect(), spread));
            }
        }
    }
    out
}

/// Everything of a mode, in order.
pub(crate) fn list(dag: &Dag, mode: Mode, hand_off: &HandOff, spread_forks: bool) -> Vec<Listed> {
    let all: Vec<(Stages, usize)> = match mode {
        Mode::SeriesCut => series_cuts(dag, spread_forks),
        Mode::IdealChain => ideal_chains(dag, &ideals(dag)).into_iter().map(|stages| (stages, 0)).collect(),
        _ => quotients(dag).into_iter().map(|stages| (stages, 0)).collect(),
    };
    let mut listed: Vec<Listed> =
        all.into_iter().map(|(stages, spread)| new_listed(dag, stages, hand_off, spread)).collect();
    listed.sort_by(order);
    listed
}

/// Number of chains of ideals, without listing them.
pub(crate) fn count_chains(dag: &Dag) -> u128 {
    let ideals = {
        let mut ideals = ideals(dag);
        ideals.sort_by_key(|ideal| ideal.len());
        ideals
    };
    let mut ways = vec![0u128; ideals.len()];
    ways[0] = 1;
    for to in 1..ideals.len() {
        ways[to] = (0..to).filter(|&from| ideals[from].is_subset(ideals[to])).map(|from| ways[from]).sum();
    }
    ways[ideals.len() - 1]
}

/// Times from a few values, so that there are ties, or from all over the range.
pub(crate) fn times(n: impl Strategy<Value = usize>) -> impl Strategy<Value = Vec<u64>> {
    let hour = gshare_core::dag::MAX_TIME.as_nanos();
    (n, any::<bool>()).prop_flat_map(move |(n, ties)| {
        prop::collection::vec(if ties { 1..=4u64 } else { 1..=hour / 1_000_000 }, n)
    })
}

/// A DAG of up to `most` components: edges from lower to higher with a density that varies, some components only run by
/// some requests.
pub(crate) fn random_dag(most: usize) -> impl Strategy<Value = Dag> {
    (times(1..=most), 0..=100u32).prop_flat_map(|(times, density)| {
        let n = times.len();
        let pairs = n * (n - 1) / 2;
        let edges = prop::collection::vec((0..100u32, 0..4u64), pairs);
        let runs = prop::collection::vec(prop_oneof![4 => Just(10_000u16), 1 => 1..10_000u16], n);
        (Just(times), runs, edges).prop_map(move |(times, runs, draws)| {
            let pairs = (0..times.len()).flat_map(|to| (0..to).map(move |from| (from, to)));
            let edges: Vec<(usize, usize, u64)> = pairs
                .zip(draws)
                .filter(|(_, (draw, _))| *draw < density)
                .map(|((from, to), (_, bytes))| (from, to, bytes))
                .collect();
            dag_with_runs(&times, &runs, &edges)
        })
    })
}

/// All cuts of a mode that runs stages one after another, in no order; forks also spread.
pub(crate) fn cuts(dag: &Dag, mode: Mode) -> Vec<Stages> {
    match mode {
        Mode::SeriesCut => series_cuts(dag, true).into_iter().map(|(stages, _)| stages).collect(),
        _ => ideal_chains(dag, &ideals(dag)),
    }
}
