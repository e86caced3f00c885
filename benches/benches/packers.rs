//! Packers under churn, beside a peer in the same run.
//!
//! `cargo bench -p gshare-bench --bench packers` prints a table. `GSHARE_BENCH_GPUS=1000,10000` chooses the sizes of the pools of the
//! table, `GSHARE_BENCH_MIXES=light,fine` the distributions of the demands. `GSHARE_BENCH_TURNOVERS=3` sets how often every pool, ours
//! or the peer's and of any size, replaces all its placements before anything is timed. Churn leaves holes, and a pool that was only
//! filled has none to search yet.
//!
//! The peer's cost is the cost of asking bin after bin. First fit ends early for a small demand and late for a large demand, so its
//! median says little about the cost of a run of calls. The table has the median and the mean.
//!
//! A pool of 100 000 GPUs lies in memory, so the line below its rows gives the time of a read from memory at that moment.

use std::time::Instant;

use gshare_bench::churn::{Churn, Times, percentile};
use gshare_bench::mixes::{Mix, SplitMix64};
use gshare_bench::peers::{Guillotiere, Ours, Pool};
use gshare_bench::runs_as_test;
use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer};
use gshare_sched::place::{DiluConfig, DiluPacker};

/// Samples of each pool. A shared machine slows down for milliseconds and for seconds at a time, and compared pools must have seen
/// the same, so pools take turns.
const SAMPLES: usize = 15;

/// GPUs up to which our pool is compared with the peer.
const COMPARED: u32 = 10_000;

/// The times of a pool: nanoseconds, the least of [`SAMPLES`].
#[derive(Debug, Clone, Copy)]
struct Measured {
    place_p50: u32,
    place_p99: u32,
    place_mean: u32,
    release_p50: u32,
    release_p99: u32,
}

impl Measured {
    const MOST: Self = Self {
        place_p50: u32::MAX,
        place_p99: u32::MAX,
        place_mean: u32::MAX,
        release_p50: u32::MAX,
        release_p99: u32::MAX,
    };

    fn of(Times { place_ns, release_ns, .. }: &mut Times) -> Self {
        let sum: u64 = place_ns.iter().map(|ns| u64::from(*ns)).sum();
        Self {
            place_p50: percentile(place_ns, 0.5),
            place_p99: percentile(place_ns, 0.99),
            place_mean: u32::try_from(sum / (place_ns.len() as u64).max(1)).unwrap_or(u32::MAX),
            release_p50: percentile(release_ns, 0.5),
            release_p99: percentile(release_ns, 0.99),
        }
    }

    fn least(&mut self, other: Self) {
        self.place_p50 = self.place_p50.min(other.place_p50);
        self.place_p99 = self.place_p99.min(other.place_p99);
        self.place_mean = self.place_mean.min(other.place_mean);
        self.release_p50 = self.release_p50.min(other.release_p50);
        self.release_p99 = self.release_p99.min(other.release_p99);
    }
}

/// Times of some rounds. The rounds before them do not count: another pool was here in between, and left its own in the caches.
fn sample<P: Pool>(churn: &mut Churn<P>, rounds: usize) -> Measured {
    (0..rounds).for_each(|_| churn.round(&mut Times::default()));
    let mut times = Times::default();
    (0..rounds).for_each(|_| churn.round(&mut times));
    Measured::of(&mut times)
}

/// Our pool of `gpus` GPUs under one mix, and the peer's where it is compared.
fn measure(gpus: u32, mix: Mix) -> (Measured, [f64; 2], Option<Measured>) {
    let (count, turnovers) = (gpus as usize, turnovers());
    let mut ours = Churn::new(Ours::new(gpus, MaxRectsConfig::default()), mix, count, 0.5, 1, 1);
    ours.turn_over(turnovers);
    let mut peer = (gpus <= COMPARED).then(|| {
        let mut peer = Churn::new(Guillotiere::new(count, 100), mix, count, 0.5, 100, 1);
        peer.turn_over(turnovers);
        peer
    });
    let (mut least, mut of_peer) = (Measured::MOST, Measured::MOST);
    for _ in 0..SAMPLES {
        least.least(sample(&mut ours, 60));
        if let Some(peer) = &mut peer {
            of_peer.least(sample(peer, if gpus > 1_000 { 2 } else { 10 }));
        }
    }
    (least, [ours.used_ratio(), ours.per_bin()], peer.map(|_| of_peer))
}

/// A figure beside the most it may be.
fn at_most(measured: u32, bar: u32) -> String {
    format!("{measured}/{bar}{}", if measured <= bar { "" } else { " !" })
}

/// How many times as long the peer takes, beside the least it should be.
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

/// Places that fail in a pool that is nearly full: filled until twenty demands in a row find no room, every second placement taken
/// away, then demands of the second kind are tried until none fits, and again while others come and go.
fn nearly_full() {
    println!("places that fail in a nearly full pool of 1000 GPUs, us: p50, p99, longest");
    let demand = |width: usize, height: usize| {
        let [width, height] = [width, height].map(|side| u16::try_from(side).unwrap_or(u16::MAX));
        Demand::new(Quota::new(width).unwrap_or_default(), SmShare::new(height).unwrap_or_default())
    };
    for side in [500, 1_000, 2_000, 3_300] {
        let larger = side * 6 / 5;
        let name = format!("squares of {} %", larger as f64 / 100.0);
        failing(&name, |_| demand(side, side), |_| demand(larger, larger));
    }
    let drawn = |rng: &mut SplitMix64| demand(100 + rng.below(3_901), 100 + rng.below(3_901));
    failing("random sides of 1 to 40 %", drawn, drawn);
}

