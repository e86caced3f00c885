//! Cuts by the coefficient of variation of the stages' times (FluidFaaS, section 5.2.2).
//!
//! The function as a whole comes first. Then its cuts are tried, the least coefficient first, until one has slices. On one reference
//! slice the stages' times add up to the same total `T` for every cut, so of `k` stages with the sum `S` of the squares of their times the
//! coefficient is `sqrt(k*S / T² - 1)`. Equal coefficients go by fewer stages, less hand-off, then the cuts; cuts with equal coefficients and
//! stages go by latency, then memory left over, GPUs and fragmentation on their slices.
//!
//! The paper names no reference slice. Here it is the first profile that all components have. The applications are chains, one of them
//! with a way around a component, so each two neighbours may be cut apart.

use gshare_core::FunctionId;
use gshare_core::dag::{ComponentSet, Dag};
use gshare_sched::pipeline::{Goal, Home, LeastFragmentation, Node, Part, Partitioner, Pipeline, Place};

/// The paper's rank.
#[derive(Debug)]
pub(super) struct PaperRank;

/// The order of a cut: `k*S`, which the coefficient grows with, stages, hand-offs, and the end of each stage.
type Rank = (u128, usize, u64, Vec<usize>);

/// All cuts of a chain, the best first; none where no slice's profile is common to all components.
fn ranked(dag: &Dag, goal: &Goal) -> Option<Vec<(Rank, Pipeline)>> {
    let components = dag.components();
    let times = components[0].profiles.iter().filter(|on| on.batch == goal.batch).find_map(|on| {
        let time = |one: &gshare_core::dag::Component| {
            Some(one.expected(one.profile(&on.slice, goal.batch)?.time).as_nanos())
        };
        components.iter().map(time).collect::<Option<Vec<u64>>>()
    })?;
    let cut = |cuts: u32| {
        let ends = (1..=dag.len()).filter(|&end| end == dag.len() || cuts >> (end - 1) & 1 == 1);
        let ends: Vec<usize> = ends.collect();
        let begins = || [0].iter().chain(&ends);
        let squares = begins()
            .zip(&ends)
            .map(|(&begin, &end)| u128::from(times[begin..end].iter().sum::<u64>()).pow(2));
        let rank = ends.len() as u128 * squares.sum::<u128>();
        let stage = |one: usize| ends.iter().position(|&end| one < end);
        let apart = dag.edges().iter().filter(|edge| stage(edge.from) != stage(edge.to));
        let hands = apart.map(|edge| goal.hand_off.time(edge.bytes).as_nanos()).sum();
        let parts = (0..).zip(begins().zip(&ends)).map(|(stage, (&begin, &end))| {
            let components: ComponentSet = (begin..end).collect();
            Part { stage, components, slice: None }
        });
        let pipeline = Pipeline::new(parts.collect());
        ((rank, ends.len(), hands, ends), pipeline)
    };
    let mut all: Vec<_> = (0..1 << (dag.len() - 1)).map(cut).collect();
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    Some(all)
}

impl Place for PaperRank {
    fn find(&self, function: FunctionId, dag: &Dag, goal: &Goal, node: &Node, cut: bool) -> Option<Home> {
        let whole = Partitioner.find(function, dag, goal, node, false);
        if whole.is_some() || !cut {
            return whole;
        }
        let fits = ranked(dag, goal)?.into_iter().filter_map(|(rank, pipeline)| {
            let assignment = LeastFragmentation.assign(dag, goal, &pipeline, node).ok()?;
            Some(((rank.0, rank.1), pipeline, assignment))
        });
        let mut fits = fits.peekable();
        let best = fits.peek()?.0;
        let equal = fits.take_while(|(rank, ..)| *rank == best);
        let (_, pipeline, assignment) =
            equal.min_by_key(|(.., a)| (a.latency, a.waste, a.gpus, a.fragmentation))?;
        Some(Home::of(&pipeline, &assignment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::dag::Component;
    use gshare_core::{Bytes, Duration};

    fn chain(times: &[u64], bytes: &[u64]) -> Dag {
        let mut dag = Dag::builder("chain");
        for (one, &ns) in times.iter().enumerate() {
            let time = Duration::from_nanos(ns);
            let component = Component::new(format!("c{one}"));
            dag = dag.component(component.with_profile("1g.10gb", 1, time, Bytes::from_mib(100)));
        }
        for (one, &bytes) in bytes.iter().enumerate() {
            dag = dag.edge(format!("c{one}"), format!("c{}", one + 1), Bytes(bytes));
        }
        dag.build().unwrap()
    }

    fn listed(times: &[u64], bytes: &[u64]) -> Vec<String> {
        let all = ranked(&chain(times, bytes), &Goal::default()).unwrap();
        let stage = |part: &Part| part.components.iter().map(|one| times[one]).sum::<u64>().to_string();
        all.iter().map(|(_, of)| of.parts.iter().map(stage).collect::<Vec<_>>().join("|")).collect()
    }

    #[test]
    fn the_least_coefficient_comes_first_and_fewer_stages_before_more() {
        let list = listed(&[2, 3, 4, 1], &[0, 0, 0]);
        assert_eq!(list, ["10", "5|5", "2|3|5", "2|3|4|1", "5|4|1", "2|8", "2|7|1", "9|1"]);
        // FluidFaaS, section 5.2.2: a sequence of five models has 2^4 partitions.
        assert_eq!(listed(&[1, 2, 3, 4, 5], &[0, 0, 0, 0]).len(), 16);
    }

    #[test]
    fn hand_offs_break_ties_before_the_cuts_do() {
        // In three stages of 1, 1 and 2, the cut that keeps the fat edge inside a stage comes first.
        let three = |bytes: &[u64]| listed(&[1; 4], bytes).into_iter().find(|cut| cut.len() == 5);
        assert_eq!(three(&[0, 1 << 30, 0]).unwrap(), "1|2|1");
        assert_eq!(three(&[0, 0, 0]).unwrap(), "1|1|2");
    }
}
