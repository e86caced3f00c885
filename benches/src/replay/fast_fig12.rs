//! FaST-GShare, figure 12: load that climbs from 30 to 110 requests/s and falls to 20, an SLO of 69 ms.
//!
//! A simulation in virtual time ([`gshare_sim::world`]) under the platform's pool of shared devices, which tells the scaler the load of
//! each second, and more often while requests wait ([`gshare_sched::platform::FractionalPool`]). The first pod is there at once,
//! others take `cold_start`. Each has a GPU, and serves one request at a time in the time that its point's throughput says. Requests
//! come evenly at the rate of the moment (`even`, as the load generator of the paper sends them) or as a Poisson process of that rate
//! (`poisson`), and wait in the order of arrival. The profile is figure 8's of `ResNet` on a V100.
//!
//! Policy `ours` adds the capacity that a queue of such arrivals needs. `headroom` does not, but has more capacity than load by the
//! per cent asked for. `printed` has no headroom and no latency filter, and looks at the last report only. `at_first_percent` gives
//! the violations of the first five seconds, when one pod serves 30 requests/s until the scaler has seen this load and other pods
//! are ready. `gpu_seconds` count from the first pod's start until half a second after the load.

use super::{Report, row};
use anyhow::{Context, Result, anyhow};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{BasisPoints, Bytes, Duration, NodeId, Quota, SmShare, Timestamp};
use gshare_sched::pack::{MaxRects, MaxRectsConfig};
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, Platform, PlatformConfig,
    Work,
};
use gshare_sched::scale::{HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::scenario::Own;
use gshare_sim::world::{self, Change, Ended, Function, Plan};

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seeds of the Poisson arrivals
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    seeds: Vec<u64>,
    /// Time an instance takes to become ready
    #[arg(long, default_value = "2s")]
    cold_start: Duration,
    /// Capacity beyond the predicted load to try, in per cent
    #[arg(long, value_delimiter = ',', default_value = "10,40")]
    headrooms: Vec<u16>,
    /// Also print the load and the pods of every second, of the first run of each policy
    #[arg(long)]
    series: bool,
}

/// Figure 8, `ResNet`: requests per second by quota (20 to 100 %) at each SM share.
const RESNET: [(u16, [f64; 5]); 7] = [
    (6, [13.50, 24.99, 34.54, 42.55, 49.85]),
    (12, [18.27, 35.12, 46.28, 58.85, 68.64]),
    (24, [19.90, 37.54, 50.70, 63.83, 73.43]),
    (50, [20.07, 36.95, 50.59, 63.39, 74.09]),
    (60, [20.10, 37.62, 50.69, 62.62, 74.99]),
    (80, [20.18, 37.45, 50.55, 64.08, 75.37]),
    (100, [19.28, 37.89, 49.54, 63.39, 74.93]),
];

const SLO: Duration = Duration::from_millis(69);
const SECONDS: u64 = 205;

/// The load at a time in seconds: a climb, a plateau and a fall, as the figure shows them.
fn load(at: f64) -> f64 {
    match at {
        t if t < 90.0 => 30.0 + 80.0 * t / 90.0,
        t if t < 115.0 => 110.0,
        t if t < 180.0 => 110.0 - 90.0 * (t - 115.0) / 65.0,
        _ => 20.0,
    }
}

fn profile() -> Result<ProfileTable> {
    let mut points = Vec::new();
    for (sm, row) in RESNET {
        for (throughput, percent) in row.into_iter().zip([20, 40, 60, 80, 100]) {
            // One request at a time: its time follows from the throughput.
            let exec = std::time::Duration::from_secs_f64(1.0 / throughput).into();
            let sm = SmShare::from_percent(sm).context("share")?;
            let quota = Quota::from_percent(percent).context("quota")?;
            points.push(ProfilePoint::measured(sm, quota, 1, throughput, exec, exec)?);
        }
    }
    Ok(ProfileTable::grid(points)?)
}

