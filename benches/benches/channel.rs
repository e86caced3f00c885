//! The pipeline channel beside memcpy, beside the same work without a channel, and beside the crates iceoryx2 and
//! ipc-channel: one way, 1 MB and 100 MB.
//!
//! Two threads. One way is measured as a message there and an empty one back, less half of the time of two empty ones
//! of the same carrier. The threads are bound to two CPUs. A wake, and a line that moves between cores, take half as
//! long at one time as at another, so in the table at the end all that sleep sooner or later take turns, and a ratio is
//! the median of those of the turns; iceoryx2 that spins never sleeps, and is measured before them. What is compared
//! with what:
//!
//! | ours | beside | target |
//! |---|---|---|
//! | in place: the message is handed over where it lies | the wake alone: a counter and a futex in shared memory | 1.2 x |
//! | in place, touched: the sender writes a byte of every page, the receiver reads them | the same bytes written and read by the same two cores in plain shared memory, with the same counter and futex | 1.2 x |
//! | copies: `send` and `receive_into`, one on each side | one memcpy from private to private memory, and the wake and that memcpy | 2.2 x |
//! | copies | iceoryx2 and ipc-channel, with a copy on each side too | faster |
//!
//! Lines that another core wrote have to come from it with any carrier of the message: that is why touching has a floor of
//! its own. Asleep the wake of the receiver is most of 1 MB, so no channel can be within 2.2 x of the memcpy where the
//! wake alone takes longer: the ratio to both is what shows what the channel adds. ipc-channel always sleeps.
//!
//! Spinning there is no wake: the floor is one cache line that goes from core to core. On it come the counter, length
//! and tag of a message.

mod channel_lanes;

use channel_lanes::{Bare, How, Iceoryx, Ipc, Lane, Memcpy, Ours, Place, SPIN, Waits, pin};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};
use gshare_bench::runs_as_test;
use std::collections::BTreeMap;
use std::time::Duration;

const SIZES: [(&str, usize); 2] = [("1 MB", 1_000_000), ("100 MB", 100_000_000)];
/// Samples of empty round trips, which are taken off, and of carriers that take turns.
fn count() -> usize {
    if runs_as_test() { 1 } else { 60 }
}

/// Round trips of a sample of empty ones.
const EMPTY: u64 = 100;

const WAKE: &str = "wake alone";
const EMPTY_MESSAGE: &str = "empty message";
const MEMCPY: &str = "one memcpy";
const IN_PLACE: &str = "in place";
const TOUCHED: &str = "in place, touched";
const TOUCH_FLOOR: &str = "touched without a channel";
const COPIES: &str = "copies";
const ICEORYX: &str = "iceoryx2, copies";
const IPC: &str = "ipc-channel, copies";

/// Seconds of one message by name, way to wait and size, a sample each.
type Samples = BTreeMap<(&'static str, &'static str, &'static str), Vec<f64>>;

fn median(all: &mut [f64]) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}

/// Seconds of an empty message one way.
fn half(mut lane: impl Lane) -> f64 {
    let mut all: Vec<f64> = (0..count()).map(|_| lane.round_trips(EMPTY).as_secs_f64()).collect();
    median(&mut all).unwrap_or(0.0) / (2 * EMPTY) as f64
}

/// Time of an answer, which is taken off a round trip.
#[derive(Clone, Copy)]
enum Back {
    /// Half of a round trip of that lane of those that take turns.
    HalfOf(usize),
    /// A time in seconds.
    Seconds(f64),
}

/// Replaces the samples by those of carriers that take turns. Only who sleeps, sooner or later, can do so.
fn take_turns(samples: &mut Samples, waits: Waits, size: &'static str, bytes: usize) {
    let is_measured =
        |((_, of, is), all): (&_, &Vec<f64>)| *of == waits.name() && *is == size && !all.is_empty();
    if !samples.iter().any(is_measured) {
        return;
    }
    let bare = |bytes, how| Box::new(Bare::new(bytes, how, waits)) as Box<dyn Lane>;
    let ours = |bytes, how| Box::new(Ours::new(bytes, how, waits)) as Box<dyn Lane>;
    let copies = if bytes > 10_000_000 { 1 } else { 20 };
    // Long enough for what a lane finds cold after the others to be little of it.
    let empty = if waits == Waits::Spinning { 1_000 } else { 400 };
    let mut lanes = vec![
        (WAKE, Back::HalfOf(0), empty, bare(0, How::Nothing)),
        (TOUCH_FLOOR, Back::HalfOf(0), 20, bare(bytes, How::Touch)),
        (EMPTY_MESSAGE, Back::HalfOf(2), empty, ours(0, How::Nothing)),
        (IN_PLACE, Back::HalfOf(2), empty, ours(bytes, How::Nothing)),
        (TOUCHED, Back::HalfOf(2), 20, ours(bytes, How::Touch)),
        (COPIES, Back::HalfOf(2), copies, ours(bytes, How::Copy)),
        (MEMCPY, Back::Seconds(0.0), copies, Box::new(Memcpy::new(bytes))),
    ];
    if waits == Waits::Asleep {
        let back = Back::Seconds(half(Iceoryx::new(1, waits)));
        lanes.push((ICEORYX, back, copies, Box::new(Iceoryx::new(bytes, waits))));
        lanes.push((IPC, Back::Seconds(half(Ipc::new(1))), copies, Box::new(Ipc::new(bytes))));
    }
    for (name, ..) in &lanes {
        samples.insert((*name, waits.name(), size), Vec::new());
    }
    // A thread that wakes after 100 MB were copied wakes more slowly for a while.
    let settle = |lane: &mut dyn Lane, rounds| {
        if rounds == empty {
            lane.round_trips(empty);
        }
    };
    for _ in 0..count() {
        let took: Vec<f64> = lanes
            .iter_mut()
            .map(|(_, _, rounds, lane)| {
                // The one before it spins for a while yet.
                std::thread::sleep(if waits == Waits::Spinning { SPIN * 2 } else { Duration::ZERO });
                settle(lane.as_mut(), *rounds);
                lane.round_trips(*rounds).as_secs_f64() / *rounds as f64
            })
            .collect();
        for ((name, back, ..), round_trip) in lanes.iter().zip(&took) {
            let back = match back {
                Back::HalfOf(lane) => took[*lane] / 2.0,
                Back::Seconds(seconds) => *seconds,
            };
            samples.entry((*name, waits.name(), size)).or_default().push(round_trip - back);
        }
    }
}

