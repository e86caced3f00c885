//! Packers under churn, beside a peer in the same run.
//!
//! `cargo bench -p gshare-bench --bench packers` prints a table of each figure beside its bar. `GSHARE_BENCH_GPUS=1000,10000` chooses the sizes of the pools of the table, `GSHARE_BENCH_MIXES=light,fine` the distributions of the demands.
//! `GSHARE_BENCH_TURNOVERS=3` sets how often every pool, ours or a peer's and of any size, replaces all its placements before
//! anything is timed. Churn leaves holes, and a pool that was only filled has none to search yet.
//!
//! A peer's cost is the cost of asking bin after bin. First fit ends early for a small demand and late for a large demand, so its
//! median says little about the cost of a run of calls. The table has the median and the mean.
//!
//! A pool of 100 000 GPUs lies in memory, so the line below its rows gives the time of a read from memory at that moment.

use std::time::{Duration, Instant};

use gshare_bench::churn::{Churn, Nothing, Record as _, Sums, Times, percentile};
use gshare_bench::mixes::{Mix, SplitMix64};
use gshare_bench::peers::{Guillotiere, Ours, Pool};
use gshare_bench::runs_as_test;
use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, Heuristic, MaxRects, MaxRectsConfig, Packer};
use gshare_sched::place::{DiluConfig, DiluPacker};

/// Our rules of placement.
const RULES: [&str; 3] = ["area", "default", "contact"];

const MIXES: [Mix; 6] =
    [Mix::Profile, Mix::Light, Mix::Fine, Mix::Half, Mix::FineBasisPoints, Mix::HalfBasisPoints];

/// The papers' rule.
fn area_fit() -> MaxRectsConfig {
    MaxRectsConfig::default().with_rearrange_gpus(0)
}

fn contact() -> MaxRectsConfig {
    MaxRectsConfig::default().with_heuristic(Heuristic::ContactCorner)
}

/// Samples of each pool. A shared machine slows down for milliseconds and for seconds at a time, and compared pools must have seen
/// the same, so pools take turns. Pools up to [`COMPARED`] GPUs take one sample a turn. Larger pools push each other out of the
/// caches. They take [`LARGE`] a turn, after a first sample that does not count.
const SAMPLES: usize = 15;
const LARGE: usize = 3;

/// GPUs up to which pools are compared with the peer.
const COMPARED: u32 = 10_000;

/// The times of a pool: nanoseconds, the least of [`SAMPLES`].
#[derive(Debug, Clone, Copy)]
struct Measured {
    place_p50: u32,
    place_p99: u32,
    place_mean: u32,
    release_p50: u32,
    release_p99: u32,
    release_mean: u32,
    used: f64,
    per_bin: f64,
}

/// A pool that is measured beside others.
trait Lane {
    fn sample(&mut self) -> [u32; 6];
    fn measured(&self, least: [u32; 6]) -> Measured;
}

/// A pool under churn, and the rounds of a sample.
struct Churned<P: Pool>(Churn<P>, usize);

impl<P: Pool> Lane for Churned<P> {
    fn sample(&mut self) -> [u32; 6] {
        let Self(churn, rounds) = self;
        // Others were here in between, and left their own in the caches.
        for _ in 0..*rounds {
            churn.round(&mut Nothing);
        }
        let (mut times, mut sums) = (Times::default(), Sums::default());
        for _ in 0..*rounds {
            churn.round(&mut times);
            churn.round(&mut sums);
        }
        let (place, release) = (&mut times.place_ns, &mut times.release_ns);
        [
            percentile(place, 0.5),
            percentile(place, 0.99),
            mean(sums.place, sums.places),
            percentile(release, 0.5),
            percentile(release, 0.99),
            mean(sums.release, sums.releases),
        ]
    }

    fn measured(&self, least: [u32; 6]) -> Measured {
        let [place_p50, place_p99, place_mean, release_p50, release_p99, release_mean] = least;
        let (used, per_bin) = (self.0.used_ratio(), self.0.per_bin());
        Measured { place_p50, place_p99, place_mean, release_p50, release_p99, release_mean, used, per_bin }
    }
}

/// The compared pools for `gpus` GPUs and one mix, filled and replaced: ours by rule, then the peer.
fn lanes(gpus: u32, mix: Mix) -> Vec<(&'static str, Box<dyn Lane>)> {
    fn lane<P: Pool + 'static>(mut churn: Churn<P>, rounds: usize) -> Box<dyn Lane> {
        churn.turn_over(turnovers());
        Box::new(Churned(churn, rounds))
    }
    let count = gpus as usize;
    let ours = |config| lane(Churn::new(Ours::new(gpus, config), mix, count, 0.5, 1, 1), 60);
    let mut lanes = vec![
        ("area", ours(area_fit())),
        ("default", ours(MaxRectsConfig::default())),
        ("contact", ours(contact())),
    ];
    if gpus <= COMPARED && Mix::PERCENT.contains(&mix) {
        let few = if gpus > 1_000 { 2 } else { 10 };
        let peer = Churn::new(Guillotiere::new(count, 100), mix, count, 0.5, 100, 1);
        lanes.push(("guillotiere", lane(peer, few)));
    }
    lanes
}

