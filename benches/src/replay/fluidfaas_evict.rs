//! Eviction and keep-alive apart from everything else: who leaves a slice pool, and how long functions stay warm.
//!
//! **Eviction**: the functions of a trace share a pool of slice memory. A call whose model is not there loads it at 12 GB/s and
//! stalls for that long; the model that the policy names leaves first. Figures: stall, and stall over that of LRU. `clairvoyant`
//! evicts the model whose next use is farthest (Belady's rule, which ignores sizes).
//!
//! **Keep-alive**: a call is cold when the function is not warm at the time since its last call. Figures: share of cold calls,
//! and minutes that functions were resident without being called. The adaptive rule is run at several break-evens; the row
//! to compare with ten minutes fixed is the one with the same share of cold calls, which is interpolated.
//!
//! What a rule can save depends on the calls. Generated ones are like those of a published sample of the Azure Functions
//! 2019 trace (200 functions of `InVitro`, SOSP'23): an eighth are timers with its periods, the others have its quantiles of calls
//! a day and about the variability of its gaps. That the gaps of a function depend on each other and on the time of day
//! is not in them, so a rule gains less on them than on the trace.

use super::{Report, row};
use anyhow::{Context, Result, bail};
use gshare_core::{Bytes, Duration, Timestamp};
use gshare_sched::pipeline::{EvictionOrder, EvictionPolicy, Gaps, KeepAlive, Stay};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::load_trace::read_azure_counts;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seeds of sizes, of the times within a minute, and of generated calls
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,5")]
    seeds: Vec<u64>,
    /// Calls per minute as a CSV shaped like the Azure Functions 2019 trace [default: generated]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Functions that share the pool
    #[arg(long, default_value_t = 60)]
    functions: usize,
    /// Memory of the pool
    #[arg(long, default_value = "40GiB")]
    pool: Bytes,
    /// Half-lives of the use counts
    #[arg(long, value_delimiter = ',', default_value = "600s,3600s,14400s")]
    half_life: Vec<String>,
    /// What a cold start is worth, in minutes of residency
    #[arg(long, value_delimiter = ',', default_value = "5,10,15,20,30,60")]
    break_even: Vec<u64>,
}

/// Calls in their order: the time, and the function.
type Calls = Vec<(Timestamp, usize)>;

/// Periods in minutes of the timers in the sample, and how many have each.
const TIMERS: [(usize, u64); 7] = [(7, 1), (1, 2), (5, 3), (1, 4), (6, 5), (3, 15), (1, 60)];
/// Percent of functions that are timers.
const TIMERS_PERCENT: u64 = 12;
/// Calls a day of the other functions of the sample: up to this share (in thousandths) have at most this number.
const CALLS: [(u64, f64); 16] = [
    (0, 1.0),
    (90, 1.0),
    (180, 2.0),
    (270, 4.0),
    (360, 9.0),
    (450, 15.0),
    (550, 35.0),
    (640, 76.0),
    (730, 175.0),
    (820, 556.0),
    (870, 1_141.0),
    (910, 1_540.0),
    (955, 2_050.0),
    (980, 4_200.0),
    (990, 8_600.0),
    (1_000, 43_000.0),
];

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// A day of a generated function: calls in each minute.
fn generated(rng: &mut Rng) -> Result<Vec<u32>> {
    let mut minutes = vec![0u32; 1_440];
    if rng.percent(TIMERS_PERCENT) {
        let all: Vec<u64> =
            TIMERS.iter().flat_map(|&(count, period)| std::iter::repeat_n(period, count)).collect();
        let period = rng.pick(&all).copied().unwrap_or(1);
        let first = usize::try_from(rng.below(period))?;
        minutes.iter_mut().skip(first).step_by(usize::try_from(period)?).for_each(|count| *count = 1);
        return Ok(minutes);
    }
    let share = rng.below(1_000);
    let above = CALLS.iter().position(|&(upto, _)| share < upto).context("a share below the last")?;
    let ((from, low), (to, high)) = (CALLS[above - 1], CALLS[above]);
    let calls = low * (high / low).powf((share - from) as f64 / (to - from) as f64);
    // CV of the gaps: 0.5 to 3 by even chances for each octave, a median of 1.2.
    let cv = 0.5 * 6f64.powf(rng.below(1_000) as f64 / 1_000.0);
    for at in Arrivals::gamma(calls / 86_400.0, cv)?.until(Timestamp::ZERO + DAY, rng) {
        minutes[usize::try_from(at.as_nanos() / MINUTE.as_nanos())?] += 1;
    }
    Ok(minutes)
}