/// When requests come: evenly, or by a seed as a Poisson process.
fn arrivals(seed: Option<u64>) -> Vec<Timestamp> {
    let mut rng = seed.map(Rng::new);
    let gap = |at: &Timestamp| {
        let load = load(at.saturating_since(Timestamp::ZERO).as_secs_f64());
        // By inversion: the mean of -ln(u) is 1.
        let drawn = |rng: &mut Rng| -((rng.below(1 << 30) + 1) as f64 / (1u64 << 30) as f64).ln();
        let gap = rng.as_mut().map_or(1.0, drawn) / load;
        Some(*at + std::time::Duration::from_secs_f64(gap).into())
    };
    let end = Timestamp::ZERO + Duration::from_secs(SECONDS);
    std::iter::successors(Some(Timestamp::ZERO), gap).take_while(|at| *at < end).collect()
}

#[derive(Debug)]
struct Run {
    requests: usize,
    violations: usize,
    /// Violations of the first five seconds.
    at_first: usize,
    gpu_seconds: f64,
    /// Load and pods of every second.
    series: Vec<(usize, usize)>,
}

type New<'a> = Box<dyn Fn() -> Result<Box<dyn HorizontalScaler>> + 'a>;

fn platform(new: &New<'_>) -> Result<Platform> {
    let packer = Box::new(MaxRects::new(MaxRectsConfig::default()));
    let policies = FractionalPolicies { scaler: new()?, packer };
    let pool = FractionalPool::new(FractionalConfig::default(), policies)?;
    Ok(Platform::new(PlatformConfig::default().with_late_wait(None), vec![pool.into()])?)
}

fn simulate(new: &New<'_>, slo: Option<Duration>, cold: Duration, seed: Option<u64>) -> Result<Run> {
    let came = arrivals(seed);
    // A pod has the memory of a GPU, so that none waits for the turns of another.
    let (memory, pods) = (Bytes::from_gib(16), 64);
    let devices = vec![DeviceSpec::new(NodeId::new(0), memory); pods as usize];
    let work = Work::Inference { profile: Some(profile()?) };
    let mut spec = FunctionSpec::new(work, memory).with_time_limit(Quota::WHOLE).with_instances(1, pods);
    // The first pod finds the weights on the disk and is there at once; then they are in the node's memory.
    (spec.load_disk, spec.load_host) = (Duration::ZERO, cold);
    // A pod has the quota of its point.
    (spec.slo, spec.time_limit) = (slo, Some(Quota::new(1).context("quota")?));
    let function = Function::new("resnet", spec).with_arrivals(Arrivals::times(came.clone())?);
    let length = Duration::from_millis(1_000 * SECONDS + 500);
    let mut plan = Plan::new(devices, vec![function], length);
    (plan.jitter, plan.record, plan.changes) = (0, true, vec![(length, 0, Change::Removed)]);
    let make = || platform(new).map_err(|error| error.to_string());
    let outcome = world::run(&plan, seed.unwrap_or(0), make).map_err(|failure| anyhow!("{failure}"))?;
    let record = outcome.record.unwrap_or_default();
    let late = |end: &&Ended| end.is_late(SLO);
    let early = |end: &&Ended| end.arrived < Timestamp::from_millis(5_000);
    let second = |number: u64| {
        let (from, to) =
            (Timestamp::from_millis(1_000 * number), Timestamp::from_millis(1_000 * (number + 1)));
        (came.iter().filter(|at| (from..to).contains(at)).count(), record.holding(to))
    };
    Ok(Run {
        requests: record.ends.len(),
        violations: record.ends.iter().filter(late).count(),
        at_first: record.ends.iter().filter(late).filter(early).count(),
        gpu_seconds: outcome.functions[0].held.as_secs_f64(),
        series: (0..SECONDS).map(second).collect(),
    })
}