fn measure(gpus: u32, mix: Mix) -> Vec<(&'static str, Measured)> {
    let mut lanes = lanes(gpus, mix);
    let mut least = vec![[u32::MAX; 6]; lanes.len()];
    let large = gpus > COMPARED;
    let at_a_turn = if large { LARGE } else { 1 };
    for _ in 0..SAMPLES / at_a_turn {
        for ((_, lane), least) in lanes.iter_mut().zip(&mut least) {
            if large {
                lane.sample();
            }
            for _ in 0..at_a_turn {
                least.iter_mut().zip(lane.sample()).for_each(|(least, sample)| *least = sample.min(*least));
            }
        }
    }
    lanes.iter().zip(least).map(|((name, lane), least)| (*name, lane.measured(least))).collect()
}

fn mean(time: Duration, calls: u64) -> u32 {
    u32::try_from(time.as_nanos() / u128::from(calls.max(1))).unwrap_or(u32::MAX)
}

/// A figure beside the most it may be.
fn at_most(measured: u32, bar: u32) -> String {
    format!("{measured}/{bar}{}", if measured <= bar { "" } else { " !" })
}

/// How many times as long a peer takes, beside the least it should be.
fn times(peer: u32, ours: u32, bar: f64) -> String {
    let ratio = f64::from(peer) / f64::from(ours.max(1));
    format!("{ratio:.1}x/{bar}x{}", if ratio >= bar { "" } else { " !" })
}

/// Nanoseconds of a read that waits for the previous read, over 64 MiB in no order. A pool of 100 000 GPUs fits no cache, so each
/// call has two or three of these reads, and on a shared machine they may take twice as long a minute later.
fn memory_latency() -> f64 {
    const READS: usize = 500_000;
    // One word a cache line, each naming the next of a single cycle through all (Sattolo 1986).
    let mut lines: Vec<[usize; 8]> = (0..1 << 20).map(|line| [line; 8]).collect();
    let mut rng = SplitMix64::new(1);
    for line in (1..lines.len()).rev() {
        let other = rng.below(line);
        (lines[line][0], lines[other][0]) = (lines[other][0], lines[line][0]);
    }
    let start = Instant::now();
    let last = (0..READS).fold(0, |line, _| lines[line][0]);
    let time = start.elapsed();
    std::hint::black_box(last);
    time.as_secs_f64() * 1e9 / READS as f64
}

/// How often a pool is replaced before it is measured.
fn turnovers() -> usize {
    std::env::var("GSHARE_BENCH_TURNOVERS").ok().and_then(|count| count.parse().ok()).unwrap_or(3)
}

/// Places that fail in a pool that is nearly full: filled with squares, every second taken away, then squares a fifth larger are
/// tried until none fits, and again while others come and go.
fn nearly_full() {
    println!("places that fail in a nearly full pool of 1000 GPUs, us: p50, p99, longest");
    for side in [500, 1_000, 2_000, 3_300] {
        let demand = |side: u16| {
            Demand::new(Quota::new(side).unwrap_or_default(), SmShare::new(side).unwrap_or_default())
        };
        let mut pool = MaxRects::new(MaxRectsConfig::default());
        for gpu in 0..1_000 {
            pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(80))).expect("a new GPU");
        }
        let mut live = Vec::new();
        while let Ok(placed) = pool.place(&demand(side)) {
            live.push(placed.placement.id);
        }
        let mut rng = SplitMix64::new(1);
        for index in (0..live.len()).rev().step_by(2) {
            pool.release(live.swap_remove(index)).expect("a live placement");
        }
        let (larger, mut failed) = (demand(side * 6 / 5), Vec::new());
        while failed.len() < 5_000 {
            let start = Instant::now();
            let placed = pool.place(&larger);
            let took = start.elapsed();
            if let Ok(placed) = placed {
                live.push(placed.placement.id);
                continue;
            }
            failed.push(u32::try_from(took.as_nanos()).unwrap_or(u32::MAX));
            if failed.len().is_multiple_of(4) {
                pool.release(live.swap_remove(rng.below(live.len()))).expect("a live placement");
            }
        }
        let [p50, p99, longest] = [0.5, 0.99, 1.0].map(|part| f64::from(percentile(&mut failed, part)) / 1e3);
        println!("  squares of {} %: {p50:.1} {p99:.1} {longest:.1}", f64::from(side * 6 / 5) / 100.0);
    }
}