/// A day of calls, and how many functions there are.
fn calls(args: &Args, functions: Option<usize>, rng: &mut Rng) -> Result<(Calls, usize)> {
    let mut counts: Vec<Vec<u32>> = Vec::new();
    if let Some(path) = &args.trace {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        counts.extend(read_azure_counts(std::io::BufReader::new(file))?.into_iter().map(|one| one.counts));
    } else {
        for _ in 0..functions.unwrap_or(300) {
            counts.push(generated(rng)?);
        }
    }
    counts.retain(|counts| counts.iter().any(|&count| count > 0));
    if let Some(most) = functions {
        // Any of them, drawn.
        for place in 0..counts.len().saturating_sub(1) {
            let other = place + usize::try_from(rng.below((counts.len() - place) as u64))?;
            counts.swap(place, other);
        }
        counts.truncate(most);
    }
    let mut calls = Vec::new();
    for (function, counts) in counts.iter().enumerate() {
        let times = Arrivals::counts(MINUTE, counts, rng).until(Timestamp::MAX, rng);
        calls.extend(times.into_iter().map(|at| (at, function)));
    }
    calls.sort_unstable();
    if calls.is_empty() {
        bail!("no calls at all");
    }
    Ok((calls, counts.len()))
}

/// Seconds of stall with a policy.
fn stall(calls: &Calls, sizes: &[Bytes], pool: Bytes, policy: EvictionPolicy) -> f64 {
    let reload = |function: usize| Duration::from_nanos(sizes[function].get() / 12);
    let mut order = EvictionOrder::new(policy);
    let (mut used, mut stall) = (0u64, Duration::ZERO);
    for &(at, function) in calls {
        order.know(at, function, reload(function), sizes[function]);
        if !order.is_resident(function) {
            stall = stall.saturating_add(reload(function));
            while used + sizes[function].get() > pool.get() {
                let Some(victim) = order.victim() else { break };
                order.leave(victim);
                used -= sizes[victim].get();
            }
            order.enter(function);
            used += sizes[function].get();
        }
        order.used(at, function);
    }
    stall.as_secs_f64()
}

/// The same by the farthest next use.
fn clairvoyant(calls: &Calls, sizes: &[Bytes], pool: Bytes) -> f64 {
    let mut next_use = vec![usize::MAX; calls.len()];
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    for (place, &(_, function)) in calls.iter().enumerate().rev() {
        next_use[place] = seen.insert(function, place).unwrap_or(usize::MAX);
    }
    let (mut resident, mut used, mut stall) = (BTreeMap::new(), 0u64, 0.0);
    for (place, &(_, function)) in calls.iter().enumerate() {
        if !resident.contains_key(&function) {
            stall += sizes[function].get() as f64 / 12e9;
            while used + sizes[function].get() > pool.get() {
                let victim = resident
                    .iter()
                    .max_by_key(|(_, next)| **next)
                    .map(|(victim, _): (&usize, &usize)| *victim);
                let Some(victim) = victim else { break };
                resident.remove(&victim);
                used -= sizes[victim].get();
            }
            used += sizes[function].get();
        }
        resident.insert(function, next_use[place]);
    }
    stall
}

/// Cold calls and minutes resident without a call.
fn keep(calls: &Calls, functions: usize, policy: KeepAlive) -> (u64, f64) {
    let mut all = Gaps::default();
    let mut each = vec![(Gaps::default(), None::<Timestamp>, Vec::<Stay>::new()); functions];
    let (mut cold, mut resident) = (0, 0.0);
    let waited = |stays: &[Stay], gap: Duration| {
        let warm = |stay: &Stay| gap.min(stay.to).saturating_sub(stay.from).as_secs_f64();
        stays.iter().map(warm).sum::<f64>() / 60.0
    };
    for &(at, function) in calls {
        let (gaps, last, stays) = &mut each[function];
        match *last {
            None => cold += 1,
            Some(last) => {
                let gap = at.saturating_since(last);
                cold += u64::from(!stays.iter().any(|stay| stay.from <= gap && gap <= stay.to));
                resident += waited(stays, gap);
                gaps.add(gap);
                all.add(gap);
            }
        }
        *last = Some(at);
        *stays = gaps.stays(&all, &policy);
    }
    let end = Timestamp::ZERO + DAY;
    for (_, last, stays) in &each {
        resident += last.map_or(0.0, |last| waited(stays, end.saturating_since(last)));
    }
    (cold, resident)
}

/// Minutes of the adaptive rule where it has this share of cold calls, between the two break-evens about it.
fn adaptive_at(cold: f64, points: &[(f64, f64)]) -> Option<f64> {
    let pair = points.windows(2).find(|pair| pair[1].0 <= cold && cold <= pair[0].0)?;
    let (more, less) = (pair[0], pair[1]);
    let part = if more.0 > less.0 { (more.0 - cold) / (more.0 - less.0) } else { 0.0 };
    Some(more.1 + part * (less.1 - more.1))
}

