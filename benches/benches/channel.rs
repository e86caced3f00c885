//! The pipeline channel beside memcpy and the crate ipc-channel: one way, 1 MB and 100 MB.
//!
//! Two threads with a channel in each direction. One way is measured as a message there and an empty one back, less half of
//! the time of two empty ones; "wake alone" is that half, asleep or spinning. "in place": the sender writes one byte of each
//! page of its slot, the receiver reads them. "copies": `send` and `receive_into`, one copy on each side. Targets: in place within 1.2 x of the wake
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

/// A channel there, one back for empty answers, and a thread that answers until the first is closed. It lives as long as
/// its figure is measured, so that all but the first message find pages, caches and thread as they are in use.
struct Lane {
    there: Sender,
    answered: Receiver,
    private: Vec<u8>,
    bytes: usize,
    how: How,
    sent: u64,
    echo: Option<thread::JoinHandle<()>>,
}

impl Lane {
    fn new(bytes: usize, how: How, spin: Duration) -> Self {
        let (there, mut here) = pair(bytes, spin);
        let (mut answer, answered) = pair(PAGE, spin);
        let private = |byte: u8| vec![byte; if how == How::Copy { bytes } else { 1 }];
        let mut theirs = private(1);
        let echo = thread::spawn(move || {
            loop {
                let tag = if how == How::Copy {
                    let Ok(tag) = here.receive_into(&mut theirs, PATIENCE) else { return };
                    black_box(&theirs);
                    tag
                } else {
                    let Ok(message) = here.receive(PATIENCE) else { return };
                    if how == How::Touch {
                        black_box(touch(message.bytes()));
                    }
                    message.tag()
                };
                answer.send(tag, &[], PATIENCE).expect("room");
            }
        });
        let mut lane = Self { there, answered, private: private(2), bytes, how, sent: 0, echo: Some(echo) };
        lane.round_trips(4);
        lane
    }

    /// Time of `rounds` messages there and empty answers back.
    fn round_trips(&mut self, rounds: u64) -> Duration {
        let begun = Instant::now();
        for _ in 0..rounds {
            if self.how == How::Copy {
                self.there.send(self.sent, black_box(&self.private), PATIENCE).expect("room");
            } else {
                let mut loan = self.there.loan(PATIENCE).expect("a slot");
                if self.how == How::Touch {
                    loan.bytes().iter_mut().step_by(PAGE).for_each(|byte| *byte = 3);
                }
                let length = if self.how == How::Nothing { 0 } else { self.bytes };
                loan.publish(self.sent, length as u64).expect("it fits");
            }
            self.sent += 1;
            drop(self.answered.receive(PATIENCE).expect("an answer"));
        }
        begun.elapsed()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.there.close();
        if let Some(echo) = self.echo.take() {
            echo.join().expect("the echo ends");
        }
    }
}

/// The same through ipc-channel, bytes copied into a message and out of it.
struct Ipc {
    there: Option<ipc_channel::ipc::IpcBytesSender>,
    answered: ipc_channel::ipc::IpcBytesReceiver,
    private: Vec<u8>,
    echo: Option<thread::JoinHandle<()>>,
}

impl Ipc {
    fn new(bytes: usize) -> Self {
        let (there, here) = ipc_channel::ipc::bytes_channel().expect("a channel");
        let (answer, answered) = ipc_channel::ipc::bytes_channel().expect("a channel");
        let echo = thread::spawn(move || {
            while let Ok(message) = here.recv() {
                black_box(message);
                answer.send(&[0]).expect("room");
            }
        });
        let mut lane = Self { there: Some(there), answered, private: vec![2u8; bytes], echo: Some(echo) };
        lane.round_trips(2);
        lane
    }

    fn round_trips(&mut self, rounds: u64) -> Duration {
        let begun = Instant::now();
        for _ in 0..rounds {
            self.there.as_ref().expect("open").send(black_box(&self.private)).expect("room");
            drop(self.answered.recv().expect("an answer"));
        }
        begun.elapsed()
    }
}

impl Drop for Ipc {
    fn drop(&mut self) {
        drop(self.there.take());
        if let Some(echo) = self.echo.take() {
            echo.join().expect("the echo ends");
        }
    }
}

/// Empty round trips that are measured to be taken off.
const EMPTY: u64 = 2_000;

/// What `rounds` of [`EMPTY`] took.
fn share(all: Duration, rounds: u64) -> Duration {
    all.mul_f64(rounds as f64 / EMPTY as f64)
}

fn channel(c: &mut Criterion) {
    let mut group = c.benchmark_group("channel");
    let spins = [("asleep", Duration::ZERO), ("spinning", Duration::from_secs(1))];
    for (waits, spin) in spins {
        let mut empty = Lane::new(PAGE, How::Nothing, spin);
        group.bench_function(BenchmarkId::new("wake alone", waits), |b| {
            b.iter_custom(|rounds| empty.round_trips(rounds) / 2);
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
            for (name, how) in [("no touch", How::Nothing), ("in place", How::Touch), ("copies", How::Copy)] {
                // An empty way back is measured with it, so half of the empty round trips is taken off. They have ended
                // by then: a thread that still looks for messages would take a CPU.
                let way_back = Lane::new(PAGE, How::Nothing, spin).round_trips(EMPTY) / 2;
                let mut lane = Lane::new(bytes, how, spin);
                group.bench_function(BenchmarkId::new(format!("{name}, {waits}"), size), |b| {
                    b.iter_custom(|rounds| lane.round_trips(rounds).saturating_sub(share(way_back, rounds)));
                });
            }
        }
        let way_back = Ipc::new(1).round_trips(EMPTY) / 2;
        let mut lane = Ipc::new(bytes);
        group.bench_function(BenchmarkId::new("ipc-channel, copies", size), |b| {
            b.iter_custom(|rounds| lane.round_trips(rounds).saturating_sub(share(way_back, rounds)));
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
