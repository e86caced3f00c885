//! `gshare lab partition`: cuts a DAG into a pipeline for the free slices.

use super::{print_json, read_file};
use anyhow::Context as _;
use gshare_core::dag::Dag;
use gshare_core::{Bytes, Duration};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    Assignment, Goal, HandOff, LeastFragmentation, Mode, NoPlan, Node, PartitionConfig, Partitioner,
    Pipeline, RankMode, Unfit, plan,
};
use serde::Serialize;
use std::path::PathBuf;

/// The largest file to read: far above 128 components with all their profiles.
const MAX_FILE: u64 = 64 << 20;

/// Cut a function's DAG into stages and put them on free MIG slices.
///
/// Prints the chosen pipeline, a reason for each better-ranked pipeline that was rejected, and the next alternatives.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare lab partition --free 1g.10gb,1g.10gb,2g.20gb --slo 300ms dag.toml
  gshare lab partition --free 3g.40gb,2g.20gb --carve --json dag.json")]
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
    /// Rank of pipelines: the paper's coefficient of variation, or the bottleneck on the free slices.
    #[arg(long, value_enum, default_value_t = Rank::Bottleneck)]
    rank: Rank,
    /// Allowed cuts; each mode contains all cuts of the previous mode.
    #[arg(long, value_enum, default_value_t = Cuts::Series)]
    mode: Cuts,
    /// Batch size, as in the profiles.
    #[arg(long, default_value_t = 1)]
    batch: u32,
    /// Highest latency of a pipeline, such as `250ms`.
    #[arg(long, value_name = "TIME")]
    slo: Option<Duration>,
    /// Profile for the coefficient of variation [default: the first profile of all components].
    #[arg(long, value_name = "PROFILE")]
    reference: Option<String>,
    /// Memory of the run-time on every slice.
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    runtime_memory: Bytes,
    /// Bytes per second between a slice and host memory.
    #[arg(long, value_name = "BYTES", default_value = "10GB")]
    hand_off_rate: Bytes,
    /// Additional time of each hand-off, independent of its size.
    #[arg(long, value_name = "TIME", default_value = "100us")]
    hand_off_time: Duration,
    /// Allow new slices in the idle memory of one GPU if the free slices do not suffice.
    #[arg(long)]
    carve: bool,
    /// Most rejected pipelines to list, and most alternatives; at most 1000.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(..=1_000))]
    top: u16,
    #[expect(clippy::doc_markdown, reason = "the text of --help, where backticks would show")]
    /// Print one JSON object: {"dag", "gpu", "free", "rank", "mode", "fell_back", "chosen", "passed_over",
    /// "passed_over_total", "alternatives"}; a pipeline is {"stages": [[{"components", "slice"}]], "cv", "bottleneck_ns",
    /// "latency_ns", "compute_slices", "waste_bytes", "gpus"}, or with "why" if it does not fit.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Rank {
    Cv,
    Bottleneck,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Cuts {
    /// Cuts that the whole flow passes.
    Series,
    /// Any chain of down-sets, stages one after another.
    Ideal,
    /// Any partition with an acyclic quotient; independent stages run side by side.
    Acyclic,
}

#[derive(Debug, Serialize)]
struct Report {
    dag: String,
    gpu: String,
    free: Vec<String>,
    rank: RankMode,
    mode: Mode,
    fell_back: Option<String>,
    chosen: Option<Shown>,
    passed_over: Vec<Shown>,
    passed_over_total: usize,
    alternatives: Vec<Shown>,
}

