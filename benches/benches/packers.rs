//! Packers under churn, beside their peers in the same run.
//!
//! `cargo bench -p gshare-bench --bench packers` first prints percentiles per call (criterion reports means only), then
//! runs criterion over the same pools. `GSHARE_BENCH_GPUS=1000,10000,100000` chooses the pool sizes of the percentiles.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group};
use gshare_bench::churn::{Churn, Nothing, Sums, Times, percentile};
use gshare_bench::mixes::{Mix, SplitMix64};
use gshare_bench::peers::{Etagere, Guillotiere, Ours, Pool, Scan};
use gshare_core::pack::{Demand, GpuSpec, Packer};
use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Heuristic, MaxRects, MaxRectsConfig};
use gshare_sched::place::{DiluConfig, DiluPacker};

const MIXES: [Mix; 6] =
    [Mix::Profile, Mix::Light, Mix::Fine, Mix::Half, Mix::FineBasisPoints, Mix::HalfBasisPoints];

fn area_fit() -> MaxRectsConfig {
    MaxRectsConfig::default().with_heuristic(Heuristic::BestAreaFit).with_rearrange_gpus(0)
}

fn contact() -> MaxRectsConfig {
    MaxRectsConfig::default().with_rearrange_gpus(0)
}

/// Five samples of `rounds` rounds each; the least and the median of their percentiles.
fn percentiles<P: Pool>(name: &str, gpus: usize, mix: Mix, mut churn: Churn<P>, warm: usize, rounds: usize) {
    for _ in 0..warm {
        churn.round(&mut Nothing);
    }
    let mut samples: Vec<[u32; 4]> = (0..5)
        .map(|_| {
            let mut times = Times::default();
            for _ in 0..rounds {
                churn.round(&mut times);
            }
            let (place, release) = (&mut times.place_ns, &mut times.release_ns);
            [
                percentile(place, 0.5),
                percentile(place, 0.99),
                percentile(release, 0.5),
                percentile(release, 0.99),
            ]
        })
        .collect();
    samples.sort_unstable();
    let (least, median) = (samples[0], samples[2]);
    println!(
        "{name:<22} {gpus:>7} {:<8} {:>9}/{:<9} {:>9}/{:<9} {:>9}/{:<9} {:>6.3}",
        mix.name(),
        least[0],
        median[0],
        least[1],
        median[1],
        least[2],
        median[2],
        churn.used_ratio()
    );
}

fn table() {
    let sizes = std::env::var("GSHARE_BENCH_GPUS").unwrap_or_else(|_| "100,1000,10000,100000".into());
    println!(
        "ns per call under churn at half load, least/median of 5 samples; the clock's own cost is taken off"
    );
    println!(
        "{:<22} {:>7} {:<8} {:^19} {:^19} {:^19} {:>6}",
        "packer", "gpus", "mix", "place p50", "place p99", "release p50", "used"
    );
    for gpus in sizes.split(',').filter_map(|size| size.trim().parse::<u32>().ok()) {
        let count = gpus as usize;
        let warm = (count / 8).max(400);
        for mix in MIXES {
            for (name, config) in [
                ("max_rects", contact()),
                ("max_rects_area_fit", area_fit()),
                ("max_rects_rearranging", MaxRectsConfig::default()),
            ] {
                let churn = Churn::new(Ours::new(gpus, config), mix, count, 0.5, 1, 1);
                percentiles(name, count, mix, churn, warm, 60);
            }
            let percent = Mix::PERCENT.contains(&mix);
            if percent && gpus <= 10_000 {
                let few = if gpus > 1_000 { 1 } else { 10 };
                let churn = Churn::new(Guillotiere::new(count, 100), mix, count, 0.5, 100, 1);
                percentiles("peer guillotiere", count, mix, churn, 10 * few, few);
                let churn = Churn::new(Etagere::new(count, 100), mix, count, 0.5, 100, 1);
                percentiles("peer etagere", count, mix, churn, 10 * few, few);
                let churn = Churn::new(Scan::new(count, 100), mix, count, 0.5, 100, 1);
                percentiles("peer algorithm 2", count, mix, churn, 5 * few, few);
            }
        }
    }
    memory();
}

