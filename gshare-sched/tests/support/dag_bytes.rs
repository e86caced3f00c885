//! Any bytes are a DAG, or a caller's mistaken idea of one: refused by name, or cut in every mode within bounds. Shared by the fuzz target
//! and the test that replays its regressions.

use gshare_core::dag::{Component, ComponentSet, Dag, MAX_COMPONENTS};
use gshare_core::{BasisPoints, Bytes, Duration};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    Balance, Goal, LeastFragmentation, Mode, Node, PartitionConfig, Partitioner, RankMode,
};

/// Text that begins with a brace is JSON; other bytes are read as numbers of components, edges and profiles.
pub(crate) fn run_bytes(bytes: &[u8]) {
    let dag = match bytes.first() {
        Some(b'{') => serde_json::from_slice(bytes).ok(),
        Some(_) => build(bytes),
        None => None,
    };
    if let Some(dag) = dag {
        check(&dag);
    }
}

/// A DAG from bytes; edges may go anywhere, numbers may be anything.
fn build(bytes: &[u8]) -> Option<Dag> {
    let (&[count, shape], rest) = bytes.split_first_chunk::<2>()?;
    let count = usize::from(count) % 40;
    let mut rest = rest.iter().copied();
    let mut byte = || rest.next();
    let mut dag = Dag::builder("fuzz");
    for index in 0..count {
        let mut component = Component::new(format!("c{index}"));
        for slice in ["1g.10gb", "2g.20gb", "4g.40gb", "no.such"] {
            let (time, memory) = (u64::from(byte().unwrap_or(7)), u64::from(byte().unwrap_or(3)));
            // Some far outside of the valid range.
            let time = if time > 250 { u64::MAX >> (time & 3) } else { time * 1_000_000 };
            let memory = if memory > 250 { u64::MAX >> (memory & 7) } else { memory << 27 };
            if shape & 1 == 0 || time % 5 != 0 {
                component = component.with_profile(slice, 1, Duration::from_nanos(time), Bytes(memory));
            }
        }
        if shape & 2 != 0 && index % 3 == 1 {
            component = component.with_runs(BasisPoints::new(u16::from(byte().unwrap_or(0)) * 39)?);
        }
        dag = dag.component(component);
    }
    while let (Some(from), Some(to)) = (byte(), byte()) {
        let (mut from, mut to) = (usize::from(from) % count.max(1), usize::from(to) % count.max(1));
        if shape & 4 != 0 && from > to {
            (from, to) = (to, from);
        }
        dag = dag.edge(format!("c{from}"), format!("c{to}"), Bytes(1 << (shape >> 3 & 31)));
    }
    dag.build().ok()
}

/// Cuts it in every mode and by both ranks, and checks the first results.
fn check(dag: &Dag) {
    assert!(dag.len() <= MAX_COMPONENTS);
    let model = GpuModel::find("A100-80").unwrap_or_else(|error| panic!("{error}"));
    let free = ["4g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"];
    let node = Node::with_free(model, &free).unwrap_or_else(|error| panic!("{error}"));
    let goal = Goal::default();
    for mode in [Mode::SeriesCut, Mode::IdealChain, Mode::AcyclicQuotient] {
        for rank in [RankMode::PaperCv, RankMode::Bottleneck] {
            let mut config = PartitionConfig::default().with_mode(mode).with_rank(rank);
            // Small bounds: what matters is that they hold.
            config.max_ideals = 80;
            let partitioner = Partitioner::new(config).unwrap_or_else(|error| panic!("{error}"));
            let Ok(ranked) = partitioner.ranked(dag, &goal, &node) else { continue };
            let mut last = None;
            for pipeline in ranked.pipelines.take(30) {
                let parts = || pipeline.parts.iter().map(|part| part.components);
                let all = parts().fold(ComponentSet::EMPTY, ComponentSet::union);
                assert_eq!(all, dag.all(), "every component has a part");
                assert_eq!(parts().map(ComponentSet::len).sum::<usize>(), dag.len(), "and only one");
                for edge in dag.edges() {
                    let stage = |one: usize| {
                        let of = pipeline.parts.iter().find(|part| part.components.contains(one));
                        of.map(|part| part.stage)
                    };
                    assert!(stage(edge.from) <= stage(edge.to), "edges go forward");
                }
                if rank == RankMode::PaperCv {
                    let now = pipeline.balance;
                    let after = |last: Balance| last.cmp_cv(&now).then(last.stages.cmp(&now.stages)).is_le();
                    assert!(last.is_none_or(after), "in order");
                    last = Some(pipeline.balance);
                }
                if let Ok(assignment) = LeastFragmentation.assign(dag, &goal, &pipeline, &node) {
                    assert_eq!(assignment.slices.len(), pipeline.parts.len());
                }
            }
        }
    }
}
