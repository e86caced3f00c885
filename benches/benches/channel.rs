//! The pipeline channel beside memcpy and the crate ipc-channel: one way, 1 MB and 100 MB.
//!
//! Two threads with a channel in each direction. One way is measured as a message there and an empty one back, less half of
//! the time of two empty ones; "wake alone" is that half, asleep or spinning. "in place": the sender writes one byte of each
//! page of its slot, the receiver reads them. "copies": one memcpy on each side. Targets: in place within 1.2 x of the wake
//! alone plus touching the pages ("touch"), copies at most 2.2 x one memcpy plus the wake, and ahead of ipc-channel.
//!
//! iceoryx2, the other peer one would look at, is not here: version 0.10 needs bindgen and libclang to build.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use gshare_modelstore::channel::{Channel, ChannelOptions, Receiver, Sender};
use std::hint::black_box;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

const SIZES: [(&str, usize); 2] = [("1 MB", 1_000_000), ("100 MB", 100_000_000)];
const PAGE: usize = 4096;
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Nothing is written or read.
    Nothing,
    /// A byte of every page.
    Touch,
    /// All of it, from and to private memory.
    Copy,
}

fn pair(bytes: usize, spin: Duration) -> (Sender, Receiver) {
    let options = ChannelOptions { spin, ..ChannelOptions::default() };
    let channel = Channel::create(2, bytes as u64).expect("a channel");
    let other = channel.as_fd().try_clone_to_owned().expect("a file");
    let other = Channel::open(other).expect("the same");
    (channel.into_sender(options), other.into_receiver(options))
}

fn touch(bytes: &[u8]) -> u64 {
    bytes.iter().step_by(PAGE).map(|&byte| u64::from(byte)).sum()
}

/// Time of `rounds` messages there and empty answers back.
fn round_trips(bytes: usize, how: How, spin: Duration, rounds: u64) -> Duration {
    let (mut there, mut here) = pair(bytes, spin);
    let (mut answer, mut answered) = pair(PAGE, spin);
    let echo = thread::spawn(move || {
        let mut private = vec![1u8; if how == How::Copy { bytes } else { 1 }];
        for round in 0..=rounds {
            let message = here.receive(PATIENCE).expect("a message");
            match how {
                How::Nothing => {}
                How::Touch => drop(black_box(touch(message.bytes()))),
                How::Copy => private.copy_from_slice(message.bytes()),
            }
            black_box(&private);
            drop(message);
            answer.send(round, &[], PATIENCE).expect("room");
        }
    });
    let private = vec![2u8; if how == How::Copy { bytes } else { 1 }];
    let mut begun = Instant::now();
    for round in 0..=rounds {
        let mut loan = there.loan(PATIENCE).expect("a slot");
        match how {
            How::Nothing => {}
            How::Touch => loan.bytes().iter_mut().step_by(PAGE).for_each(|byte| *byte = 3),
            How::Copy => loan.bytes().copy_from_slice(black_box(&private)),
        }
        let length = if how == How::Nothing { 0 } else { bytes };
        loan.publish(round, length as u64).expect("it fits");
        drop(answered.receive(PATIENCE).expect("an answer"));
        if round == 0 {
            // The first one warms caches and thread up.
            begun = Instant::now();
        }
    }
    let took = begun.elapsed();
    echo.join().expect("the echo ends");
    took
}

/// The same through ipc-channel, bytes copied into a message and out of it.
fn ipc(bytes: usize, rounds: u64) -> Duration {
    let (there, here) = ipc_channel::ipc::bytes_channel().expect("a channel");
    let (answer, answered) = ipc_channel::ipc::bytes_channel().expect("a channel");
    let echo = thread::spawn(move || {
        for _ in 0..=rounds {
            black_box(here.recv().expect("a message"));
            answer.send(&[0]).expect("room");
        }
    });
    let private = vec![2u8; bytes];
    let mut begun = Instant::now();
    for round in 0..=rounds {
        there.send(black_box(&private)).expect("room");
        drop(answered.recv().expect("an answer"));
        if round == 0 {
            begun = Instant::now();
        }
    }
    let took = begun.elapsed();
    echo.join().expect("the echo ends");
    took
}

fn channel(c: &mut Criterion) {
    let mut group = c.benchmark_group("channel");
    let spins = [("asleep", Duration::ZERO), ("spinning", Duration::from_secs(1))];
    for (waits, spin) in spins {
        group.bench_function(BenchmarkId::new("wake alone", waits), |b| {
            b.iter_custom(|rounds| round_trips(PAGE, How::Nothing, spin, rounds) / 2);
        });
    }
    for (size, bytes) in SIZES {
        // Pages that are there: what must be paid whatever carries them.
        let mut to = vec![1u8; bytes];
        let from = vec![2u8; bytes];
        group.bench_function(BenchmarkId::new("one memcpy", size), |b| {
            b.iter(|| black_box(&mut to).copy_from_slice(black_box(&from)));
        });
        group.bench_function(BenchmarkId::new("touch, write and read", size), |b| {
            b.iter(|| {
                to.iter_mut().step_by(PAGE).for_each(|byte| *byte = 3);
                touch(black_box(&to))
            });
        });
        drop((to, from));
        for (waits, spin) in spins {
            // An empty way back is measured with it, so half of the empty round trips is taken off.
            let one_way = |how, rounds| {
                let empty = round_trips(PAGE, How::Nothing, spin, rounds) / 2;
                round_trips(bytes, how, spin, rounds).saturating_sub(empty)
            };
            for (name, how) in [("no touch", How::Nothing), ("in place", How::Touch), ("copies", How::Copy)] {
                group.bench_function(BenchmarkId::new(format!("{name}, {waits}"), size), |b| {
                    b.iter_custom(|rounds| one_way(how, rounds));
                });
            }
        }
        group.bench_function(BenchmarkId::new("ipc-channel, copies", size), |b| {
            b.iter_custom(|rounds| ipc(bytes, rounds).saturating_sub(ipc(1, rounds) / 2));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .sample_size(10);
    targets = channel
}
criterion_main!(benches);
