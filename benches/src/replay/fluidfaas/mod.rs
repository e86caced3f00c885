//! FluidFaaS, section 7: four applications in three variants on 16 A100-80 cut into MIG slices.
//!
//! The module simulates two nodes with eight GPUs each in virtual time ([`gshare_sim::world`]), under the platform's pool of slices
//! with the router and the rules of each policy. Weights are read-only and their copy in host memory stays, so an eviction takes
//! no time. `applications.rs` gives the sources of all times. Deadlines are 1.5 x the time of an application alone on "the minimum
//! MIG instances, as shown in Table 5" (section 6). Table 5 has two columns of minimum instances. `--slo parts` takes FluidFaaS's
//! column, with each model on the smallest slice that holds it. `--slo whole` takes the column of platforms without pipelines. By
//! the latter no medium application could be in time on the slices that Table 5 gives to its pipelines, because their models take
//! 1.8 to 2 times as long on 1g as on 2g. The paper's medium load is served by such pipelines, so the default is `parts`. The load
//! is given as a share of the throughput of the slices that run an application as a whole (`--load`). Every policy gets the same
//! requests.
//!
//! # Policies
//! The policies differ in their keeper of instances, and in the order in which requests wait. The **paper's order** is by slack. In
//! **our order** a request that can no longer be in time waits for requests that can, and a load has to pay.
//! - `monolithic` has no pipelines, no time sharing and exclusive keep-alive, as ESG is described;
//! - `static split` divides the slices that run applications as a whole among them once, for ever;
//! - `paper` is FluidFaaS as printed, `paper with its hand-offs` with the 10 to 40 ms that it measured;
//! - `ours`, and with `--ablate` ours with one mechanism switched off each.
//!
//! A router of the program's own (see [`super::main`]) goes with the rules and places of `ours`, places with its rules and order.
//!
//! Names say when the order is not a policy's own. The first table of comparisons has ours beside the paper's keeper *on our
//! order*, so the order of the queue does not explain its differences.
//!
//! # Figures
//! Throughput counts requests answered until the last answer, so it depends on the end of the last few requests: half a second is a
//! thousandth of it. `while_sent_per_s` counts requests answered by the arrival of the last request, up to then; `in_time_per_s`
//! counts only requests within the deadline. GPU and MIG time are sums over the whole run, late work included. They are also given
//! per request answered within its deadline, so that a policy is not blamed for serving more. Where fewer than 95 % of the requests
//! are in time, the P95 is the latency of a late request. A platform that serves as much has as much waiting in all, in any order.
//! The mean says how much, and if no request waits for more than `w`, a share `mean / w` of the requests is late at least. So P99
//! and the longest latency are given as well.
//!
//! `queue_ms`, `load_ms`, `execution_ms` and `transfer_ms` add up to the mean (Figure 14). `pipelines_percent` is the part of the
//! answered requests that ran on more than one slice. `hit_app0` to `hit_app3` are the SLO hits of each application in the order of
//! Table 4 (Figure 9). With `--series` `gpus_held` and `gpus_active` are the GPUs with a slice held, or at work, at any time of a
//! second (Figure 3a). `slices_held` and `slices_active` are the slices (Figure 5), and `active_` with the name of a profile the
//! slices of one kind (Figure 3b).
//!
//! # Seeds and windows
//! `replay fluidfaas --help` explains the draws of a seed and the tables of comparisons. The last few requests decide about a
//! thousandth of the throughput of a seed, so few seeds cannot tell which of two level policies is ahead. A trace has its own
//! bursts: there each window of it (`--trace-from`) takes the place of a seed.

mod applications;
mod compared_policies;
mod load_shape;
mod paper_rank;
mod run_figures;
mod static_split;