fn table() {
    nearly_full();
    let sizes = std::env::var("GSHARE_BENCH_GPUS").unwrap_or_else(|_| "100,1000,10000,100000".into());
    let sizes: Vec<u32> = sizes.split(',').filter_map(|size| size.trim().parse().ok()).collect();
    let mixes: Vec<Mix> = match std::env::var("GSHARE_BENCH_MIXES") {
        Ok(names) => {
            MIXES.into_iter().filter(|mix| names.split(',').any(|name| name.trim() == mix.name())).collect()
        }
        Err(_) => MIXES.to_vec(),
    };
    println!(
        "place and release under churn at half load, ns/bar (! = missed): least of {SAMPLES} samples; percentiles of single \
         calls, with the clock taken off; means of calls in a row"
    );
    println!(
        "  rules: area (best area fit), default (the same, which re-arranges), contact (the default in another corner)"
    );
    println!(
        "{:>7} {:<8} {:<12} {:>11} {:>12} {:>6} {:>12} {:>12} {:>7} {:>9}",
        "gpus", "mix", "rule", "place p50", "p99", "mean", "release p50", "p99", "used", "pods/GPU"
    );
    let mut all: Vec<(u32, Mix, &str, Measured)> = Vec::new();
    for &gpus in &sizes {
        for &mix in &mixes {
            let (fine, half) = (mix == Mix::Fine, mix == Mix::Half);
            // Sizes in basis points have no bar, and more than eight placements a GPU (half) none for place.
            let basis = !Mix::PERCENT.contains(&mix);
            let bar = |measured: u32, bar: Option<u32>| {
                bar.map_or_else(|| measured.to_string(), |bar| at_most(measured, bar))
            };
            let placed = (!basis && !half).then_some(if fine { (600, 2_500) } else { (250, 1_000) });
            let released = (!basis).then_some(if half { 2_000 } else { 1_000 });
            for (rule, it) in measure(gpus, mix) {
                if RULES.contains(&rule) {
                    println!(
                        "{gpus:>7} {:<8} {rule:<12} {:>11} {:>12} {:>6} {:>12} {:>12} {:>7.3} {:>9.1}",
                        mix.name(),
                        bar(it.place_p50, placed.map(|bars| bars.0)),
                        bar(it.place_p99, placed.map(|bars| bars.1)),
                        it.place_mean,
                        bar(it.release_p50, released),
                        it.release_p99,
                        it.used,
                        it.per_bin
                    );
                }
                all.push((gpus, mix, rule, it));
            }
            if gpus > COMPARED {
                println!("{:>16} one read from memory here, now: {:.0} ns", "", memory_latency());
            }
        }
    }
    let of = |gpus: u32, mix: Mix, rule: &str| {
        all.iter().find(|row| (row.0, row.1, row.2) == (gpus, mix, rule)).map(|row| row.3)
    };
    println!("\nplace p50 at 100 000 GPUs over that at 1 000: bar 2");
    for mix in Mix::PERCENT {
        if let (Some(small), Some(large)) = (of(1_000, mix, "default"), of(100_000, mix, "default")) {
            let ratio = f64::from(large.place_p50) / f64::from(small.place_p50.max(1));
            println!("  {:<8} {ratio:.2}{}", mix.name(), if ratio <= 2.0 { "" } else { " !" });
        }
    }
    println!(
        "\nthe peer, place: how many times as long as ours takes / bar; at 100 GPUs no bar. `area` is the papers' rule, \
         `default` is ours, which re-arranges"
    );
    println!(
        "{:>6} {:<8} {:<12} {:>8} {:>8} {:>15} {:>15} {:>15} {:>15} {:>17} {:>6}",
        "gpus",
        "mix",
        "peer",
        "p50 ns",
        "mean ns",
        "area, p50",
        "default, p50",
        "area, mean",
        "default, mean",
        "place+release ns",
        "used"
    );
    for &gpus in sizes.iter().filter(|gpus| **gpus <= COMPARED) {
        for mix in Mix::PERCENT {
            let (Some(area), Some(default)) = (of(gpus, mix, "area"), of(gpus, mix, "default")) else {
                continue;
            };
            let pair = |it: &Measured| it.place_mean.saturating_add(it.release_mean);
            let line = |name: &str, it: &Measured, ratios: [String; 4]| {
                let [a, b, c, d] = ratios;
                println!(
                    "{gpus:>6} {:<8} {name:<12} {:>8} {:>8} {a:>15} {b:>15} {c:>15} {d:>15} {:>17} {:>6.3}",
                    mix.name(),
                    it.place_p50,
                    it.place_mean,
                    pair(it),
                    it.used
                );
            };
            line("(area)", &area, Default::default());
            line("(default)", &default, Default::default());
            let bar = match gpus {
                ..1_000 => 0.0,
                1_000..10_000 => 8.0,
                _ => 100.0,
            };
            let Some(it) = of(gpus, mix, "guillotiere") else { continue };
            let ratios = [
                times(it.place_p50, area.place_p50, bar),
                times(it.place_p50, default.place_p50, bar),
                times(it.place_mean, area.place_mean, bar),
                times(it.place_mean, default.place_mean, bar),
            ];
            line("guillotiere", &it, ratios);
        }
    }
    memory();
    println!(
        "heap allocations per call in steady state: 0, `cargo test -p gshare-sched --test pack_alloc` counts them\n"
    );
}

