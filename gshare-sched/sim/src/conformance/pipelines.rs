//! Whether a partitioner and an assigner of pipelines keep the contracts of [`PipelinePartitioner`] and [`SliceAssigner`], on
//! random DAGs of up to six components and random free slices.

use super::story::{Broken, Log, claim};
use crate::rng::Rng;
use crate::story::Story;
use core::ops::Range;
use gshare_core::dag::{Component, ComponentSet, Dag};
use gshare_core::{BasisPoints, Bytes, Duration, GpuId};
use gshare_sched::mig::{GpuModel, SliceAt};
use gshare_sched::pipeline::{Assignment, Goal, Node, Part, Pipeline, PipelinePartitioner, SliceAssigner};
use std::collections::BTreeSet;

const SLICES: [&str; 3] = ["1g.10gb", "2g.20gb", "4g.40gb"];
/// The suite reads a list of pipelines this far; six components have fewer in every mode.
const LONGEST: usize = 20_000;
/// The number of best pipelines in a list for which the suite asks slices.
const ASSIGNED: usize = 20;

/// Runs the suite over a partitioner and an assigner.
///
/// # Errors
/// The first broken claim.
pub fn pipelines(
    partitioner: &dyn PipelinePartitioner,
    assigner: &dyn SliceAssigner,
    seeds: Range<u64>,
) -> Result<(), Story> {
    for seed in seeds {
        let log = Log::default();
        run(partitioner, assigner, seed, &log).map_err(|broken| log.story(seed, broken))?;
    }
    Ok(())
}

fn random_dag(rng: &mut Rng) -> Result<Dag, String> {
    let components = rng.between(1, 6);
    let mut dag = Dag::builder("random");
    for index in 0..components {
        let (time, gib) = (rng.between(1_000, 60_000), rng.between(1, 8));
        let runs = if rng.percent(80) { 10_000 } else { 5_000 };
        let mut component =
            Component::new(format!("c{index}")).with_runs(BasisPoints::new(runs).unwrap_or_default());
        for (slice, speed) in SLICES.iter().zip([1, 2, 4]) {
            component =
                component.with_profile(*slice, 1, Duration::from_micros(time / speed), Bytes::from_gib(gib));
        }
        dag = dag.component(component);
    }
    for to in 1..components {
        // Each component has an edge from some component before it, and perhaps another edge.
        let first = rng.below(to);
        for from in 0..to {
            if from == first || rng.percent(20) {
                dag = dag.edge(format!("c{from}"), format!("c{to}"), Bytes::from_mib(rng.below(50)));
            }
        }
    }
    dag.build().map_err(|error| error.to_string())
}

fn run(
    partitioner: &dyn PipelinePartitioner,
    assigner: &dyn SliceAssigner,
    seed: u64,
    log: &Log,
) -> Result<(), Broken> {
    let input = |wrong: String| ("the suite's own input is sound", wrong);
    let mut rng = Rng::new(seed);
    let dag = random_dag(&mut rng).map_err(input)?;
    let model = GpuModel::find("A100-80").map_err(|error| input(error.to_string()))?;
    let free: Vec<&str> = (0..rng.between(1, 8)).filter_map(|_| rng.pick(&SLICES).copied()).collect();
    let node = Node::with_free(model, &free).map_err(|error| input(error.to_string()))?;
    let slo = rng.percent(70).then(|| Duration::from_millis(rng.between(10, 300)));
    let goal = slo.map_or_else(Goal::default, |slo| Goal::default().with_slo(slo));
    log.note(&"the start", &format!("{dag:?} for {goal:?} on {free:?}"));
    let list = || match partitioner.ranked(&dag, &goal, &node) {
        Ok(ranked) => ranked.pipelines.take(LONGEST).collect(),
        Err(_) => Vec::new(),
    };
    let pipelines: Vec<Pipeline> = list();
    claim(pipelines.len() < LONGEST, "the list of pipelines is finite", || format!("{LONGEST} were read"))?;
    claim(pipelines == list(), "equal calls give equal lists", || "the second list differs".into())?;
    let mut seen = BTreeSet::new();
    for (number, pipeline) in pipelines.iter().enumerate() {
        log.note(&format!("pipeline {number}"), &format!("{:?}", pipeline.parts));
        let key: Vec<_> =
            pipeline.parts.iter().map(|part| (part.stage, part.components.0, part.slice)).collect();
        claim(seen.insert(key), "no pipeline is in the list twice", || format!("{:?}", pipeline.parts))?;
        covers(&dag, &pipeline.parts)?;
    }
    for (number, pipeline) in pipelines.iter().take(ASSIGNED).enumerate() {
        let answer = assigner.assign(&dag, &goal, pipeline, &node);
        log.note(&format!("assignment {number}"), &format!("{:?} -> {answer:?}", pipeline.parts));
        let again = assigner.assign(&dag, &goal, pipeline, &node);
        claim(answer == again, "equal calls give equal answers", || format!("{again:?}"))?;
        if let Ok(assignment) = answer {
            sound(&dag, &goal, pipeline, &node, &assignment)?;
        }
    }
    Ok(())
}

fn covers(dag: &Dag, parts: &[Part]) -> Result<(), Broken> {
    let sum: usize = parts.iter().map(|part| part.components.len()).sum();
    let all = parts.iter().fold(ComponentSet::EMPTY, |all, part| all.union(part.components));
    claim(sum == dag.len() && all == dag.all(), "every component is in exactly one part", || {
        format!("{parts:?}")
    })?;
    let stage = |one: usize| parts.iter().find(|part| part.components.contains(one)).map(|part| part.stage);
    let back = dag.edges().iter().find(|edge| stage(edge.from) > stage(edge.to));
    claim(back.is_none(), "stages are in an order in which every edge goes forward", || format!("{back:?}"))
}

fn sound(dag: &Dag, goal: &Goal, pipeline: &Pipeline, node: &Node, found: &Assignment) -> Result<(), Broken> {
    let each = found.slices.len() == pipeline.parts.len();
    claim(each, "each part has a slice", || format!("{} for {}", found.slices.len(), pipeline.parts.len()))?;
    let mut taken: BTreeSet<(GpuId, SliceAt)> = BTreeSet::new();
    for (part, slice) in pipeline.parts.iter().zip(&found.slices) {
        let at = node.gpus().iter().find(|gpu| gpu.gpu == slice.gpu);
        let free = at.is_some_and(|gpu| gpu.free.contains(&slice.slice));
        claim(free, "slices are free", || format!("{slice:?}"))?;
        claim(taken.insert((slice.gpu, slice.slice)), "parts are on different slices", || {
            format!("{slice:?}")
        })?;
        let profile = node.model().get(slice.slice.profile);
        let memory = |one: usize| {
            let profiled =
                profile.and_then(|profile| dag.components()[one].profile(&profile.name, goal.batch));
            profiled.map(|profiled| profiled.memory.get())
        };
        let needed: Option<u64> = part.components.iter().map(memory).sum();
        let room = profile.map_or(0, |profile| profile.memory.get());
        let fits = needed.is_some_and(|needed| needed + goal.runtime_memory.get() <= room);
        claim(fits, "parts fit their slices", || format!("{needed:?} bytes and the run-time's in {room}"))?;
    }
    let kept = goal.slo.is_none_or(|slo| found.latency <= slo);
    claim(kept, "the latency is within the SLO", || format!("{} of {:?}", found.latency, goal.slo))
}
