//! Slices for a pipeline: against all possible choices, and by example.

use crate::support::*;
use gshare_core::dag::{Component, ComponentSet, Dag};
use gshare_core::{Bytes, Duration, GpuId};
use gshare_sched::mig::{GpuModel, SliceAt};
use gshare_sched::pipeline::{
    Goal, HandOff, LeastFragmentation, Node, NodeGpu, Part, Partitioner, Pipeline, Unfit,
};
use proptest::prelude::*;

const SLICES: [&str; 3] = ["1g.10gb", "2g.20gb", "4g.40gb"];

fn model() -> GpuModel {
    GpuModel::find("A100-80").unwrap()
}

fn at(name: &str, start: u8) -> SliceAt {
    SliceAt { start, profile: model().profile(name).unwrap() }
}

fn gpu(id: u32, free: &[SliceAt], busy: &[SliceAt]) -> NodeGpu {
    NodeGpu { gpu: GpuId::new(id), free: free.to_vec(), busy: busy.to_vec() }
}

fn node(gpus: Vec<NodeGpu>) -> Node {
    Node::new(model(), gpus).unwrap()
}

/// A chain of components with these milliseconds on a `1g`, half on a `2g`, a quarter on a `4g`, and these GiB.
fn chain(needs: &[(u64, u64)]) -> Dag {
    let mut builder = Dag::builder("chain");
    for (index, &(ms, gib)) in needs.iter().enumerate() {
        let on = |component: Component, (slice, speed): (&&str, u64)| {
            component.with_profile(*slice, 1, Duration::from_micros(ms * 1_000 / speed), Bytes::from_gib(gib))
        };
        builder =
            builder.component(SLICES.iter().zip([1, 2, 4]).fold(Component::new(format!("c{index}")), on));
        if index > 0 {
            builder = builder.edge(format!("c{}", index - 1), format!("c{index}"), Bytes::ZERO);
        }
    }
    builder.build().unwrap()
}

/// Every component a stage of its own.
fn apart(dag: &Dag) -> Pipeline {
    let part = |(stage, one): (u32, usize)| Part { stage, components: ComponentSet::one(one), slice: None };
    let parts = (0..).zip(0..dag.len()).map(part).collect();
    Pipeline::new(parts)
}

fn goal() -> Goal {
    Goal::default().with_hand_off(HandOff::FREE)
}

/// Least (latency, memory left over) over all choices of profiles.
fn cheapest(dag: &Dag, stages: usize, free: &mut Vec<&'static str>) -> Option<(u64, u64)> {
    let Some(stage) = dag.len().checked_sub(stages).filter(|_| stages > 0) else { return Some((0, 0)) };
    let choices = SLICES.iter().filter_map(|slice| {
        let place = free.iter().position(|free| free == slice)?;
        let room = model().get(model().profile(slice).unwrap()).unwrap().memory.get();
        let profile = dag.components()[stage].profile(slice, 1)?;
        let left = room.checked_sub(profile.memory.get() + Bytes::from_gib(1).get())?;
        let taken = free.remove(place);
        let rest = cheapest(dag, stages - 1, free);
        free.insert(place, taken);
        rest.map(|rest| (rest.0 + profile.time.as_nanos(), rest.1 + left))
    });
    choices.min()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn latency_and_then_memory_left_over_are_the_least_of_all_choices(
        needs in prop::collection::vec((1..50u64, 1..40u64), 1..=6),
        free in prop::collection::vec(prop::sample::select(&SLICES[..]), 1..=8),
    ) {
        let dag = chain(&needs);
        let node = Node::with_free(model(), &free).unwrap();
        let found = LeastFragmentation.assign(&dag, &goal(), &apart(&dag), &node);
        let expected = cheapest(&dag, dag.len(), &mut free.clone());
        let found = found.ok().map(|found| (found.latency.as_nanos(), found.waste.get()));
        prop_assert_eq!(found, expected);
    }

    /// Everything an answer must be, on many GPUs, some slices in use.
    #[test]
    fn an_answer_uses_slices_that_are_free(
        needs in prop::collection::vec((1..50u64, 1..30u64), 1..=6),
        gpus in prop::collection::vec((prop::collection::vec(prop::sample::select(&SLICES[..]), 1..=7), any::<u16>()), 1..=12),
    ) {
        let dag = chain(&needs);
        let model = model();
        let cut = |(id, (names, busy)): (u32, &(Vec<&str>, u16))| {
            let profiles: Vec<_> = names.iter().map(|name| model.profile(name).unwrap()).collect();
            let layout = (0..=profiles.len()).rev().find_map(|count| model.arrange(&profiles[..count])).unwrap();
            let (busy, free): (Vec<_>, Vec<_>) = layout.iter().enumerate().partition(|(bit, _)| busy >> bit & 1 == 1);
            let slices = |some: Vec<(usize, &SliceAt)>| -> Vec<SliceAt> { some.into_iter().map(|(_, slice)| *slice).collect() };
            gpu(id, &slices(free), &slices(busy))
        };
        let node = node((0..).zip(&gpus).map(cut).collect());
        let Ok(found) = LeastFragmentation.assign(&dag, &goal(), &apart(&dag), &node) else { return Ok(()) };
        prop_assert_eq!(found.slices.len(), needs.len());
        let mut on_gpus: std::collections::BTreeMap<GpuId, Vec<SliceAt>> = std::collections::BTreeMap::new();
        for slice in &found.slices {
            let gpu = node.gpus().iter().find(|gpu| gpu.gpu == slice.gpu).unwrap();
            prop_assert!(gpu.free.contains(&slice.slice));
            on_gpus.entry(slice.gpu).or_insert_with(|| gpu.busy.clone()).push(slice.slice);
        }
        for slices in on_gpus.values() {
            prop_assert!(model.validate(slices).is_ok(), "they lie beside the slices in use, each once");
        }
        prop_assert_eq!(found.gpus as usize, on_gpus.len());
    }
}