/// Row: 100 000 GPUs with eight placements each.
fn memory() {
    let mut pool = MaxRects::new(MaxRectsConfig::default());
    let eighth = Demand::new(
        Quota::from_percent(50).unwrap_or_default(),
        SmShare::from_percent(25).unwrap_or_default(),
    );
    for gpu in 0..100_000 {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(16))).expect("a new GPU");
    }
    for _ in 0..800_000 {
        pool.place(&eighth).expect("eight a GPU");
    }
    println!("\n100 000 GPUs with 8 placements each: {:.1} MB, bar 150", megabytes(pool.memory_bytes()));
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

fn dilu_pool(gpus: u32) -> (DiluPacker, Vec<gshare_core::PlacementId>, SplitMix64) {
    let mut pool = DiluPacker::new(DiluConfig::default()).expect("the defaults are valid");
    for gpu in 0..gpus {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(40))).expect("a new GPU");
    }
    let mut rng = SplitMix64::new(1);
    let mut live = Vec::new();
    for _ in 0..gpus * 3 / 2 {
        live.extend(pool.place(&dilu_demand(&mut rng)).ok().map(|placed| placed.placement.id));
    }
    (pool, live, rng)
}

/// An inference instance of the published distribution, in whole per cents.
fn dilu_demand(rng: &mut SplitMix64) -> Demand {
    let percent =
        |value: usize| SmShare::from_percent(u16::try_from(value).unwrap_or(100)).unwrap_or(SmShare::WHOLE);
    let request = 20 + rng.below(21);
    Demand::new(Quota::WHOLE, percent(request))
        .with_sm_limit(percent((request + 20).max(30 + rng.below(31))))
        .with_memory(Bytes::from_gib(3 + rng.below(8) as u64))
}

fn dilu() {
    println!("dilu under churn, ns/bar (! = missed): least of 5 samples");
    let (sizes, churn): (&[u32], _) =
        if runs_as_test() { (&[300], 100) } else { (&[300, 3_000, 30_000, 300_000], 10_000) };
    for &gpus in sizes {
        let (mut pool, mut live, mut rng) = dilu_pool(gpus);
        let mut samples: Vec<[u32; 3]> = (0..5)
            .map(|_| {
                let mut times = Times::default();
                for _ in 0..churn {
                    exchange(&mut pool, &mut live, &mut rng, &mut times);
                }
                let p99 = percentile(&mut times.place_ns, 0.99);
                [percentile(&mut times.place_ns, 0.5), p99, percentile(&mut times.release_ns, 0.5)]
            })
            .collect();
        samples.sort_unstable();
        let ([place, p99, release], middle) = (samples[0], samples[2]);
        let bar = if gpus == 30_000 { at_most(place, 600) } else { place.to_string() };
        println!(
            "dilu, {gpus:>7} GPUs: place p50 {bar} ns p99 {p99} release p50 {release} (median {})",
            middle[0]
        );
    }
}

/// One placement leaves, and another demand comes.
fn exchange(
    pool: &mut DiluPacker,
    live: &mut Vec<gshare_core::PlacementId>,
    rng: &mut SplitMix64,
    times: &mut Times,
) {
    let id = live.swap_remove(rng.below(live.len()));
    times.release(|| pool.release(id)).expect("a live id");
    let demand = dilu_demand(rng);
    live.extend(times.place(|| pool.place(&demand)).ok().map(|placed| placed.placement.id));
}

fn main() {
    let start = Instant::now();
    // `cargo test --benches` and `cargo bench -- --test` only want to know that it runs.
    if runs_as_test() {
        measure(100, Mix::Profile);
    } else {
        table();
    }
    dilu();
    println!("took {:.0} s", start.elapsed().as_secs_f64());
}