/// Measures a lane; `way_back` is the seconds of an empty message one way.
fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    samples: &mut Samples,
    (name, waits, size): (&'static str, &'static str, &'static str),
    way_back: f64,
    lane: &mut dyn Lane,
) {
    let id = BenchmarkId::new([name, waits].join(", "), size);
    let samples = samples.entry((name, waits, size)).or_default();
    group.bench_function(id, |b| {
        b.iter_custom(|rounds| {
            let empty = Duration::from_secs_f64(way_back * rounds as f64);
            let took = lane.round_trips(rounds).saturating_sub(empty);
            samples.push(took.as_secs_f64() / rounds as f64);
            took
        });
    });
}

fn channel(c: &mut Criterion) {
    pin(Place::Sends);
    let mut group = c.benchmark_group("channel");
    let mut samples = Samples::new();
    // As a test, unoptimised, the small one does.
    for &(size, bytes) in &SIZES[..if runs_as_test() { 1 } else { 2 }] {
        measure(&mut group, &mut samples, (MEMCPY, "", size), 0.0, &mut Memcpy::new(bytes));
        for waits in [Waits::Asleep, Waits::Spinning] {
            // Every lane has ended before the next: a thread that still looks for messages would take a CPU.
            let key = |name| (name, waits.name(), size);
            let back = half(Bare::new(0, How::Nothing, waits));
            let mut bare = |name, how| {
                measure(&mut group, &mut samples, key(name), back, &mut Bare::new(bytes, how, waits));
            };
            bare(WAKE, How::Nothing);
            bare(TOUCH_FLOOR, How::Touch);
            let back = half(Ours::new(0, How::Nothing, waits));
            measure(
                &mut group,
                &mut samples,
                key(EMPTY_MESSAGE),
                back,
                &mut Ours::new(0, How::Nothing, waits),
            );
            for (name, how) in [(IN_PLACE, How::Nothing), (TOUCHED, How::Touch), (COPIES, How::Copy)] {
                measure(&mut group, &mut samples, key(name), back, &mut Ours::new(bytes, how, waits));
            }
            let back = half(Iceoryx::new(1, waits));
            measure(&mut group, &mut samples, key(ICEORYX), back, &mut Iceoryx::new(bytes, waits));
            if waits == Waits::Asleep {
                let back = half(Ipc::new(1));
                measure(&mut group, &mut samples, key(IPC), back, &mut Ipc::new(bytes));
            }
            take_turns(&mut samples, waits, size, bytes);
        }
    }
    group.finish();
    print(&samples);
}

/// The median of the ratios of what took turns, else the ratio of the medians. The machine may change its pace from one
/// turn to another, so that the medians are of different turns.
fn ratio(ours: &[f64], other: &[f64], took_turns: bool) -> Option<f64> {
    if took_turns {
        return median(&mut ours.iter().zip(other).map(|(ours, other)| ours / other).collect::<Vec<_>>());
    }
    Some(median(&mut ours.to_vec())? / median(&mut other.to_vec())?)
}

fn print(samples: &Samples) {
    println!("\n{:<38} {:>10} {:>10}  ratio", "medians", "us", "beside us");
    for (size, _) in SIZES {
        for waits in [Waits::Asleep, Waits::Spinning].map(Waits::name) {
            let of = |name| samples.get(&(name, waits, size)).filter(|all| !all.is_empty());
            let with_wake: Option<Vec<f64>> = of(WAKE)
                .zip(of(MEMCPY))
                .map(|(wake, memcpy)| wake.iter().zip(memcpy).map(|(wake, memcpy)| wake + memcpy).collect());
            // ipc-channel always sleeps, and iceoryx2 that spins never does: both took no turns with what spins.
            let sleeps = waits == Waits::Asleep.name();
            let rows = [
                (IN_PLACE, WAKE, of(WAKE), true),
                (IN_PLACE, EMPTY_MESSAGE, of(EMPTY_MESSAGE), true),
                (TOUCHED, TOUCH_FLOOR, of(TOUCH_FLOOR), true),
                (COPIES, MEMCPY, of(MEMCPY), true),
                (COPIES, "wake and one memcpy", with_wake.as_ref(), true),
                (COPIES, ICEORYX, of(ICEORYX), sleeps),
                (COPIES, IPC, samples.get(&(IPC, Waits::Asleep.name(), size)), sleeps),
            ];
            for (name, beside, other, took_turns) in rows {
                let Some((ours, other)) = of(name).zip(other) else { continue };
                let us = |all: &Vec<f64>| median(&mut all.clone()).map(|seconds| seconds * 1e6);
                let Some(((ours_us, other_us), ratio)) =
                    us(ours).zip(us(other)).zip(ratio(ours, other, took_turns))
                else {
                    continue;
                };
                let what = format!("{name}, {waits}, {size}");
                println!("{what:<38} {ours_us:>10.2} {other_us:>10.2}  {ratio:.2} x {beside}");
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .sample_size(10);
    targets = channel
}
criterion_main!(benches);