use super::paired::{Compared, Run};
use super::{Report, in_parallel, joined, row};
use crate::seeds::cpus;
use anyhow::{Context, Result, anyhow, bail};
use applications::{APPLICATIONS, VARIANTS, Variant, application, slo, whole};
use clap::builder::ArgPredicate;
use compared_policies::{Keeping, Policy, Rank, Routing, policies};
use gshare_core::{Bytes, Duration, FunctionId, NodeId, Timestamp};
use gshare_sched::mig::{GpuModel, MigProfile};
use gshare_sched::pipeline::{Goal, HandOff, KeeperConfig, RouterConfig};
use gshare_sched::platform::{DeviceSpec, FunctionSpec, MigLayout, Work};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::scenario::Own;
use gshare_sim::world::{self, Function, Plan};
use load_shape::{Draw, Shape, draws};
use run_figures::{Figures, Series, figures, measures, series};
use serde_json::{Map, Value};
use static_split::StaticSplit;
use std::path::PathBuf;

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seeds of bursts, arrivals and branches [default: 1 to 10; with a trace 1]
    #[arg(long, value_delimiter = ',', default_values_t = 1..=10, hide_default_value = true,
        default_value_if("trace", ArgPredicate::IsPresent, "1"))]
    seeds: Vec<u64>,
    /// Calls per minute as a CSV shaped like the Azure Functions 2019 trace; the busiest functions drive the
    /// applications [default: generated]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Minutes of the trace at which windows begin; a minute of it is six seconds here [default: one window after the
    /// other, through the whole trace]
    #[arg(long, value_name = "MINUTE", value_delimiter = ',', requires = "trace")]
    trace_from: Vec<usize>,
    /// Length of the arrivals
    #[arg(long, default_value = "600s")]
    length: Duration,
    /// Time at the beginning with a quarter of the load, left out of the figures
    #[arg(long, default_value = "60s")]
    warm_up: Duration,
    /// Mean load, as a share of the capacity of the slices which fit a whole application
    #[arg(long, value_delimiter = ',', default_value = "0.5,1")]
    load: Vec<f64>,
    /// Column of Table 5 with the slices for the deadlines: 1.5 times the time on them
    #[arg(long, value_enum, default_value_t = SloOf::Parts)]
    slo: SloOf,
    /// In our order: wait of a late request, in percent of its function's backlog [default: the router's]
    #[arg(long, value_name = "PERCENT")]
    late_stretch: Option<u32>,
    /// Cuts of the GPUs (Table 7): p1, p2, hybrid
    #[arg(long, value_delimiter = ',', default_value = "p1,p2,hybrid")]
    partition: Vec<String>,
    /// Variants of the applications (Table 5): light, medium, heavy
    #[arg(long, value_delimiter = ',', default_value = "light,medium,heavy")]
    workload: Vec<String>,
    /// Also run ours with one mechanism switched off each
    #[arg(long)]
    ablate: bool,
    /// Only these policies [default: all]
    #[arg(long, value_delimiter = ',')]
    policy: Vec<String>,
    /// Also print GPUs and slices held and at work in every second, of the first run of each policy
    #[arg(long)]
    series: bool,
}

/// The slices from which a deadline is reckoned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SloOf {
    /// The smallest that holds the whole.
    Whole,
    /// For each model the smallest that holds it.
    Parts,
}

/// Table 7: the slices of the eight GPUs of a node.
fn partition(name: &str) -> Result<Vec<Vec<&'static str>>> {
    let (p1, p2) = (vec!["4g.40gb", "2g.20gb", "1g.10gb"], vec!["3g.40gb", "2g.20gb", "2g.20gb"]);
    Ok(match name {
        "p1" => vec![p1; 8],
        "p2" => vec![p2; 8],
        "hybrid" => {
            let twos = vec!["2g.20gb", "2g.20gb", "2g.20gb", "1g.10gb"];
            let large = vec!["3g.40gb", "4g.40gb"];
            let mut gpus = vec![vec!["1g.10gb"; 7], twos.clone(), twos];
            gpus.extend(vec![large; 4]);
            gpus.push(p1);
            gpus
        }
        other => bail!("partition `{other}`: need p1, p2 or hybrid"),
    })
}