/// A pipeline, and its run or the reason against it.
#[derive(Debug, Serialize)]
struct Shown {
    stages: Vec<Vec<ShownPart>>,
    cv: f64,
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
    let mut goal = Goal::default()
        .with_batch(options.batch)
        .with_runtime_memory(options.runtime_memory)
        .with_hand_off(HandOff {
            fixed: options.hand_off_time,
            bytes_per_second: options.hand_off_rate.get(),
        })
        .with_carve(options.carve);
    goal.slo = options.slo;
    goal.reference.clone_from(&options.reference);
    let rank = if options.rank == Rank::Cv { RankMode::PaperCv } else { RankMode::Bottleneck };
    let mode = match options.mode {
        Cuts::Series => Mode::SeriesCut,
        Cuts::Ideal => Mode::IdealChain,
        Cuts::Acyclic => Mode::AcyclicQuotient,
    };
    let partitioner = Partitioner::new(PartitionConfig::default().with_mode(mode).with_rank(rank))?;
    let report = report(options, &dag, &goal, &node, &partitioner, rank)?;
    if options.json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    anyhow::ensure!(report.chosen.is_some(), "no pipeline fits the free slices");
    Ok(())
}

fn report(
    options: &Options,
    dag: &Dag,
    goal: &Goal,
    node: &Node,
    partitioner: &Partitioner,
    rank: RankMode,
) -> anyhow::Result<Report> {
    let ranked = partitioner.ranked(dag, goal, node)?;
    let mut report = Report {
        dag: dag.name().to_owned(),
        gpu: node.model().name.clone().into_owned(),
        free: options.free.clone(),
        rank,
        mode: ranked.mode,
        fell_back: ranked.fell_back.map(|why| why.to_string()),
        chosen: None,
        passed_over: Vec::new(),
        passed_over_total: 0,
        alternatives: Vec::new(),
    };
    match plan(partitioner, dag, goal, node) {
        Ok(plan) => {
            report.passed_over_total = plan.passed_over.len();
            let passed = plan.passed_over.iter().take(usize::from(options.top));
            report.passed_over =
                passed.map(|passed| shown(dag, node, &passed.pipeline, Err(&passed.why))).collect();
            report.chosen = Some(shown(dag, node, &plan.pipeline, Ok(&plan.assignment)));
            let rest = ranked.pipelines.skip(plan.passed_over.len()).take(1_000);
            let runs = rest
                .filter(|pipeline| *pipeline != plan.pipeline)
                .filter_map(|pipeline| {
                    let runs = LeastFragmentation.assign(dag, goal, &pipeline, node).ok()?;
                    Some(shown(dag, node, &pipeline, Ok(&runs)))
                })
                .take(usize::from(options.top));
            report.alternatives = runs.collect();
        }
        Err(NoPlan::NothingFits { tried, .. }) => {
            report.passed_over_total = tried;
            // The search by bottleneck lists only fitting pipelines, so the paper's list gives the reasons.
            let why = |pipeline: Pipeline| {
                let why = LeastFragmentation.assign(dag, goal, &pipeline, node).err()?;
                Some(shown(dag, node, &pipeline, Err(&why)))
            };
            let all = partitioner.by_cv(dag, goal)?;
            report.passed_over = all.pipelines.take(usize::from(options.top)).filter_map(why).collect();
        }
        Err(error) => return Err(error.into()),
    }
    Ok(report)
}

fn shown(dag: &Dag, node: &Node, pipeline: &Pipeline, runs: Result<&Assignment, &Unfit>) -> Shown {
    let slice = |place: usize| {
        let slice = runs.ok()?.slices.get(place)?;
        let name = &node.model().get(slice.slice.profile)?.name;
        let cut = if slice.carved { " (to be cut)" } else { "" };
        Some(format!("{}/{name}@{}{cut}", slice.gpu, slice.slice.start))
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
        cv: pipeline.balance.cv(),
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
    let rank = if report.rank == RankMode::PaperCv { "CV" } else { "bottleneck" };
    println!(
        "{}: {} cuts by {rank}, free on {}: {}",
        report.dag,
        report.mode,
        report.gpu,
        report.free.join(", ")
    );
    if let Some(why) = &report.fell_back {
        println!("fell back to {}: {why}", report.mode);
    }
    if !report.passed_over.is_empty() {
        println!(
            "\nranked better but not feasible ({}):",
            report.passed_over_total.max(report.passed_over.len())
        );
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
    println!("  CV {:.3}  [{}]", pipeline.cv, stages.join(" | "));
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
