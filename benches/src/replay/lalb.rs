//! GPU-enabled FaaS, sections V-B to V-E, figures 4 to 7: load balancing, LALB, LALBO3, and the pricing of evictions.
//!
//! 12 GPUs serve the models of Table I, 325 requests per minute for 6 minutes, one at a time per GPU, until all are served.
//! Functions are distinct models that share the profiles of Table I, spread evenly over sizes and popularity. The paper's trace
//! gives requests per function and minute. Without a trace (`--trace`), popularity is a Zipf distribution with its exponent as a
//! parameter: 0.5 to 0.8 agree with the paper's figures best, the trace's own tail (1.2) does not.
//!
//! The paper does not say how much memory a GPU has for models. It evicts by the occupation that Table I lists, contexts
//! included, on cards of 8 GB. The text thus implies 8,192 MiB less the driver's part, but gives no number. Rows for 7,200 and
//! for 7,600 MiB are printed side by side, because the memory matters. With 35 functions, a limit of 45 cuts LALB's latency by
//! the paper's 85 % only at 7,200 (83 %; at 7,600 LALB itself is better off, and the cut is 76 %).
//!
//! "Cut" is a reduction in per cent. Load balancing cannot keep up with this load, so its mean latency measures the length of the
//! run, and every cut against it saturates near 97 %: read the absolute latencies and `--sustainable` first.

use anyhow::{Context, Result, ensure};
use gshare_core::{Bytes, Duration, NodeId, Timestamp};
use gshare_sched::platform::{WholeConfig, WholePool};
use gshare_sim::Rng;
use gshare_sim::load_trace::{FunctionCounts, read_azure_counts};
use gshare_sim::scenario::{LoadBalance, Own};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

use super::whole_devices::{Answered, Arrival, Cluster, Times, percentile};
use super::{Report, mean, row};

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Working set: number of functions; 15, 25 and 35 if not given
    #[arg(long)]
    ws: Option<usize>,
    /// Exponent of the Zipf distribution of popularity
    #[arg(long, default_value_t = 0.5)]
    skew: f64,
    /// Memory of each GPU for models, MiB; 7200 and 7600 if not given
    #[arg(long)]
    memory: Option<u64>,
    /// Loading times, in per cent of Table I's
    #[arg(long, default_value_t = 100)]
    load_pct: u64,
    /// Number of seeds
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// The first of them. `evict_cost_aware` was tuned on seeds below 20
    #[arg(long, default_value_t = 0)]
    first_seed: u64,
    /// One seed only
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Requests per minute
    #[arg(long)]
    rate: Option<u64>,
    /// Rather the out-of-order dispatch with each of these limits (figure 7: 35 functions, 0 to 45); 0 is LALB
    #[arg(long, value_delimiter = ',', value_name = "LIMIT")]
    limits: Vec<u32>,
    /// Rather find the largest rate (in steps of 20 per minute) at which the mean latency stays below 5 s
    #[arg(long)]
    sustainable: bool,
    /// Invocations per minute, as in the Azure Functions trace of 2019: CSV with one row per `HashFunction`, counts in the columns
    /// named `1`, `2`, ... or `minute_1`, `minute_2`, ...; normalised to the rate
    #[arg(long)]
    trace: Option<PathBuf>,
    /// The first minute of the trace that is used
    #[arg(long, default_value_t = 1, requires = "trace")]
    from_minute: usize,
}

