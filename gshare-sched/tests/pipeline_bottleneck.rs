//! The joint partition and assignment against exhaustive search.

use crate::support::*;
use gshare_core::dag::{Component, ComponentSet, Dag};
use gshare_core::{Bytes, Duration};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{Assignment, Goal, LeastFragmentation, Node, Partitioner, Pipeline};
use proptest::prelude::*;

const SLICES: [&str; 3] = ["1g.10gb", "2g.20gb", "4g.40gb"];

/// The same DAG with times, memory and gaps of its own on each slice.
fn on_slices(dag: &Dag, draws: &[[(u64, u64, u8); 3]]) -> Dag {
    let mut builder = Dag::builder("test");
    for (component, draws) in dag.components().iter().zip(draws) {
        let mut on = Component::new(component.name.clone()).with_runs(component.runs);
        for (slice, (time, memory, gap)) in SLICES.iter().zip(draws) {
            // One slice at least; a few have no profile.
            if *gap > 8 || on.profiles.is_empty() && *slice == SLICES[2] {
                on = on.with_profile(*slice, 1, Duration::from_nanos(*time), Bytes::from_mib(*memory));
            }
        }
        builder = builder.component(on);
    }
    for edge in dag.edges() {
        let name = |one: usize| dag.components()[one].name.clone();
        builder = builder.edge(name(edge.from), name(edge.to), edge.bytes);
    }
    builder.build().unwrap()
}

fn case(most: usize) -> impl Strategy<Value = (Dag, Vec<&'static str>, Option<u64>)> {
    let lengths = prop_oneof![1..=most, most - 3..=most];
    let dag = prop_oneof![times(lengths).prop_map(|times| chain_of(&times)), random_dag(most)];
    let draws = prop::collection::vec(prop::array::uniform3((1..60u64, 1..7_000u64, any::<u8>())), most);
    let free = prop::collection::vec(prop::sample::select(&SLICES[..]), 1..=6);
    let slo = prop::option::of(20..300u64);
    (dag, draws, free, slo).prop_map(|(dag, draws, free, slo)| (on_slices(&dag, &draws), free, slo))
}

fn node(free: &[&str]) -> Node {
    Node::with_free(GpuModel::find("A100-80").unwrap(), free).unwrap()
}

fn goal(slo: Option<u64>) -> Goal {
    let goal = Goal::default().with_hand_off(ONE_PER_BYTE);
    if let Some(ns) = slo { goal.with_slo(Duration::from_nanos(ns)) } else { goal }
}

/// A pipeline on slices, by its criteria.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    bottleneck: u64,
    compute: u32,
    latency: u64,
    memory_slices: u32,
}

/// All cuts on all choices of slices, from the definitions.
struct Exhaustive<'a> {
    dag: &'a Dag,
    goal: &'a Goal,
    node: &'a Node,
    found: Vec<Found>,
}

