//! FaST-GShare, figure 12: load that climbs from 30 to 110 requests/s and falls to 20, an SLO of 69 ms.
//!
//! A simulation in virtual time: the heuristic scaler gets the load of each second, its instances take `cold_start` to become
//! ready, and each serves one request at a time in the time that its point's throughput says. Requests come evenly at the
//! rate of the moment (`even`, as the load generator of the paper sends them) or as a Poisson process of that rate
//! (`poisson`), and join the instance that will be free first. The profile is figure 8's of `ResNet` on a V100.
//!
//! Policies: `ours`, which adds what a queue of such arrivals needs; `headroom`, which does not, but has more capacity than load by
//! the per cent asked for; `printed` has no headroom and no latency filter, and looks at the last second only.
//! `at_first_percent` are the violations of the first five seconds, when one pod serves 30 requests/s until the scaler has seen
//! a second of them and others are ready.

use super::{Report, row};
use anyhow::{Context, Result};
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::scale::{FunctionScale, HorizontalAction, HorizontalEvent, HorizontalScaler};
use gshare_core::{BasisPoints, Duration, FunctionId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::scale::{HeuristicHorizontal, HeuristicHorizontalConfig};
use gshare_sim::scenario::Own;
use gshare_sim::{EventQueue, Rng};
use std::collections::BTreeMap;

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
            // One request at a time: its time is what the throughput says.
            let exec = std::time::Duration::from_secs_f64(1.0 / throughput).into();
            let sm = SmShare::from_percent(sm).context("share")?;
            let quota = Quota::from_percent(percent).context("quota")?;
            points.push(ProfilePoint::measured(sm, quota, 1, throughput, exec, exec)?);
        }
    }
    Ok(ProfileTable::grid(points)?)
}

/// One simulated run.
#[derive(Debug, Default)]
struct Run {
    requests: u64,
    violations: u64,
    /// Those of the first five seconds.
    at_first: u64,
    most_pods: u32,
    /// Sum over the seconds of SM share x quota, in GPU seconds.
    gpu_seconds: f64,
    /// Load and pods of every second.
    series: Vec<(u64, u32)>,
}

enum Event {
    Arrival,
    Ready(InstanceId),
    Gone(InstanceId),
    Tick,
}

/// An instance: when it is free next, and how long a request takes.
struct Pod {
    free: Timestamp,
    exec: Duration,
    ready: bool,
    point: ProfilePoint,
}

/// Makes a new scaler.
type New<'a> = Box<dyn Fn() -> Result<Box<dyn HorizontalScaler>> + 'a>;

fn simulate(
    mut scaler: Box<dyn HorizontalScaler>,
    max_p95: Option<Duration>,
    cold: Duration,
    seed: Option<u64>,
) -> Result<Run> {
    let function = FunctionId::new(0);
    let spec = FunctionScale { profile: profile()?, max_p95, min_instances: 1, max_instances: 64 };
    let (mut run, mut pods) = (Run::default(), BTreeMap::<InstanceId, Pod>::new());
    let mut queue = EventQueue::new();
    let mut rng = seed.map(Rng::new);
    let mut orders = Vec::new();
    scaler.handle(Timestamp::ZERO, HorizontalEvent::FunctionAdded { function, spec }, &mut orders)?;
    obey(&mut orders, Timestamp::ZERO, cold, &mut pods, &mut queue);
    let second = Duration::from_secs(1);
    queue.schedule(Timestamp::ZERO + cold + second, Event::Tick);
    queue.schedule(Timestamp::ZERO + cold, Event::Arrival);
    let begin = Timestamp::ZERO + cold;
    let mut came = 0u64;
    while let Some((now, event)) = queue.pop() {
        let at = now.saturating_since(begin).as_secs_f64();
        match event {
            Event::Arrival => {
                came += 1;
                run.requests += 1;
                let free = pods
                    .iter_mut()
                    .filter(|(_, pod)| pod.ready)
                    .min_by_key(|(id, pod)| (pod.free.max(now) + pod.exec, **id));
                let late = match free {
                    Some((_, pod)) => {
                        pod.free = pod.free.max(now) + pod.exec;
                        pod.free.saturating_since(now) > SLO
                    }
                    None => true,
                };
                run.violations += u64::from(late);
                run.at_first += u64::from(late && at < 5.0);
                let gap = match rng.as_mut() {
                    None => 1.0 / load(at),
                    // By inversion: the mean of -ln(u) is 1.
                    Some(rng) => -((rng.below(1 << 30) + 1) as f64 / (1u64 << 30) as f64).ln() / load(at),
                };
                let next = now + std::time::Duration::from_secs_f64(gap).into();
                if next < begin + Duration::from_secs(SECONDS) {
                    queue.schedule(next, Event::Arrival);
                }
            }
            Event::Gone(instance) => {
                pods.remove(&instance);
                scaler.handle(now, HorizontalEvent::InstanceGone { instance }, &mut orders)?;
            }
            Event::Ready(instance) => {
                if let Some(pod) = pods.get_mut(&instance) {
                    pod.ready = true;
                    scaler.handle(now, HorizontalEvent::InstanceReady { instance }, &mut orders)?;
                }
            }
            Event::Tick => {
                let rate = RequestRate::per_second(came);
                let report = HorizontalEvent::LoadReported { function, rate };
                scaler.handle(now, report, &mut orders)?;
                obey(&mut orders, now, cold, &mut pods, &mut queue);
                let here = u32::try_from(pods.len()).unwrap_or(u32::MAX);
                run.most_pods = run.most_pods.max(here);
                run.gpu_seconds += pods.values().map(|pod| pod.point.area() as f64 / 1e8).sum::<f64>();
                run.series.push((came, here));
                came = 0;
                if now < begin + Duration::from_secs(SECONDS) {
                    queue.schedule(now + second, Event::Tick);
                }
            }
        }
    }
    Ok(run)
}

