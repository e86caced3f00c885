//! `gshare lab partition`: cuts a DAG into a pipeline for the free slices.

use super::{print_json, read_file};
use anyhow::Context as _;
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::{Bytes, Duration};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    Assignment, Goal, HandOff, LeastFragmentation, Node, Part, Partitioner, Pipeline, Unfit,
};
use serde::Serialize;
use std::path::PathBuf;

/// The largest file to read: far above 128 components with all their profiles.
const MAX_FILE: u64 = 64 << 20;

/// Cut a function's DAG into stages and put them on free MIG slices.
///
/// Prints the pipeline with the shortest bottleneck on the free slices, and alternatives with fewer compute slices.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare lab partition --free 1g.10gb,1g.10gb,2g.20gb --slo 300ms dag.toml
  gshare lab partition --free 3g.40gb,2g.20gb --json dag.json")]
pub(crate) struct Options {
    /// The DAG: components with profiles, and edges, as JSON or TOML.
    #[arg(value_name = "DAG")]
    dag: PathBuf,
    /// Free slices by profile name; each goes to the first GPU with a place for it.
    #[arg(long, value_name = "PROFILES", value_delimiter = ',', required = true)]
    free: Vec<String>,
    /// GPU model of these profiles.
    #[arg(long, value_name = "MODEL", default_value = "A100-80")]
    gpu: String,
    /// Batch size, as in the profiles.
    #[arg(long, default_value_t = 1)]
    batch: u32,
    /// Highest latency of a pipeline, such as `250ms`.
    #[arg(long, value_name = "TIME")]
    slo: Option<Duration>,
    /// Memory of the run-time on every slice.
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    runtime_memory: Bytes,
    /// Bytes per second between a slice and host memory.
    #[arg(long, value_name = "BYTES", default_value = "10GB")]
    hand_off_rate: Bytes,
    /// Additional time of each hand-off, independent of its size.
    #[arg(long, value_name = "TIME", default_value = "100us")]
    hand_off_time: Duration,
    /// Most alternatives; at most 1000.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(..=1_000))]
    top: u16,
    #[expect(clippy::doc_markdown, reason = "the text of --help, where backticks would show")]
    /// Print one JSON object: {"dag", "gpu", "free", "chosen", "passed_over", "alternatives"}; a pipeline is {"stages":
    /// [[{"components", "slice"}]], "bottleneck_ns", "latency_ns", "compute_slices", "waste_bytes", "gpus"}. Where none fits,
    /// "passed_over" has the whole function and each component by itself, with "why" these do not fit.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    dag: String,
    gpu: String,
    free: Vec<String>,
    chosen: Option<Shown>,
    passed_over: Vec<Shown>,
    alternatives: Vec<Shown>,
}

/// A pipeline, and its run or the reason against it.
#[derive(Debug, Serialize)]
struct Shown {
    stages: Vec<Vec<ShownPart>>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    runs: Option<Runs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Debug, Serialize)]
struct ShownPart {
    components: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slice: Option<String>,
}

#[derive(Debug, Serialize)]
struct Runs {
    bottleneck_ns: Duration,
    latency_ns: Duration,
    compute_slices: u32,
    waste_bytes: Bytes,
    gpus: u32,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let dag: Dag = read_file(&options.dag, MAX_FILE)?;
    let free: Vec<&str> = options.free.iter().map(String::as_str).collect();
    let node = Node::with_free(GpuModel::find(&options.gpu)?, &free).context("--free")?;
    let mut goal =
        Goal::default().with_batch(options.batch).with_runtime_memory(options.runtime_memory).with_hand_off(
            HandOff { fixed: options.hand_off_time, bytes_per_second: options.hand_off_rate.get() },
        );
    goal.slo = options.slo;
    for component in dag.components() {
        let known = component.profiles.iter().any(|profile| profile.batch == goal.batch);
        anyhow::ensure!(
            known || goal.batch == 0,
            "component `{}` has no profile with batch {}",
            component.name,
            goal.batch
        );
    }
    let report = report(options, &dag, &goal, &node)?;
    if options.json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    anyhow::ensure!(report.chosen.is_some(), "no pipeline fits the free slices");
    Ok(())
}