impl Exhaustive<'_> {
    /// Busy time and latency of a part on a slice, if it fits.
    fn on(&self, part: ComponentSet, name: &str) -> Option<(u64, u64)> {
        let slice = self.node.model().get(self.node.model().profile(name).unwrap()).unwrap();
        let (mut busy, mut latency, mut memory) = (0, 0, self.goal.runtime_memory.get());
        for one in part.iter() {
            let component = &self.dag.components()[one];
            let profile = component.profile(name, self.goal.batch)?;
            busy += component.expected(profile.time).as_nanos();
            latency += profile.time.as_nanos();
            memory += profile.memory.get();
        }
        for edge in self.dag.edges().iter().filter(|edge| part.contains(edge.from) != part.contains(edge.to))
        {
            let hand = self.goal.hand_off.time(edge.bytes).as_nanos();
            latency += hand;
            busy += (hand * u64::from(self.dag.taken(edge).get())).div_ceil(10_000);
        }
        (memory <= slice.memory.get()).then_some((busy, latency))
    }

    fn stages(&mut self, stages: &[Vec<ComponentSet>], free: &mut Vec<&'static str>, so_far: Found) {
        let Some((parts, rest)) = stages.split_first() else {
            if self.goal.slo.is_none_or(|slo| so_far.latency <= slo.as_nanos()) {
                self.found.push(so_far);
            }
            return;
        };
        self.parts(parts, rest, free, so_far, 0);
    }

    fn parts(
        &mut self,
        parts: &[ComponentSet],
        stages: &[Vec<ComponentSet>],
        free: &mut Vec<&'static str>,
        so_far: Found,
        longest: u64,
    ) {
        let Some((&part, rest)) = parts.split_first() else {
            self.stages(stages, free, Found { latency: so_far.latency + longest, ..so_far });
            return;
        };
        for slice in SLICES {
            let Some(place) = free.iter().position(|free| *free == slice) else { continue };
            if let Some((busy, latency)) = self.on(part, slice) {
                let profile = self.node.model().get(self.node.model().profile(slice).unwrap()).unwrap();
                let (compute, memory) = (u32::from(profile.compute_slices), u32::from(profile.memory_slices));
                let taken = free.remove(place);
                let so_far = Found {
                    bottleneck: so_far.bottleneck.max(busy),
                    compute: so_far.compute + compute,
                    memory_slices: so_far.memory_slices + memory,
                    ..so_far
                };
                self.parts(rest, stages, free, so_far, longest.max(latency));
                free.insert(place, taken);
            }
        }
    }
}