/// Does what the scaler says.
fn obey(
    orders: &mut Vec<HorizontalAction>,
    now: Timestamp,
    cold: Duration,
    pods: &mut BTreeMap<InstanceId, Pod>,
    queue: &mut EventQueue<Event>,
) {
    for order in orders.drain(..) {
        match order {
            HorizontalAction::Start { instance, point, .. } => {
                pods.insert(instance, Pod { free: now, exec: point.p50, ready: false, point });
                queue.schedule(now + cold, Event::Ready(instance));
            }
            HorizontalAction::Drain { instance } => {
                if let Some(pod) = pods.get_mut(&instance) {
                    pod.ready = false;
                    queue.schedule(pod.free, Event::Gone(instance));
                }
            }
            HorizontalAction::Stop { instance, .. } => {
                pods.remove(&instance);
            }
            _ => {}
        }
    }
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
    // Half of the SLO, the rest is for queueing (Dilu, section 3.2).
    let half = Duration::from_nanos(SLO.as_nanos() / 2);
    let ours = |config: HeuristicHorizontalConfig| -> New<'_> {
        Box::new(move || Ok(Box::new(HeuristicHorizontal::new(config.clone())?)))
    };
    let mut policies = vec![("ours", ours(HeuristicHorizontalConfig::default()), Some(half), 10)];
    for &percent in &args.headrooms {
        let mut config = HeuristicHorizontalConfig::default();
        config.headroom = BasisPoints::from_percent(percent).context("--headrooms: need at most 100")?;
        config.late_share = BasisPoints::ZERO;
        policies.push(("headroom", ours(config), Some(half), percent));
    }
    policies.push(("printed", ours(printed), None, 0));
    for (name, make) in own.scalers() {
        policies.push((name, Box::new(|| Ok(make())), Some(half), 0));
    }
    for (policy, new, max_p95, headroom) in policies {
        let poisson = args.seeds.iter().map(|&seed| ("poisson", Some(seed)));
        for (arrivals, seed) in [("even", None)].into_iter().chain(poisson) {
            let run = simulate(new()?, max_p95, args.cold_start, seed)?;
            let percent = run.violations as f64 / run.requests as f64 * 100.0;
            let mut line = row(&[
                ("policy", policy.into()),
                ("arrivals", arrivals.into()),
                ("headroom_percent", headroom.into()),
                ("requests", run.requests.into()),
                ("violations_percent", percent.into()),
                ("at_first_percent", (run.at_first as f64 / run.requests as f64 * 100.0).into()),
                ("most_pods", run.most_pods.into()),
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
        let half = Some(Duration::from_nanos(SLO.as_nanos() / 2));
        let run = |seed| {
            let scaler = HeuristicHorizontal::new(HeuristicHorizontalConfig::default()).unwrap();
            let run = simulate(Box::new(scaler), half, Duration::from_secs(2), seed).unwrap();
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