/// The GPUs of all nodes.
fn devices(model: &GpuModel, cuts: &[Vec<&str>]) -> Result<Vec<DeviceSpec>> {
    let device = |(node, names): (u32, &Vec<&str>)| -> Result<DeviceSpec> {
        let layout = MigLayout::named(&model.name, names).context("an illegal cut")?;
        Ok(DeviceSpec::new(NodeId::new(node), Bytes::from_gib(80)).with_mig(layout))
    };
    (0..NODES).flat_map(|node| cuts.iter().map(move |names| (node, names))).map(device).collect()
}

const NODES: u32 = 2;

/// Pairs of policies for comparison. The second and the third show the effect of the queue's order.
const PAIRS: [(&str, &str); 5] = [
    ("ours", "paper on our order"),
    ("ours", "paper"),
    ("ours on paper's order", "paper"),
    ("ours", "monolithic on our order"),
    ("ours", "static split on our order"),
];

/// Figures in which they are compared, and whether less is better.
const COMPARED: [(&str, bool); 6] = [
    ("slo_hit_percent", false),
    ("throughput_per_s", false),
    ("p95_ms", true),
    ("mean_ms", true),
    ("gpu_ms_per_in_time", true),
    ("mig_ms_per_in_time", true),
];

/// A workload on a cut at a load.
struct Cell<'a> {
    variant: &'static Variant,
    partition: &'a str,
    model: &'a GpuModel,
    devices: Vec<DeviceSpec>,
    load: f64,
}

impl Cell<'_> {
    fn all<'a>(args: &'a Args, model: &'a GpuModel) -> Result<Vec<Cell<'a>>> {
        let mut cells = Vec::new();
        for workload in &args.workload {
            let variant = VARIANTS.iter().find(|one| one.name == workload);
            let variant =
                variant.with_context(|| format!("workload `{workload}`: need light, medium or heavy"))?;
            for name in &args.partition {
                let devices = devices(model, &partition(name)?)?;
                let cell = |&load| Cell { variant, partition: name, model, devices: devices.clone(), load };
                cells.extend(args.load.iter().map(cell));
            }
        }
        Ok(cells)
    }

    fn input(&self) -> Map<String, Value> {
        row(&[
            ("workload", self.variant.name.into()),
            ("partition", self.partition.into()),
            ("load", self.load.into()),
        ])
    }

    /// Runs a policy on the requests of a seed: its figures and, if wanted, its course over time.
    fn run(
        &self,
        args: &Args,
        policy: &Policy<'_>,
        draw: &Draw,
        over_time: bool,
    ) -> Result<(Figures, Series)> {
        let (mut plan, slos) = self.plan(args, policy, draw)?;
        let split = StaticSplit::new(&plan, self.model, self.variant)?;
        if matches!(policy.keeping, Keeping::Static) {
            for (number, function) in (0..).zip(&mut plan.functions) {
                let count = split.count(FunctionId::new(number)) * NODES as usize;
                function.spec.min_instances = u32::try_from(count)?;
            }
        }
        let make = || policy.platform(&split).map_err(|error| error.to_string());
        let outcome =
            world::run(&plan, draw.seed, make).map_err(|failure| anyhow!("{}: {failure}", policy.name))?;
        let series = if over_time { series(&outcome, self.model) } else { Vec::new() };
        Ok((figures(&outcome, self.model, &slos, Timestamp::ZERO + args.warm_up), series))
    }

    /// The run of a seed and its deadlines: the same requests for every policy.
    fn plan(&self, args: &Args, policy: &Policy<'_>, draw: &Draw) -> Result<(Plan, Vec<Duration>)> {
        let mut rng = Rng::new(draw.seed);
        let generated;
        let shape = match &draw.window {
            Some(window) => window,
            None => {
                generated = Shape::generated(args, &mut rng)?;
                &generated
            }
        };
        let (variant, model) = (self.variant, self.model);
        let layouts = || self.devices.iter().filter_map(|device| device.mig.as_ref());
        let slices = || layouts().flat_map(|layout| layout.slices()).filter_map(|at| model.get(at.profile));
        let (mut functions, mut slos) = (Vec::new(), Vec::new());
        for (index, (name, _)) in APPLICATIONS.iter().enumerate().take(variant.applications) {
            let dag = application(index, variant)?;
            let slo = slo(&dag, model, variant, args.slo)?;
            // The rate of all slices that run it as a whole, divided among the applications.
            let per_slice = |slice: &MigProfile| {
                whole(&dag, model, &slice.name, variant).map_or(0.0, |time| 1.0 / time.as_secs_f64())
            };
            let capacity = slices().map(per_slice).sum::<f64>() / variant.applications as f64;
            let quiet = usize::try_from(args.warm_up.as_nanos().div_ceil(shape.bin.as_nanos()))?;
            let rate =
                |(bin, share): (usize, &f64)| self.load * capacity * if bin < quiet { 0.25 } else { *share };
            let rates = shape.shares[index].iter().enumerate().map(rate).collect();
            let goal = Box::new(Goal::default().with_batch(variant.batch).with_hand_off(policy.hand_off));
            let memory = Bytes(variant.memory.get() * dag.len() as u64);
            let work = Work::Pipeline { dag: Box::new(dag), goal };
            let mut spec = FunctionSpec::new(work, memory).with_slo(slo);
            spec.max_instances = u32::MAX;
            functions.push(Function::new(*name, spec).with_arrivals(Arrivals::rates(shape.bin, rates)?));
            slos.push(slo);
        }
        let mut plan = Plan::new(self.devices.clone(), functions, args.length);
        (plan.jitter, plan.record, plan.link) = (0, true, u64::MAX);
        // A policy that is slower than the load works on it long after it has ended.
        plan.settle = args.length.saturating_mul(4);
        Ok((plan, slos))
    }
}

