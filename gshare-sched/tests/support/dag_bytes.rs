//! Any bytes are a DAG, or a caller's mistaken idea of one: refused by name, or cut within bounds. Shared by the fuzz target
//! and the test that replays its regressions.

use gshare_core::dag::{Component, ComponentSet, Dag, MAX_COMPONENTS};
use gshare_core::{BasisPoints, Bytes, Duration};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{Goal, LeastFragmentation, Node, Partitioner};

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

/// Cuts it, and checks the first results.
fn check(dag: &Dag) {
    assert!(dag.len() <= MAX_COMPONENTS);
    let model = GpuModel::find("A100-80").unwrap_or_else(|error| panic!("{error}"));
    let free = ["4g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"];
    let node = Node::with_free(model, &free).unwrap_or_else(|error| panic!("{error}"));
    let goal = Goal::default();
    let Ok(pipelines) = Partitioner.pipelines(dag, &goal, &node) else { return };
    for pipeline in pipelines.take(30) {
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
        let assignment = LeastFragmentation.assign(dag, &goal, &pipeline, &node);
        assert_eq!(assignment.map(|of| of.slices.len()), Ok(pipeline.parts.len()), "it fits");
    }
}