/// Runs both policies on both kinds of arrivals.
///
/// # Errors
/// When the built-in profile or a configuration is refused.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    let mut report = Report::new("fast-fig12", args.seeds.clone());
    let mut printed = HeuristicHorizontalConfig::default();
    (printed.headroom, printed.dead_band, printed.predict_reports) =
        (BasisPoints::ZERO, BasisPoints::ZERO, 1);
    (printed.down_cooldown, printed.late_share) = (Duration::ZERO, BasisPoints::ZERO);
    printed.early_reports = false;
    let ours = |config: HeuristicHorizontalConfig| -> New<'_> {
        Box::new(move || Ok(Box::new(HeuristicHorizontal::new(config.clone())?)))
    };
    let mut policies = vec![("ours", ours(HeuristicHorizontalConfig::default()), Some(SLO), 10)];
    for &percent in &args.headrooms {
        let mut config = HeuristicHorizontalConfig::default();
        config.headroom = BasisPoints::from_percent(percent).context("--headrooms: need at most 100")?;
        config.late_share = BasisPoints::ZERO;
        policies.push(("headroom", ours(config), Some(SLO), percent));
    }
    policies.push(("printed", ours(printed), None, 0));
    for (name, make) in own.scalers() {
        policies.push((name, Box::new(|| Ok(make())), Some(SLO), 0));
    }
    for (policy, new, slo, headroom) in policies {
        let poisson = args.seeds.iter().map(|&seed| ("poisson", Some(seed)));
        for (arrivals, seed) in [("even", None)].into_iter().chain(poisson) {
            let run = simulate(&new, slo, args.cold_start, seed)?;
            let percent = run.violations as f64 / run.requests as f64 * 100.0;
            let mut line = row(&[
                ("policy", policy.into()),
                ("arrivals", arrivals.into()),
                ("headroom_percent", headroom.into()),
                ("requests", run.requests.into()),
                ("violations_percent", percent.into()),
                ("at_first_percent", (run.at_first as f64 / run.requests as f64 * 100.0).into()),
                ("most_pods", run.series.iter().map(|(_, pods)| *pods).max().into()),
                ("gpu_seconds", run.gpu_seconds.into()),
            ]);
            line.extend(seed.map(|seed| ("seed".to_owned(), seed.into())));
            report.rows.push(line);
            if args.series && seed.is_none() {
                for (second, (load, pods)) in run.series.iter().enumerate() {
                    report.rows.push(row(&[
                        ("policy", policy.into()),
                        ("second", second.into()),
                        ("requests", (*load).into()),
                        ("pods", (*pods).into()),
                    ]));
                }
            }
        }
    }
    report.paper.push(row(&[
        ("policy", "fast-gshare".into()),
        ("violations_percent", "below 1".into()),
        ("most_pods", 4.into()),
    ]));
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scaler_of_the_programs_own_has_rows_beside_ours() {
        let args =
            Args { seeds: vec![1], cold_start: Duration::from_secs(2), headrooms: Vec::new(), series: false };
        let default = || HeuristicHorizontal::new(HeuristicHorizontalConfig::default()).unwrap();
        let own = Own::default().with_scaler("mine", move || Box::new(default()));
        let rows = run(&args, &own).unwrap().rows;
        let figures = |policy: &str| -> Vec<_> {
            let of = rows.iter().filter(|row| row["policy"] == policy);
            of.map(|row| (row["violations_percent"].clone(), row["gpu_seconds"].clone())).collect()
        };
        assert_eq!((figures("mine").len(), figures("mine")), (2, figures("ours")));
    }

    /// FaST-GShare, figure 12: violations below 1 %.
    #[test]
    fn load_that_climbs_and_falls_is_served_within_the_slo() {
        let run = |seed| {
            let ours = || HeuristicHorizontal::new(HeuristicHorizontalConfig::default());
            let new: New<'_> = Box::new(move || Ok(Box::new(ours()?)));
            let run = simulate(&new, Some(SLO), Duration::from_secs(2), seed).unwrap();
            assert!(run.requests > 12_000);
            assert!(run.violations * 100 < run.requests, "{} of {}", run.violations, run.requests);
            run
        };
        let (even, poisson) = (run(None), run(Some(1)));
        assert!(even.gpu_seconds * 1.2 < poisson.gpu_seconds, "even arrivals need less");
        let run = even;
        let pods = |second: usize| run.series[second].1;
        assert!(pods(100) > pods(0) && pods(204) < pods(100), "pods follow the load: {:?}", run.series);
    }
}