#[derive(Debug, Deserialize)]
pub(super) struct Scenario {
    pub(super) gpus: u32,
    gpus_per_node: u32,
    pub(super) per_minute: u64,
    minutes: usize,
    pub(super) skip_limit: u32,
    pub(super) model: Vec<Profile>,
    paper: Vec<Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Profile {
    pub(super) memory_mib: u64,
    pub(super) load_ms: u64,
    pub(super) infer_ms: u64,
}

impl Scenario {
    pub(super) fn of_the_paper() -> Result<Self> {
        Ok(toml::from_str(include_str!("../../scenarios/lalb/paper.toml"))?)
    }
}

/// The results of one run under one policy.
#[derive(Debug, Clone, Copy, Default)]
struct Figures {
    mean: f64,
    p99: f64,
    max: f64,
    variance: f64,
    miss: f64,
    false_miss: f64,
    duplicates: f64,
    makespan: f64,
    busy: f64,
}

/// A figure and its name.
type Measure = (&'static str, fn(&Figures) -> f64);

/// Runs all policies.
///
/// # Errors
/// When the scenario or the trace does not parse, or a scheduler broke a promise.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    let scenario = Scenario::of_the_paper()?;
    let seeds: Vec<u64> = args.seed.map_or_else(
        || (args.first_seed..args.first_seed.saturating_add(args.seeds)).collect(),
        |seed| vec![seed],
    );
    ensure!(!seeds.is_empty(), "--seeds is 0: need at least 1");
    let sets: Vec<usize> = args.ws.map_or_else(|| vec![15, 25, 35], |ws| vec![ws]);
    let memories: Vec<u64> = args.memory.map_or_else(|| vec![7200, 7600], |memory| vec![memory]);
    let mut report = Report::new("lalb", seeds.clone());
    for (ws, memory) in sets.iter().flat_map(|ws| memories.iter().map(|memory| (*ws, *memory))) {
        ensure!((1..=10_000).contains(&ws), "--ws is {ws}: need 1 to 10000");
        let shares = match &args.trace {
            None => zipf(ws, args.skew, scenario.minutes),
            Some(path) => {
                let reading = || format!("reading {}", path.display());
                let file = std::fs::File::open(path).with_context(reading)?;
                let functions = read_azure_counts(std::io::BufReader::new(file)).with_context(reading)?;
                trace(&functions, ws, args.from_minute, scenario.minutes)?
            }
        };
        let cell = Cell { scenario: &scenario, args, ws, memory, shares, seeds: &seeds };
        report.rows.extend(cell.rows(own)?);
    }
    if !args.sustainable {
        report.paper = scenario.paper;
    }
    Ok(report)
}

type New<'a> = Box<dyn Fn() -> Result<WholePool> + 'a>;

/// A row of the table.
struct Policy<'a> {
    name: &'a str,
    limit: Option<u32>,
    new: New<'a>,
    /// Comparisons: the number of the other policy, the end of the columns' names, the figures.
    cuts: Vec<(usize, &'static str, &'static [Measure])>,
}

impl Policy<'_> {
    fn about(&self, ws: usize, memory: u64) -> Map<String, Value> {
        let about = [("policy", self.name.into()), ("ws", ws.into()), ("memory_mib", memory.into())];
        let limit = self.limit.map(|limit| ("limit", limit.into()));
        row(&about.into_iter().chain(limit).collect::<Vec<_>>())
    }
}

const MEAN: Measure = ("latency", |f| f.mean);
const MISS: Measure = ("miss", |f| f.miss);
const OVER_LALB: &[Measure] = &[MEAN, MISS, ("variance", |f| f.variance)];
const OVER_BALANCE: &[Measure] =
    &[MEAN, MISS, ("false_miss", |f| f.false_miss), ("duplicates", |f| f.duplicates)];
const OVER_O3: &[Measure] = &[MEAN, ("p99", |f| f.p99), ("max", |f| f.max)];

fn policies<'a>(scenario: &Scenario, args: &Args, own: &'a Own) -> Vec<Policy<'a>> {
    let policy = |name, config: WholeConfig, cuts| {
        let new: New<'a> = Box::new(move || Ok(WholePool::new(config)?));
        Policy { name, limit: None, new, cuts }
    };
    let pool = || Ok::<_, anyhow::Error>(WholePool::new(WholeConfig::default())?);
    let o3 = WholeConfig::paper;
    if args.limits.is_empty() {
        let balance = (0, "", OVER_BALANCE);
        let ours = (2, "_vs_lalbo3", OVER_O3);
        let mut all = vec![
            Policy {
                new: Box::new(move || Ok(pool()?.with_policy(Box::new(LoadBalance)))),
                ..policy("load_balance", o3(0), Vec::new())
            },
            policy("lalb", o3(0), vec![balance]),
            policy("lalbo3_25", o3(scenario.skip_limit), vec![balance]),
            policy("lalbo3_45", o3(45), vec![balance, (1, "_vs_lalb", OVER_LALB)]),
            policy("evict_cost_aware", WholeConfig::default(), vec![balance, ours]),
        ];
        let own = own.requests().map(|(name, make)| Policy {
            name,
            limit: None,
            new: Box::new(move || Ok(pool()?.with_policy(make()))),
            cuts: vec![balance, ours],
        });
        all.extend(own);
        return all;
    }
    let lalb = args.limits.iter().position(|limit| *limit == 0);
    let lalb = lalb.map(|lalb| (lalb, "_vs_lalb", OVER_LALB));
    let sweep = |&limit: &u32| {
        let cuts = lalb.filter(|_| limit > 0).into_iter().collect();
        Policy { limit: Some(limit), ..policy("lalbo3", o3(limit), cuts) }
    };
    args.limits.iter().map(sweep).collect()
}

/// Functions on GPUs of some memory, and the seeds that policies are run with on them.
struct Cell<'a> {
    scenario: &'a Scenario,
    args: &'a Args,
    ws: usize,
    memory: u64,
    /// Shares of the functions in each minute.
    shares: Vec<Vec<f64>>,
    seeds: &'a [u64],
}

