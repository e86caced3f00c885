//! `gshare engine partition`: one question and one answer a line, since the partitioner and the assigner have no state.

use super::filter;
use crate::commands::print_json;
use anyhow::Context as _;
use gshare_core::dag::Dag;
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    Assignment, Goal, LeastFragmentation, Mode, Node, NodeGpu, Part, PartitionConfig, Partitioner, plan,
};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

/// A line in.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Question {
    /// The DAG to cut.
    dag: Dag,
    /// The goal of the cut.
    #[serde(default)]
    goal: Goal,
    /// Model of the node's GPUs.
    gpu: String,
    /// Its GPUs with their slices.
    #[serde(default)]
    gpus: Option<Vec<NodeGpu>>,
    /// Or free slices by name, on as few GPUs as possible.
    #[serde(default)]
    free: Vec<String>,
}

/// A line out.
#[derive(Serialize, JsonSchema)]
struct Answer {
    /// The components of each slice, by stage.
    parts: Vec<Part>,
    /// Each part's slice, and its run there.
    assignment: Assignment,
    /// The mode of the pipeline's list.
    mode: Mode,
    /// Better-ranked pipelines without room.
    passed_over: usize,
}

fn answer(partitioner: &Partitioner, question: Question) -> anyhow::Result<Option<Answer>> {
    let model = GpuModel::find(&question.gpu).context("gpu")?;
    let names: Vec<&str> = question.free.iter().map(String::as_str).collect();
    let node = match question.gpus {
        Some(gpus) => Node::new(model, gpus).context("gpus")?,
        None => Node::with_free(model, &names).context("free")?,
    };
    let found = plan(partitioner, &LeastFragmentation, &question.dag, &question.goal, &node)?;
    Ok(Some(Answer {
        parts: found.pipeline.parts,
        assignment: found.assignment,
        mode: found.mode,
        passed_over: found.passed_over.len(),
    }))
}

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    if options.wants_schema() {
        return print_json(&serde_json::json!({
            "input": schema_for!(Question),
            "output": schema_for!(filter::Output<Answer>),
            "config": schema_for!(PartitionConfig),
        }));
    }
    let partitioner = Partitioner::new(options.config()?)?;
    let (input, output) = (&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    filter::lines(input, output, |question| answer(&partitioner, question))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dag_in_is_a_plan_out_and_what_cannot_be_is_an_error_with_its_name() {
        let dag = |edges: &str| {
            let one = |name: &str| {
                format!(
                    r#"{{"name":"{name}","profiles":[{{"slice":"1g.10gb","time_ns":1000000,"memory_bytes":6000000000}}]}}"#
                )
            };
            format!(r#"{{"name":"f","components":[{},{}],"edges":[{edges}]}}"#, one("a"), one("b"))
        };
        let edge = |from: &str, to: &str| format!(r#"{{"from":"{from}","to":"{to}","bytes":1000}}"#);
        let line = |dag: String, free: &str| format!(r#"{{"dag":{dag},"gpu":"A100-80","free":[{free}]}}"#);
        let cycle = format!("{},{}", edge("a", "b"), edge("b", "a"));
        let input = [
            line(dag(&edge("a", "b")), r#""1g.10gb","1g.10gb""#),
            line(dag(&cycle), r#""1g.10gb""#),
            line(dag(&edge("a", "b")), r#""1g.6gb""#),
            line(dag(&edge("a", "b")), r#""1g.10gb""#),
        ]
        .join("\n");
        let partitioner = Partitioner::new(PartitionConfig::default()).unwrap();
        let mut output = Vec::new();
        filter::lines(&mut input.as_bytes(), &mut output, |question| answer(&partitioner, question)).unwrap();
        let output = String::from_utf8(output).unwrap();
        let lines: Vec<serde_json::Value> =
            output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["parts"].as_array().unwrap().len(), 2);
        assert_eq!(lines[0]["assignment"]["slices"].as_array().unwrap().len(), 2);
        for (line, text) in [(1, "cycle"), (2, "1g.6gb"), (3, "fits")] {
            assert!(lines[line]["error"].as_str().unwrap().contains(text), "{output}");
        }
    }
}
