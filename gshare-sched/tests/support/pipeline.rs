//! Pipelines by their definition: everything is listed, nothing is clever.
#![allow(dead_code, reason = "each test file uses its share")]

use gshare_core::dag::{Component, ComponentSet, Dag};
use gshare_core::{BasisPoints, Bytes, Duration};
use gshare_sched::pipeline::HandOff;
use proptest::prelude::*;

/// One ns per byte and one per edge: hand-offs can be read off the DAG.
pub(crate) const ONE_PER_BYTE: HandOff =
    HandOff { fixed: Duration::from_nanos(1), bytes_per_second: 1_000_000_000 };

/// Stages, each as its parts; the form in which lists are compared.
pub(crate) type Stages = Vec<Vec<ComponentSet>>;

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

fn is_ideal(dag: &Dag, set: ComponentSet) -> bool {
    set.iter().all(|one| dag.ancestors(one).is_subset(set))
}

fn ideals(dag: &Dag) -> Vec<ComponentSet> {
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

/// The sets of components inside `set` that are connected by edges.
fn pieces(dag: &Dag, set: ComponentSet) -> Vec<ComponentSet> {
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

/// All cuts, in no order: they are next to components that are comparable with all others; forks that are a stage also spread.
pub(crate) fn cuts(dag: &Dag) -> Vec<Stages> {
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
        for spread in 0..1usize << forks.len() {
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
                out.push(stages.collect());
            }
        }
    }
    out
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