/// Runs every policy on every partition, workload and load.
///
/// # Errors
/// Flags or a trace that cannot be; a policy that broke the simulation's book.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    run_on(cpus(), args, own)
}

fn run_on(threads: usize, args: &Args, own: &Own) -> Result<Report> {
    let mut report = Report::new("fluidfaas", args.seeds.clone());
    let model = GpuModel::find("A100-80")?;
    let cells = Cell::all(args, &model)?;
    let mut our_order = RouterConfig::default();
    our_order.late_stretch_percent = args.late_stretch.unwrap_or(our_order.late_stretch_percent);
    let mut policies = policies(args.ablate, &our_order);
    let beside = |name, keeping, router| {
        let (rank, hand_off) = (Rank::Bottleneck, HandOff::default());
        Policy { name, keeping, router, rank, hand_off }
    };
    let ours = || Keeping::Keeper(KeeperConfig::default());
    policies.extend(own.routers().map(|(name, make)| beside(name, ours(), Routing::Own(make))));
    let places = own.places().map(|(name, make)| (name, Keeping::Own(make)));
    policies.extend(places.map(|(name, make)| beside(name, make, Routing::Slack(our_order.clone()))));
    let names: Vec<_> = policies.iter().map(|one| one.name).collect();
    if let Some(unknown) = args.policy.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("--policy {unknown}: need one of: {}", names.join("; "));
    }
    policies.retain(|one| args.policy.is_empty() || args.policy.iter().any(|name| name == one.name));
    let draws = draws(args)?;
    if policies.is_empty() || draws.is_empty() {
        bail!("need a seed, and a policy out of: {}", names.join("; "));
    }
    let runs = in_parallel(threads, cells.len() * policies.len() * draws.len(), |number| {
        let policy = &policies[number / draws.len() % policies.len()];
        let draw = number % draws.len();
        let over_time = args.series && draw == 0;
        cells[number / draws.len() / policies.len()].run(args, policy, &draws[draw], over_time)
    })?;
    let mut compared = PAIRS.map(|(ours, with)| Compared::new(with, &COMPARED).of(ours));
    for (cell, runs) in cells.iter().zip(runs.chunks(policies.len() * draws.len())) {
        let of = |runs: &[(Figures, Series)]| {
            let figures: Vec<Figures> = runs.iter().map(|(figures, _)| *figures).collect();
            Run { together: measures(&figures), by_seed: figures.chunks(1).map(measures).collect() }
        };
        let all: Vec<Run> = runs.chunks(draws.len()).map(of).collect();
        let find = |name| policies.iter().position(|one| one.name == name).map(|at| &all[at]);
        for (compared, (ours, with)) in compared.iter_mut().zip(PAIRS) {
            if let (Some(ours), Some(with)) = (find(ours), find(with)) {
                compared.push(cell.input(), with, ours);
            }
        }
        let in_time = |run: &Run| run.together.get("in_time_per_s").and_then(Value::as_f64).unwrap_or(0.0);
        for ((policy, run), runs) in policies.iter().zip(&all).zip(runs.chunks(draws.len())) {
            let about = joined(&row(&[("policy", policy.name.into())]), &cell.input());
            let mut row = joined(&about, &run.together);
            if let Some(ours) = find("ours") {
                // The remaining share without a mechanism shows the mechanism's worth.
                row.insert("in_time_over_ours".to_owned(), (in_time(run) / in_time(ours)).into());
            }
            report.rows.push(row);
            report.rows.extend(runs[0].1.iter().map(|second| joined(&about, second)));
        }
    }
    report.compared.extend(compared.into_iter().filter(|one| !one.cells.is_empty()));
    for (workload, throughput, hit) in
        [("light", "+0 %", "alike"), ("medium", "+25 %", "+90 %"), ("heavy", "+75 %", "+61 %")]
    {
        report.paper.push(row(&[
            ("policy", "FluidFaaS over ESG".into()),
            ("workload", workload.into()),
            ("partition", "p1".into()),
            ("throughput_per_s", throughput.into()),
            ("slo_hit_percent", hit.into()),
        ]));
    }
    for (partition, throughput) in [("p2", "+78 %"), ("hybrid", "+70 %")] {
        report.paper.push(row(&[
            ("policy", "FluidFaaS over ESG".into()),
            ("workload", "heavy".into()),
            ("partition", partition.into()),
            ("throughput_per_s", throughput.into()),
        ]));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use gshare_sched::pipeline::{Partitioner, SlackRouter};

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(flags: &str) -> Args {
        Cli::parse_from(["fluidfaas"].into_iter().chain(flags.split_whitespace())).args
    }

    #[test]
    fn a_policy_that_is_not_known_is_refused_beside_one_that_is() {
        let error = run_on(1, &parsed("--policy ours,theirs"), &Own::default()).unwrap_err().to_string();
        assert!(error.starts_with("--policy theirs: need one of: monolithic; "), "{error}");
    }

    #[test]
    fn a_trace_is_one_run_unless_told_otherwise() {
        assert_eq!(parsed("").seeds, (1..=10).collect::<Vec<u64>>());
        assert_eq!(parsed("--trace calls.csv").seeds, [1]);
        assert_eq!(parsed("--trace calls.csv --seeds 4,5").seeds, [4, 5]);
    }

    /// A trace of four functions and 30 minutes, and windows of ten.
    #[test]
    fn windows_of_a_trace_lie_within_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calls.csv");
        let minutes: Vec<String> = (1..=30).map(|minute| minute.to_string()).collect();
        let mut text = format!("HashFunction,{}\n", minutes.join(","));
        for name in ["a", "b", "c", "d"] {
            text.push_str(&format!("{name},{}\n", minutes.join(",")));
        }
        std::fs::write(&path, text).unwrap();
        let draws = |flags: &str| {
            draws(&parsed(&format!("--trace {} --length 60s {flags}", path.display())))
                .map(|all| all.into_iter().filter_map(|one| one.window).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        let all = draws("").unwrap();
        assert_eq!(all.len(), 3);
        assert!((all[0].shares[0].iter().sum::<f64>() - 10.0).abs() < 1e-9, "a mean of 1");
        assert!((all[2].shares[3][9] - 30.0 / 25.5).abs() < 1e-9);
        assert_eq!(draws("--trace-from 3,20 --seeds 1,2").unwrap().len(), 4);
        assert_eq!(
            draws("--trace-from 21").err().unwrap(),
            "--trace-from 21: need at most 20, for 10 of 30 minutes"
        );
    }

    #[test]
    fn a_router_of_the_programs_own_goes_with_our_places_and_places_with_our_order() {
        let flags = "--seeds 1 --length 60s --warm-up 20s --workload medium --partition p1 --load 1 --policy ours,router,place";
        let own = Own::default()
            .with_router("router", || Box::new(SlackRouter::new(RouterConfig::default())))
            .with_place("place", || Box::new(Partitioner));
        let rows = run_on(1, &parsed(flags), &own).unwrap().rows;
        let [ours, router, place] = &rows[..] else { panic!("{rows:?}") };
        for (row, name) in [(router, "router"), (place, "place")] {
            assert!(row["policy"] == name && row["mean_ms"] == ours["mean_ms"], "{rows:?}");
            assert_eq!(row["in_time_over_ours"], 1.0);
        }
    }

    #[test]
    fn slices_over_time_are_held_while_they_work() {
        let flags =
            "--seeds 1,2 --length 60s --warm-up 20s --workload medium --partition p1 --load 1 --policy ours";
        let rows = run_on(1, &parsed(&format!("{flags} --series")), &Own::default()).unwrap().rows;
        assert_eq!(rows[1]["second"], 0);
        let of = |row: &Map<String, Value>, key: &str| row.get(key).and_then(Value::as_u64).unwrap_or(0);
        for row in &rows[1..] {
            let kinds = row.iter().filter(|(key, _)| key.starts_with("active_"));
            let active = of(row, "slices_active");
            assert_eq!(kinds.map(|(key, _)| of(row, key)).sum::<u64>(), active, "{row:?}");
            assert!(active <= of(row, "slices_held") && of(row, "slices_held") <= 48, "{row:?}");
            assert!(of(row, "gpus_active") <= of(row, "gpus_held").min(active), "{row:?}");
        }
        assert!(rows.iter().any(|row| of(row, "slices_active") > 10));
    }

    /// Parts of a latency add up, and hits of applications to the hits of all.
    #[test]
    fn breakdowns_add_up() {
        let args = parsed("--seeds 1 --length 60s --warm-up 20s --workload medium --partition p1 --load 1");
        for row in run_on(2, &args, &Own::default()).unwrap().rows {
            let of = |name: &str| row[name].as_f64().unwrap();
            let parts = ["queue_ms", "load_ms", "execution_ms", "transfer_ms"].map(of);
            assert!((parts.iter().sum::<f64>() - of("mean_ms")).abs() < 1e-3, "{row:?}");
            assert_eq!(of("transfer_ms") > 0.0, of("pipelines_percent") > 0.0, "{row:?}");
            let apps = (0..4).map(|number| of(&format!("hit_app{number}")));
            let (least, most) =
                apps.fold((100.0, 0.0), |(least, most), hit: f64| (hit.min(least), hit.max(most)));
            assert!((least..=most).contains(&of("slo_hit_percent")), "{row:?}");
        }
    }

    #[test]
    fn threads_change_nothing() {
        let args = parsed(
            "--seeds 1,2,3 --length 60s --warm-up 20s --workload heavy,medium --partition p2 --policy paper,ours",
        );
        let printed =
            |threads| serde_json::to_string(&run_on(threads, &args, &Own::default()).unwrap()).unwrap();
        let alone = printed(1);
        assert_eq!(alone, printed(3));
        let report: Value = serde_json::from_str(&alone).unwrap();
        assert_eq!(report["rows"].as_array().unwrap().len(), 8);
        assert_eq!(report["compared"][0]["cells"][3]["load"], 1.0);
        assert_eq!(report["compared"][0]["cells"][3]["workload"], "medium");
    }
}