/// Runs both halves.
///
/// # Errors
/// A trace or a flag that cannot be.
pub fn run(args: &Args) -> Result<Report> {
    let mut report = Report::new("fluidfaas-evict", args.seeds.clone());
    let half_lives: Vec<Duration> =
        args.half_life.iter().map(|text| Ok(text.parse()?)).collect::<Result<_>>()?;
    let mut evictions: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    let mut keeps: BTreeMap<(u64, String), (u64, u64, f64)> = BTreeMap::new();
    for &seed in &args.seeds {
        let mut rng = Rng::new(seed);
        let (day, functions) = calls(args, Some(args.functions), &mut rng)?;
        // 0.5 to 16 GiB, by equal chances for each octave.
        let size = |rng: &mut Rng| {
            let octave = 512 << rng.below(5);
            Bytes::from_mib(octave + rng.below(octave))
        };
        let sizes: Vec<Bytes> = (0..functions).map(|_| size(&mut rng)).collect();
        let lru = stall(&day, &sizes, args.pool, EvictionPolicy::Lru);
        let mut note = |policy: String, stall: f64| {
            let sum = evictions.entry(policy).or_default();
            *sum = (sum.0 + stall, sum.1 + stall / lru);
        };
        note("LRU (paper)".to_owned(), lru);
        note("clairvoyant".to_owned(), clairvoyant(&day, &sizes, args.pool));
        for (&half_life, text) in half_lives.iter().zip(&args.half_life) {
            let policy = EvictionPolicy::CostAware { half_life };
            note(format!("cost-aware, half-life {text}"), stall(&day, &sizes, args.pool, policy));
        }
        let (day, functions) = calls(args, None, &mut Rng::new(seed))?;
        let longest = Duration::from_secs(24 * 3_600);
        let fixed = |minutes: u64| {
            (0, format!("{minutes} min fixed"), KeepAlive::Fixed { keep: Duration::from_secs(60 * minutes) })
        };
        let adaptive = args.break_even.iter().map(|&minutes| {
            let break_even = Duration::from_secs(60 * minutes);
            (minutes, format!("adaptive, {minutes} min"), KeepAlive::Adaptive { break_even, longest })
        });
        for (order, name, policy) in [5, 10, 20].map(fixed).into_iter().chain(adaptive) {
            let (cold, resident) = keep(&day, functions, policy);
            let sum = keeps.entry((order, name)).or_default();
            *sum = (sum.0 + cold, sum.1 + day.len() as u64, sum.2 + resident);
        }
    }
    let n = args.seeds.len().max(1) as f64;
    for (policy, (stall, over)) in evictions {
        report.rows.push(row(&[
            ("policy", policy.into()),
            ("stall_s", (stall / n).into()),
            ("stall_over_lru", (over / n).into()),
        ]));
    }
    // Adaptive with growing break-evens: share of cold calls, minutes.
    let share = |&(cold, all, resident): &(u64, u64, f64)| (cold as f64 / all as f64, resident);
    let points: Vec<_> =
        keeps.iter().filter(|((order, _), _)| *order > 0).map(|(_, sum)| share(sum)).collect();
    let (ten_cold, ten) = keeps.get(&(0, "10 min fixed".to_owned())).map_or((0.0, 1.0), share);
    let mut note = |policy: String, cold: f64, resident: f64| {
        report.rows.push(row(&[
            ("policy", policy.into()),
            ("cold_percent", (100.0 * cold).into()),
            ("resident_minutes", (resident / n).into()),
            ("resident_over_10_min", (resident / ten).into()),
        ]));
    };
    for ((_, policy), sum) in &keeps {
        let (cold, resident) = share(sum);
        note(policy.clone(), cold, resident);
    }
    if let Some(at) = adaptive_at(ten_cold, &points) {
        note("adaptive, at the cold share of 10 min".to_owned(), ten_cold, at);
    }
    report.paper.push(row(&[("policy", "LRU, 10 min fixed".into()), ("stall_over_lru", 1.0.into())]));
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        Args {
            seeds: vec![1, 2],
            trace: None,
            functions: 40,
            pool: Bytes::from_gib(40),
            half_life: vec!["3600s".to_owned()],
            break_even: vec![15],
        }
    }

    /// What the policies are for: less stall than LRU, and warm where it pays.
    #[test]
    fn cost_aware_eviction_stalls_less_than_lru_and_no_rule_beats_the_future() {
        let report = run(&args()).unwrap();
        let over = |policy: &str| {
            let row =
                report.rows.iter().find(|row| row["policy"].as_str().unwrap().starts_with(policy)).unwrap();
            row["stall_over_lru"].as_f64().unwrap()
        };
        assert!(over("cost-aware") < 1.0 && over("clairvoyant") < over("LRU"), "{:?}", report.rows);
    }
}