impl Cell<'_> {
    fn rows(&self, own: &Own) -> Result<Vec<Map<String, Value>>> {
        let policies = policies(self.scenario, self.args, own);
        let about = policies.iter().map(|policy| policy.about(self.ws, self.memory));
        if self.args.sustainable {
            let row = |(policy, mut line): (&Policy<'_>, Map<_, _>)| {
                line.insert("max_per_min".to_owned(), self.sustainable(policy)?.into());
                Ok(line)
            };
            return policies.iter().zip(about).map(row).collect();
        }
        let rate = self.args.rate.unwrap_or(self.scenario.per_minute);
        let found: Vec<Vec<Figures>> =
            policies.iter().map(|policy| self.run(policy, rate)).collect::<Result<_>>()?;
        let lines = policies.iter().zip(about).zip(&found).map(|((policy, mut line), runs)| {
            let of = |get: fn(&Figures) -> f64| round(mean(runs.iter().map(get)));
            line.extend(row(&[
                ("mean_s", of(|f| f.mean)),
                ("p99_s", of(|f| f.p99)),
                ("max_s", of(|f| f.max)),
                ("miss_pct", of(|f| 100.0 * f.miss)),
                ("false_miss_pct", of(|f| 100.0 * f.false_miss)),
                ("duplicates", of(|f| f.duplicates)),
                ("makespan_s", of(|f| f.makespan)),
                ("gpu_busy_pct", of(|f| 100.0 * f.busy)),
            ]));
            for &(base, suffix, figures) in &policy.cuts {
                for (what, get) in figures {
                    // Per seed, against the same arrivals; then the mean and the spread over the seeds.
                    let pairs = found[base].iter().zip(runs);
                    let cuts: Vec<f64> =
                        pairs.map(|(base, ours)| 100.0 * (1.0 - get(ours) / get(base))).collect();
                    let middle = mean(cuts.iter().copied());
                    let spread = mean(cuts.iter().map(|cut| (cut - middle).powi(2))).sqrt();
                    line.insert(format!("{what}_cut{suffix}_pct"), round(middle));
                    line.insert(format!("{what}_cut{suffix}_sd"), round(spread));
                }
            }
            line
        });
        Ok(lines.collect())
    }

    /// The largest rate at which the mean latency, over all seeds, stays below 5 s.
    fn sustainable(&self, policy: &Policy<'_>) -> Result<u64> {
        let mut best = 0;
        for rate in (100..=560).step_by(20) {
            if mean(self.run(policy, rate)?.iter().map(|figures| figures.mean)) >= 5.0 {
                break;
            }
            best = rate;
        }
        Ok(best)
    }

    /// A policy at a rate, seed by seed.
    fn run(&self, policy: &Policy<'_>, rate: u64) -> Result<Vec<Figures>> {
        self.seeds.iter().map(|&seed| self.once(policy, rate, seed)).collect()
    }

    fn once(&self, policy: &Policy<'_>, rate: u64, seed: u64) -> Result<Figures> {
        let Self { scenario, args, ws, .. } = *self;
        let mut rng = Rng::new(seed);
        let arrivals = arrivals(&self.shares, rate, &mut rng);
        let device = |gpu| (NodeId::new(gpu / scenario.gpus_per_node), Bytes::from_mib(self.memory));
        // Sizes are spread evenly over the functions; which one the most popular has is drawn, because the paper does not say.
        let mut sizes: Vec<usize> = (0..ws).collect();
        for last in (1..ws).rev() {
            sizes.swap(last, usize::try_from(rng.below(last as u64 + 1)).unwrap_or(0));
        }
        let model = |rank: usize| {
            let profile = &scenario.model[sizes[rank] * scenario.model.len() / ws];
            let load = Duration::from_micros(profile.load_ms * 10 * args.load_pct);
            let infer = Duration::from_millis(profile.infer_ms);
            (Bytes::from_mib(profile.memory_mib), Times { load, infer })
        };
        let cluster = Cluster {
            devices: (0..scenario.gpus).map(device).collect(),
            models: (0..ws).map(model).collect(),
            eviction: Duration::ZERO,
            arrivals,
        };
        Ok(figures(&cluster.run(seed, &policy.new)?, scenario.gpus))
    }
}

pub(super) fn round(value: f64) -> Value {
    json!((value * 100.0).round() / 100.0)
}

/// Shares of the functions in each minute: the same in all.
#[expect(clippy::cast_precision_loss, reason = "ranks are small")]
pub(super) fn zipf(ws: usize, skew: f64, minutes: usize) -> Vec<Vec<f64>> {
    let shares: Vec<f64> = (1..=ws).map(|rank| (rank as f64).powf(-skew)).collect();
    vec![shares; minutes]
}