fn failing(
    name: &str,
    first: impl Fn(&mut SplitMix64) -> Demand,
    second: impl Fn(&mut SplitMix64) -> Demand,
) {
    let mut pool = MaxRects::new(MaxRectsConfig::default());
    for gpu in 0..1_000 {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(80))).expect("a new GPU");
    }
    let (mut rng, mut live, mut refused) = (SplitMix64::new(1), Vec::new(), 0);
    while refused < 20 {
        match pool.place(&first(&mut rng)) {
            Ok(placed) => {
                live.push(placed.placement.id);
                refused = 0;
            }
            Err(_) => refused += 1,
        }
    }
    for index in (0..live.len()).rev().step_by(2) {
        pool.release(live.swap_remove(index)).expect("a live placement");
    }
    let mut failed = Vec::new();
    while failed.len() < 5_000 {
        let demand = second(&mut rng);
        let start = Instant::now();
        let placed = pool.place(&demand);
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
    println!("  {name}: {p50:.1} {p99:.1} {longest:.1}");
}

fn table() {
    nearly_full();
    let sizes = std::env::var("GSHARE_BENCH_GPUS").unwrap_or_else(|_| "100,1000,10000,100000".into());
    let sizes: Vec<u32> = sizes.split(',').filter_map(|size| size.trim().parse().ok()).collect();
    let names = std::env::var("GSHARE_BENCH_MIXES").ok();
    let wanted =
        |mix: &Mix| names.as_ref().is_none_or(|names| names.split(',').any(|name| name.trim() == mix.name()));
    println!(
        "place and release under churn at half load, ns/bar (! = missed): least of {SAMPLES} samples of single calls, with the \
         clock taken off; the peer also as a multiple of ours/bar"
    );
    println!(
        "{:>7} {:<8} {:<12} {:>11} {:>12} {:>8} {:>12} {:>8}",
        "gpus", "mix", "packer", "place p50", "p99", "mean", "release p50", "p99"
    );
    let mut medians = Vec::new();
    for &gpus in &sizes {
        for mix in Mix::PERCENT.into_iter().filter(wanted) {
            let line = |packer: &str, [p50, p99, release]: [String; 3], of: &Measured, more: String| {
                println!(
                    "{gpus:>7} {:<8} {packer:<12} {p50:>11} {p99:>12} {:>8} {release:>12} {:>8}  {more}",
                    mix.name(),
                    of.place_mean,
                    of.release_p99
                );
            };
            let (ours, [used, per_gpu], peer) = measure(gpus, mix);
            // More than eight placements a GPU (half) have no bar for place.
            let (p50, p99) = match mix {
                Mix::Half => (ours.place_p50.to_string(), ours.place_p99.to_string()),
                Mix::Fine => (at_most(ours.place_p50, 600), at_most(ours.place_p99, 2_500)),
                _ => (at_most(ours.place_p50, 250), at_most(ours.place_p99, 1_000)),
            };
            let release = at_most(ours.release_p50, if mix == Mix::Half { 2_000 } else { 1_000 });
            let filled = format!("{used:.3} times the GPUs of the area, {per_gpu:.1} pods each");
            line("default", [p50, p99, release], &ours, filled);
            medians.push((gpus, mix, ours.place_p50));
            if let Some(of) = peer {
                let bar = match gpus {
                    ..1_000 => 0.0,
                    1_000..10_000 => 8.0,
                    _ => 100.0,
                };
                let compared = [(of.place_p50, ours.place_p50), (of.place_mean, ours.place_mean)];
                let [p50, mean] = compared.map(|(peer, ours)| times(peer, ours, bar));
                let figures = [of.place_p50, of.place_p99, of.release_p50].map(|ns| ns.to_string());
                line("guillotiere", figures, &of, format!("p50 {p50}, mean {mean}"));
            }
        }
        if gpus > COMPARED {
            println!("{:>16} one read from memory here, now: {:.0} ns", "", memory_latency());
        }
    }
    println!("\nplace p50 at 100 000 GPUs over that at 1 000: bar 2");
    let of = |size: u32| medians.iter().filter(move |(gpus, ..)| *gpus == size);
    for ((_, mix, small), (.., large)) in of(1_000).zip(of(100_000)) {
        let ratio = f64::from(*large) / f64::from((*small).max(1));
        println!("  {:<8} {ratio:.2}{}", mix.name(), if ratio <= 2.0 { "" } else { " !" });
    }
    memory();
    println!(
        "heap allocations per call in steady state: 0, `cargo test -p gshare-sched --test pack_alloc` counts them\n"
    );
}

/// Row: 100 000 GPUs with eight placements each.
fn memory() {
    let before = gshare_bench::resident().unwrap_or(0);
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
    let bytes = gshare_bench::resident().unwrap_or(0).saturating_sub(before);
    println!("\n100 000 GPUs with 8 placements each: {} MB resident, bar 150", bytes / 1_000_000);
    std::hint::black_box(pool);
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
        let _ = measure(100, Mix::Profile);
    } else {
        table();
    }
    dilu();
    println!("took {:.0} s", start.elapsed().as_secs_f64());
}
