//! Pipelines: the lazy list by CV, the joint bottleneck search and the assigner, beside a brute force in the same run.
//!
//! Targets: the first result in less than 50 us at n = 20 and 1 ms at n = 60, 10,000 results in less than 5 ms, the bottleneck
//! search in less than 5 ms at n = 20 with 8 free slices of each of three profiles, an assignment to 8 GPUs in less than 100 us.
//! The first result of a list is always the whole on one slice, so the first result with a cut is measured too.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use gshare_core::dag::{Component, Dag};
use gshare_core::{Bytes, Duration};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    Goal, LeastFragmentation, Mode, Node, PartitionConfig, Partitioner, PipelinePartitioner, RankMode,
    SliceAssigner,
};
use std::hint::black_box;

/// Times that look random and have no ties to speak of, in us.
fn time(index: usize) -> u64 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    1_000 + (mixed >> 40) % 20_000
}

fn component(index: usize) -> Component {
    let on = |component: Component, (slice, speed): (&str, u64)| {
        component.with_profile(
            slice,
            1,
            Duration::from_micros(time(index) / speed + 300),
            Bytes::from_mib(1_500),
        )
    };
    let slices = [("1g.10gb", 1), ("2g.20gb", 2), ("4g.40gb", 3)];
    slices.into_iter().fold(Component::new(format!("c{index}")), on)
}

fn dag(n: usize, edges: impl IntoIterator<Item = (usize, usize)>) -> Dag {
    let dag = (0..n).fold(Dag::builder("bench"), |dag, index| dag.component(component(index)));
    let edge = |dag: gshare_core::dag::DagBuilder, (from, to): (usize, usize)| {
        dag.edge(format!("c{from}"), format!("c{to}"), Bytes::from_mib(4))
    };
    edges.into_iter().fold(dag, edge).build().expect("a DAG")
}

fn chain(n: usize) -> Dag {
    dag(n, (1..n).map(|to| (to - 1, to)))
}

/// A source, two chains of ten, a sink: 123 ideals and 1.66e10 chains of them.
fn two_chains() -> Dag {
    let along = |first: usize| (first..first + 9).map(|from| (from, from + 1));
    dag(22, [(0, 1), (0, 11), (10, 21), (20, 21)].into_iter().chain(along(1)).chain(along(11)))
}

fn partitioner(mode: Mode, rank: RankMode) -> Partitioner {
    Partitioner::new(PartitionConfig::default().with_mode(mode).with_rank(rank)).expect("defaults")
}

fn node(each: usize) -> Node {
    let free = ["4g.40gb", "2g.20gb", "1g.10gb"].repeat(each);
    Node::with_free(GpuModel::find("A100-80").expect("known"), &free).expect("slices")
}

/// All 2^(n-1) cuts of a chain with their CVs, sorted: the paper's offline step.
fn brute_force(times: &[u64]) -> Vec<(f64, u32)> {
    let n = times.len();
    let mut all = Vec::with_capacity(1 << (n - 1));
    for cuts in 0u32..1 << (n - 1) {
        let (mut stage, mut stages, mut sum, mut squares) = (0.0, 0.0, 0.0, 0.0);
        for (index, &time) in times.iter().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "the paper's arithmetic")]
            let time = time as f64;
            stage += time;
            if index + 1 == n || cuts >> index & 1 == 1 {
                (stages, sum, squares) = (stages + 1.0, sum + stage, squares + stage * stage);
                stage = 0.0;
            }
        }
        let mean = sum / stages;
        all.push(((squares / stages - mean * mean).max(0.0).sqrt() / mean, cuts));
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.count_ones().cmp(&b.1.count_ones())));
    all
}

fn list(c: &mut Criterion) {
    let goal = Goal::default();
    let mut group = c.benchmark_group("partition");
    for n in [20, 60] {
        let (dag, by_cv) = (chain(n), partitioner(Mode::SeriesCut, RankMode::PaperCv));
        for (name, results) in [("first", 1), ("first cut", 2), ("10,000", 10_000)] {
            group.bench_function(BenchmarkId::new(format!("by CV, {name}"), n), |b| {
                b.iter(|| {
                    by_cv.by_cv(black_box(&dag), &goal).expect("profiles").pipelines.take(results).count()
                });
            });
        }
    }
    for n in [12, 16, 20] {
        let times: Vec<u64> = (0..n).map(time).collect();
        group.bench_function(BenchmarkId::new("brute force, all", n), |b| {
            b.iter(|| brute_force(black_box(&times)));
        });
        let (dag, by_cv) = (chain(n), partitioner(Mode::SeriesCut, RankMode::PaperCv));
        group.bench_function(BenchmarkId::new("by CV, all", n), |b| {
            b.iter(|| by_cv.by_cv(black_box(&dag), &goal).expect("profiles").pipelines.count());
        });
    }
    let dag = two_chains();
    for mode in [Mode::IdealChain, Mode::AcyclicQuotient] {
        let by_cv = partitioner(mode, RankMode::PaperCv);
        group.bench_function(BenchmarkId::new(format!("by CV, {mode}, 10,000"), "two chains of 10"), |b| {
            b.iter(|| by_cv.by_cv(black_box(&dag), &goal).expect("profiles").pipelines.take(10_000).count());
        });
    }
    group.finish();
}

fn bottleneck(c: &mut Criterion) {
    let (goal, node) = (Goal::default(), node(8));
    let mut group = c.benchmark_group("bottleneck");
    let cases = [("chain", chain(20), Mode::SeriesCut), ("two chains of 10", two_chains(), Mode::IdealChain)];
    for (name, dag, mode) in cases {
        let partitioner = partitioner(mode, RankMode::Bottleneck);
        group.bench_function(BenchmarkId::new("8 of each of 3 profiles", name), |b| {
            b.iter(|| partitioner.ranked(black_box(&dag), &goal, &node).expect("bounds").pipelines.next());
        });
    }
    group.finish();
}

fn assign(c: &mut Criterion) {
    let (goal, node, dag) = (Goal::default(), node(8), chain(20));
    let by_cv = partitioner(Mode::SeriesCut, RankMode::PaperCv);
    let all = by_cv.by_cv(&dag, &goal).expect("profiles").pipelines;
    let pipelines: Vec<_> = all.filter(|pipeline| pipeline.stages() == 5).take(64).collect();
    let fits = |pipeline: &gshare_sched::pipeline::Pipeline| {
        LeastFragmentation.assign(&dag, &goal, pipeline, &node).is_ok()
    };
    let pipeline = pipelines.into_iter().find(fits).expect("one of five stages fits");
    c.bench_function("assign/5 stages to 8 GPUs of 3 slices", |b| {
        b.iter(|| LeastFragmentation.assign(&dag, &goal, black_box(&pipeline), &node));
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1))
        .sample_size(10);
    targets = list, bottleneck, assign
}
criterion_main!(benches);