fn exhaustive(dag: &Dag, goal: &Goal, node: &Node, free: &[&'static str]) -> Vec<Found> {
    let mut search = Exhaustive { dag, goal, node, found: Vec::new() };
    let nothing = Found { bottleneck: 0, compute: 0, latency: 0, memory_slices: 0 };
    for stages in cuts(dag) {
        if stages.iter().flatten().count() <= free.len() {
            search.stages(&stages, &mut free.to_vec(), nothing);
        }
    }
    search.found
}

/// The best pipeline and its slices, if any fits.
fn planned(dag: &Dag, goal: &Goal, node: &Node) -> Option<Assignment> {
    let best = Partitioner.pipelines(dag, goal, node).unwrap().next()?;
    let assignment = LeastFragmentation.assign(dag, goal, &best, node).unwrap();
    check(dag, goal, node, &best, &assignment);
    Some(assignment)
}

/// Checks the properties of any pipeline with its slices.
fn check(dag: &Dag, goal: &Goal, node: &Node, pipeline: &Pipeline, assignment: &Assignment) {
    let parts: Vec<ComponentSet> = pipeline.parts.iter().map(|part| part.components).collect();
    let all = parts.iter().fold(ComponentSet::EMPTY, |all, part| all.union(*part));
    assert_eq!(
        (all, parts.iter().map(|part| part.len()).sum()),
        (dag.all(), dag.len()),
        "each component once"
    );
    for edge in dag.edges() {
        let stage = |one| pipeline.parts.iter().find(|part| part.components.contains(one)).unwrap().stage;
        assert!(stage(edge.from) <= stage(edge.to), "edges go forward");
    }
    assert_eq!(assignment.slices.len(), parts.len());
    let mut slices = assignment.slices.clone();
    slices.sort();
    slices.dedup();
    assert_eq!(slices.len(), parts.len(), "different slices");
    let exhaustive = Exhaustive { dag, goal, node, found: Vec::new() };
    let mut bottleneck = 0;
    for (part, slice) in parts.iter().zip(&assignment.slices) {
        let gpu = node.gpus().iter().find(|gpu| gpu.gpu == slice.gpu).unwrap();
        assert!(gpu.free.contains(&slice.slice), "a free slice");
        let name = &node.model().get(slice.slice.profile).unwrap().name;
        bottleneck = bottleneck.max(exhaustive.on(*part, name).expect("it fits").0);
    }
    assert_eq!(assignment.bottleneck.as_nanos(), bottleneck);
    assert!(goal.slo.is_none_or(|slo| assignment.latency <= slo));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Bottleneck, then compute slices, then latency, then memory held: the whole key is the optimum's.
    #[test]
    fn the_bottleneck_rank_equals_exhaustive_search((dag, free, slo) in case(10)) {
        let (goal, node) = (goal(slo), node(&free));
        let found = exhaustive(&dag, &goal, &node, &free);
        let best = found.iter().map(|found| found.bottleneck).min();
        let plan = planned(&dag, &goal, &node);
        prop_assert_eq!(plan.is_some(), best.is_some());
        if let (Some(assignment), Some(best)) = (plan, best) {
            let key = |found: &&Found| (found.compute, found.latency, found.memory_slices);
            let optimum = found.iter().filter(|found| found.bottleneck <= best).min_by_key(key).unwrap();
            let held = |of: fn(&gshare_sched::mig::MigProfile) -> u8| -> u32 {
                assignment.slices.iter().map(|slice| u32::from(of(node.model().get(slice.slice.profile).unwrap()))).sum()
            };
            let mine = (held(|p| p.compute_slices), assignment.latency.as_nanos(), held(|p| p.memory_slices));
            prop_assert_eq!(mine, key(&optimum));
            prop_assert_eq!(assignment.bottleneck.as_nanos(), best);
        }
    }

    /// The following entries of the list are the front of bottleneck and compute slices.
    #[test]
    fn the_list_is_the_front_of_bottleneck_and_compute_slices((dag, free, slo) in case(7)) {
        let (goal, node) = (goal(slo), node(&free));
        let found = exhaustive(&dag, &goal, &node, &free);
        let mut expected = Vec::new();
        let mut below = u32::MAX;
        while let Some(best) = found.iter().filter(|f| f.compute < below).min_by_key(|f| (f.bottleneck, f.compute)) {
            expected.push((best.bottleneck, best.compute));
            below = best.compute;
        }
        let list = Partitioner.pipelines(&dag, &goal, &node).unwrap();
        let list: Vec<(u64, u32)> = list
            .map(|pipeline| {
                let run = LeastFragmentation.assign(&dag, &goal, &pipeline, &node).unwrap();
                (run.bottleneck.as_nanos(), run.compute_slices)
            })
            .collect();
        prop_assert_eq!(list, expected);
    }
}

#[test]
fn more_states_than_the_bound_are_refused_by_name() {
    // 60 components on 40 free slices of each of three profiles: 41^3 * 1,830 steps * 3.
    let times: Vec<u64> = (1..=60).collect();
    let draws = vec![[(5, 10, 255), (4, 10, 255), (3, 10, 255)]; 60];
    let dag = on_slices(&chain_of(&times), &draws);
    let free: Vec<&str> = (0..40).flat_map(|_| ["4g.40gb", "2g.20gb", "1g.10gb"]).collect();
    let error = Partitioner.pipelines(&dag, &goal(None), &node(&free)).err().unwrap();
    assert!(error.to_string().ends_with("at most 100000000"), "{error}");
}

#[test]
fn nothing_free_and_nothing_that_fits_are_no_plan() {
    let dag = on_slices(&chain_of(&[1, 2]), &[[(5, 30_000, 255), (4, 30_000, 255), (3, 30_000, 255)]; 2]);
    assert!(planned(&dag, &goal(None), &node(&["1g.10gb", "2g.20gb"])).is_none());
    let none = Node::new(GpuModel::find("A100-80").unwrap(), Vec::new()).unwrap();
    assert!(planned(&dag, &goal(None), &none).is_none());
}

#[test]
fn a_dag_without_edges_is_one_segment_and_a_long_chain_is_cut_within_bounds() {
    let draws = |count| vec![[(5, 10, 255), (4, 10, 255), (3, 10, 255)]; count];
    let (goal, node) = (goal(None), node(&["1g.10gb", "2g.20gb"]));
    let wide = on_slices(&dag_of(&[3; 60], &[]), &draws(60));
    assert_eq!(Partitioner.pipelines(&wide, &goal, &node).unwrap().count(), 2, "whole, on either slice");
    let long = on_slices(&chain_of(&[3; 128]), &draws(128));
    assert!(Partitioner.pipelines(&long, &goal, &node).unwrap().count() > 1);
}