/// Shares of the functions of a trace that are invoked most in these minutes.
fn trace(functions: &[FunctionCounts], ws: usize, from: usize, minutes: usize) -> Result<Vec<Vec<f64>>> {
    let window = |one: &FunctionCounts| -> Option<Vec<f64>> {
        let counts = one.counts.get(from.checked_sub(1)?..)?.get(..minutes)?;
        Some(counts.iter().map(|&count| f64::from(count)).collect())
    };
    let functions: Option<Vec<Vec<f64>>> = functions.iter().map(window).collect();
    let mut functions =
        functions.with_context(|| format!("the trace does not have {minutes} minutes from {from} on"))?;
    functions.sort_by(|a, b| b.iter().sum::<f64>().total_cmp(&a.iter().sum::<f64>()));
    functions.truncate(ws);
    ensure!(functions.len() == ws, "the trace has {} functions, not {ws}", functions.len());
    Ok((0..minutes).map(|minute| functions.iter().map(|counts| counts[minute]).collect()).collect())
}

/// Requests of each function in a minute: largest remainders, so that they add up to the rate.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "counts are small and not negative"
)]
fn counts(shares: &[f64], rate: u64) -> Vec<u64> {
    let total: f64 = shares.iter().sum();
    if total <= 0.0 {
        return vec![0; shares.len()];
    }
    let exact: Vec<f64> = shares.iter().map(|share| share / total * rate as f64).collect();
    let mut counts: Vec<u64> = exact.iter().map(|exact| exact.floor() as u64).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()).then(a.cmp(b)));
    let left = rate.saturating_sub(counts.iter().sum());
    for function in order.into_iter().cycle().take(usize::try_from(left).unwrap_or(0)) {
        counts[function] += 1;
    }
    counts
}

/// Requests at random times within each minute, in order.
pub(super) fn arrivals(shares: &[Vec<f64>], rate: u64, rng: &mut Rng) -> Vec<Arrival> {
    let mut arrivals = Vec::new();
    for (minute, shares) in (0u64..).zip(shares) {
        for (function, count) in (0u32..).zip(counts(shares, rate)) {
            for _ in 0..count {
                let at = Timestamp::from_nanos(minute * 60_000_000_000 + rng.below(60_000_000_000));
                arrivals.push(Arrival { at, model: function });
            }
        }
    }
    arrivals.sort_by_key(|arrival| arrival.at);
    arrivals
}

#[expect(clippy::cast_precision_loss, reason = "reports")]
fn figures(answered: &Answered, gpus: u32) -> Figures {
    let Answered { latencies, end, running, notes } = answered;
    let average = mean(latencies.iter().copied());
    let makespan = end.saturating_since(Timestamp::ZERO).as_secs_f64();
    Figures {
        mean: average,
        p99: percentile(latencies, 990),
        max: percentile(latencies, 1000),
        variance: mean(latencies.iter().map(|latency| (latency - average).powi(2))),
        miss: notes.misses as f64 / notes.answered as f64,
        false_miss: notes.false_misses as f64 / notes.misses as f64,
        duplicates: notes.copies_of_first(*end),
        makespan,
        busy: running.as_secs_f64() / makespan / f64::from(gpus),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_sweep_begins_at_lalb_and_meets_the_fixed_limit() {
        let rows = |flags: &str| {
            let flags = format!("lalb --ws 35 --memory 7200 --seeds 2 {flags}");
            let own = Own::default().with_requests("mine", || Box::new(LoadBalance));
            run(&Cli::parse_from(flags.split_whitespace()).args, &own).unwrap().rows
        };
        let (sweep, fixed) = (rows("--limits 0,5,25,45"), rows(""));
        assert_eq!(
            sweep.iter().map(|row| row["limit"].as_u64().unwrap()).collect::<Vec<_>>(),
            [0, 5, 25, 45]
        );
        let named = |policy: &str| fixed.iter().find(|row| row["policy"] == policy).unwrap();
        let equal = |one: &Map<String, Value>, other: &Map<String, Value>| {
            ["mean_s", "p99_s", "miss_pct"].iter().all(|key| one[*key] == other[*key])
        };
        for (one, policy) in [(0, "lalb"), (2, "lalbo3_25"), (3, "lalbo3_45")] {
            assert!(equal(&sweep[one], named(policy)), "{policy}");
        }
        assert!(equal(named("mine"), named("load_balance")) && !equal(named("mine"), named("lalb")));
        let cut = "latency_cut_vs_lalb_pct";
        assert!(!sweep[0].contains_key(cut) && sweep[3][cut] == fixed[3][cut], "{sweep:?}");
    }
}