/// Row: 100 000 GPUs with eight placements each.
fn memory() {
    let mut pool = MaxRects::new(MaxRectsConfig::default());
    let eighth = Demand::new(
        Quota::from_percent(50).unwrap_or_default(),
        SmShare::from_percent(25).unwrap_or_default(),
    );
    for gpu in 0..100_000 {
        pool.add_gpu(GpuId(gpu), GpuSpec::new(Bytes::from_gib(16))).expect("a new GPU");
    }
    for _ in 0..800_000 {
        pool.place(&eighth).expect("eight a GPU");
    }
    println!("100000 GPUs with 8 placements each: {:.1} MB", megabytes(pool.memory_bytes()));
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

fn churned<P: Pool>(criterion: &mut Criterion, name: &str, gpus: usize, pool: impl Fn() -> Churn<P>) {
    let mut churn = pool();
    for _ in 0..(gpus / 32).clamp(20, 400) {
        churn.round(&mut Nothing);
    }
    let mut group = criterion.benchmark_group("place_half_load_profile");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group.bench_function(BenchmarkId::new(name, gpus), |bencher| {
        bencher.iter_custom(|count| {
            let mut sums = Sums::default();
            while sums.places < count {
                churn.round(&mut sums);
            }
            sums.place.mul_f64(ratio(count, sums.places))
        });
    });
    group.finish();
}

#[expect(clippy::cast_precision_loss, reason = "counts of calls")]
fn ratio(count: u64, done: u64) -> f64 {
    count as f64 / done as f64
}

fn packers(criterion: &mut Criterion) {
    for gpus in [1_000u32, 10_000] {
        let count = gpus as usize;
        let mix = Mix::Profile;
        churned(criterion, "max_rects", count, || {
            Churn::new(Ours::new(gpus, contact()), mix, count, 0.5, 1, 1)
        });
        churned(criterion, "peer_guillotiere", count, || {
            Churn::new(Guillotiere::new(count, 100), mix, count, 0.5, 100, 1)
        });
        churned(criterion, "peer_algorithm_2", count, || {
            Churn::new(Scan::new(count, 100), mix, count, 0.5, 100, 1)
        });
    }
}

fn dilu_pool(gpus: u32) -> (DiluPacker, Vec<gshare_core::PlacementId>, SplitMix64) {
    let mut pool = DiluPacker::new(DiluConfig::default()).expect("the defaults are valid");
    for gpu in 0..gpus {
        pool.add_gpu(GpuId(gpu), GpuSpec::new(Bytes::from_gib(40))).expect("a new GPU");
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

fn dilu(criterion: &mut Criterion) {
    println!("dilu: ns per call under churn, least/median of 5 samples");
    let mut group = criterion.benchmark_group("dilu_place");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for gpus in [300u32, 3_000, 30_000, 300_000] {
        let (mut pool, mut live, mut rng) = dilu_pool(gpus);
        let mut samples: Vec<[u32; 3]> = (0..5)
            .map(|_| {
                let mut times = Times::default();
                for _ in 0..10_000 {
                    exchange(&mut pool, &mut live, &mut rng, &mut times);
                }
                let p99 = percentile(&mut times.place_ns, 0.99);
                [percentile(&mut times.place_ns, 0.5), p99, percentile(&mut times.release_ns, 0.5)]
            })
            .collect();
        samples.sort_unstable();
        let ([place, p99, release], middle) = (samples[0], samples[2]);
        println!(
            "{gpus:>7} GPUs: place p50 {place}/{} p99 {p99}/{} release p50 {release}/{}",
            middle[0], middle[1], middle[2]
        );
        group.bench_function(BenchmarkId::from_parameter(gpus), |bencher| {
            bencher.iter_custom(|count| {
                let mut sums = Sums::default();
                for _ in 0..count {
                    exchange(&mut pool, &mut live, &mut rng, &mut sums);
                }
                sums.place
            });
        });
    }
    group.finish();
}

fn exchange(
    pool: &mut DiluPacker,
    live: &mut Vec<gshare_core::PlacementId>,
    rng: &mut SplitMix64,
    record: &mut impl gshare_bench::churn::Record,
) {
    let index = rng.below(live.len());
    let id = live.swap_remove(index);
    record.release(|| pool.release(id)).expect("a live id");
    let demand = dilu_demand(rng);
    if let Ok(placed) = record.place(|| pool.place(&demand)) {
        live.push(placed.placement.id);
    }
}

criterion_group!(benches, packers, dilu);

fn main() {
    let start = Instant::now();
    // `cargo test --benches` and `cargo bench -- --test` only want to know that it runs.
    if !std::env::args().any(|arg| arg == "--test") {
        table();
        println!("table took {:.0} s\n", start.elapsed().as_secs_f64());
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