fn report(options: &Options, dag: &Dag, goal: &Goal, node: &Node) -> anyhow::Result<Report> {
    let fits = |pipeline: Pipeline| {
        let runs = LeastFragmentation.assign(dag, goal, &pipeline, node).ok()?;
        Some(shown(dag, node, &pipeline, Ok(&runs)))
    };
    let mut pipelines = Partitioner.pipelines(dag, goal, node)?.filter_map(fits);
    let chosen = pipelines.next();
    let mut report = Report {
        dag: dag.name().to_owned(),
        gpu: node.model().name.clone().into_owned(),
        free: options.free.clone(),
        passed_over: Vec::new(),
        alternatives: pipelines.take(usize::from(options.top)).collect(),
        chosen,
    };
    if report.chosen.is_none() {
        let part = |(stage, components)| Part { stage, components, slice: None };
        let whole = vec![part((0, dag.all()))];
        let apart = (0..).zip((0..dag.len()).map(ComponentSet::one)).map(part).collect();
        report.passed_over.extend([whole, apart].into_iter().filter_map(|parts| {
            let pipeline = Pipeline::new(parts);
            let why = LeastFragmentation.assign(dag, goal, &pipeline, node).err()?;
            Some(shown(dag, node, &pipeline, Err(&why)))
        }));
    }
    Ok(report)
}

fn shown(dag: &Dag, node: &Node, pipeline: &Pipeline, runs: Result<&Assignment, &Unfit>) -> Shown {
    let slice = |place: usize| {
        let slice = runs.ok()?.slices.get(place)?;
        let name = &node.model().get(slice.slice.profile)?.name;
        Some(format!("{}/{name}@{}", slice.gpu, slice.slice.start))
    };
    let mut stages: Vec<Vec<ShownPart>> = Vec::new();
    for (place, part) in pipeline.parts.iter().enumerate() {
        let components = dag.names(part.components).map(str::to_owned).collect();
        let shown = ShownPart { components, slice: slice(place) };
        match stages.last_mut().filter(|_| place > 0 && pipeline.parts[place - 1].stage == part.stage) {
            Some(stage) => stage.push(shown),
            None => stages.push(vec![shown]),
        }
    }
    Shown {
        stages,
        runs: runs.ok().map(|runs| Runs {
            bottleneck_ns: runs.bottleneck,
            latency_ns: runs.latency,
            compute_slices: runs.compute_slices,
            waste_bytes: runs.waste,
            gpus: runs.gpus,
        }),
        why: runs.err().map(ToString::to_string),
    }
}

fn print(report: &Report) {
    println!("{} on the free slices of {}: {}", report.dag, report.gpu, report.free.join(", "));
    if !report.passed_over.is_empty() {
        println!("\nnot feasible:");
        report.passed_over.iter().for_each(line);
    }
    if let Some(chosen) = &report.chosen {
        println!("\nchosen:");
        line(chosen);
    }
    if !report.alternatives.is_empty() {
        println!("\nnext:");
        report.alternatives.iter().for_each(line);
    }
}

fn line(pipeline: &Shown) {
    let part = |part: &ShownPart| {
        let on = part.slice.as_ref().map(|slice| format!(" on {slice}")).unwrap_or_default();
        format!("{}{on}", part.components.join("+"))
    };
    let stage = |stage: &Vec<ShownPart>| stage.iter().map(part).collect::<Vec<_>>().join(" & ");
    let stages: Vec<String> = pipeline.stages.iter().map(stage).collect();
    println!("  [{}]", stages.join(" | "));
    if let Some(runs) = &pipeline.runs {
        println!(
            "    bottleneck {}, latency {}, {} compute slices on {} GPUs, {} left over",
            runs.bottleneck_ns, runs.latency_ns, runs.compute_slices, runs.gpus, runs.waste_bytes
        );
    }
    if let Some(why) = &pipeline.why {
        println!("    {why}");
    }
}