#[test]
fn fewest_gpus_and_then_the_one_in_use_so_that_the_idle_one_stays_whole() {
    let dag = chain(&[(10, 2)]);
    let spare = || gpu(0, &[at("1g.10gb", 4), at("4g.40gb", 0)], &[]);
    let in_use = || gpu(1, &[at("1g.10gb", 6)], &[at("4g.40gb", 0), at("2g.20gb", 4)]);
    let one_g = goal().with_slo(Duration::from_millis(100));
    let found = |gpus: Vec<NodeGpu>, dag: &Dag| {
        LeastFragmentation.assign(dag, &one_g, &apart(dag), &node(gpus)).unwrap()
    };
    // Planned for a `1g`: the slice beside slices in use breaks nothing up.
    let mut pipeline = apart(&dag);
    pipeline.parts[0].slice = Some(model().profile("1g.10gb").unwrap());
    let taken = LeastFragmentation.assign(&dag, &one_g, &pipeline, &node(vec![spare(), in_use()])).unwrap();
    assert_eq!((taken.slices[0].gpu, taken.fragmentation <= 0), (GpuId::new(1), true));
    // Two stages on one GPU rather than on two.
    let two = chain(&[(10, 2), (10, 2)]);
    let both = found(
        vec![gpu(0, &[at("2g.20gb", 0)], &[]), gpu(1, &[at("2g.20gb", 0), at("2g.20gb", 2)], &[])],
        &two,
    );
    assert_eq!((both.gpus, both.slices[0].gpu, both.slices[1].gpu), (1, GpuId::new(1), GpuId::new(1)));
}

/// FluidFaaS, Figure 4: an instance that needs a `4g.40gb` runs on `3g.40gb` and `1g.10gb`, of different GPUs too.
#[test]
fn what_fits_no_slice_runs_as_a_pipeline_over_two_gpus() {
    let on = |name: &str, gib| {
        Component::new(name)
            .with_profile("1g.10gb", 1, Duration::from_millis(40), Bytes::from_gib(gib))
            .with_profile("3g.40gb", 1, Duration::from_millis(20), Bytes::from_gib(gib))
    };
    let dag = Dag::builder("figure 4").component(on("a", 6)).component(on("b", 36)).edge("a", "b", Bytes(1));
    let dag = dag.build().unwrap();
    let node = node(vec![gpu(1, &[at("1g.10gb", 6)], &[]), gpu(2, &[at("3g.40gb", 4)], &[])]);
    let goal = Goal::default();
    let pipeline = Partitioner.pipelines(&dag, &goal, &node).unwrap().next().unwrap();
    let found = LeastFragmentation.assign(&dag, &goal, &pipeline, &node).unwrap();
    let slices: Vec<_> = found.slices.iter().map(|slice| (slice.gpu, slice.slice)).collect();
    assert_eq!(slices, [(GpuId::new(1), at("1g.10gb", 6)), (GpuId::new(2), at("3g.40gb", 4))]);
    assert_eq!(found.gpus, 2);
    let whole = Pipeline::new(vec![Part { stage: 0, components: dag.all(), slice: None }]);
    let why = LeastFragmentation.assign(&dag, &goal, &whole, &node).unwrap_err();
    assert_eq!(why.to_string(), "stage 1 fits no free slice: needs 43 GiB, the largest has 39.2 GiB");
}

#[test]
fn why_a_pipeline_does_not_fit_is_said() {
    let node = node(vec![gpu(0, &[at("1g.10gb", 0)], &[])]);
    let why = |dag: &Dag, goal: &Goal| LeastFragmentation.assign(dag, goal, &apart(dag), &node).unwrap_err();
    let two = chain(&[(10, 2), (10, 2)]);
    assert_eq!(why(&two, &goal()).to_string(), "needs 2 slices, 1 are free");
    let large = chain(&[(10, 30)]);
    assert_eq!(
        why(&large, &goal()).to_string(),
        "stage 1 fits no free slice: needs 31 GiB, the largest has 9.6 GiB"
    );
    let slow = why(&chain(&[(10, 2)]), &goal().with_slo(Duration::from_millis(4)));
    assert_eq!(slow.to_string(), "latency 10ms is above the SLO of 4ms");
    let batch = why(&chain(&[(10, 2)]), &goal().with_batch(8));
    assert_eq!(
        batch.to_string(),
        "stage 1 fits no free slice: component `c0` has no profile for 1g.10gb, batch 8"
    );
    let none = Node::new(model(), Vec::new()).unwrap();
    let empty = LeastFragmentation.assign(&large, &goal(), &apart(&large), &none).unwrap_err();
    assert_eq!(empty.to_string(), "stage 1 fits no free slice: none is free");
    let one_large = Node::with_free(model(), &["4g.40gb", "1g.10gb"]).unwrap();
    let both = chain(&[(10, 30), (10, 30)]);
    assert_eq!(LeastFragmentation.assign(&both, &goal(), &apart(&both), &one_large), Err(Unfit::NotTogether));
}

#[test]
fn a_spread_fork_takes_as_long_as_its_longest_branch() {
    // 0 -> (1 | 2) -> 3 of 10, 20, 30, 40 ms, each on a `1g`, no hand-offs: 10 + 30 + 40.
    let mut builder = Dag::builder("diamond");
    for one in 0..4u64 {
        let time = Duration::from_millis(10 * (one + 1));
        builder =
            builder.component(Component::new(format!("c{one}")).with_profile("1g.10gb", 1, time, Bytes(1)));
    }
    for (from, to) in [(0, 1), (0, 2), (1, 3), (2, 3)] {
        builder = builder.edge(format!("c{from}"), format!("c{to}"), Bytes::ZERO);
    }
    let dag = builder.build().unwrap();
    let node = Node::with_free(model(), &["1g.10gb"; 4]).unwrap();
    let latency =
        |pipeline: &Pipeline| LeastFragmentation.assign(&dag, &goal(), pipeline, &node).unwrap().latency;
    let line = apart(&dag);
    assert_eq!(latency(&line), Duration::from_millis(100));
    let mut fork = line.clone();
    (fork.parts[2].stage, fork.parts[3].stage) = (1, 2);
    assert_eq!((fork.stages(), latency(&fork)), (3, Duration::from_millis(80)));
}

#[test]
fn hand_offs_occupy_both_slices_and_count_in_full() {
    let dag = dag_of(&[100, 200], &[(0, 1, 50)]);
    let node = Node::with_free(model(), &["1g.10gb"; 2]).unwrap();
    let goal = Goal::default().with_hand_off(ONE_PER_BYTE);
    let found = LeastFragmentation.assign(&dag, &goal, &apart(&dag), &node).unwrap();
    assert_eq!((found.bottleneck.as_nanos(), found.latency.as_nanos()), (251, 402));
}
