//! Carriers of a message one way and an empty one back, between two threads: the channel, the same work
//! without it, and the crates that one would look at instead.

use gshare_runner::channel::{Channel, ChannelOptions, Receiver, Sender};
use iceoryx2::port::{listener::Listener, notifier::Notifier, publisher::Publisher, subscriber::Subscriber};
use iceoryx2::prelude::{Node, NodeBuilder};
use rustix::thread::{CpuSet, futex, sched_getaffinity, sched_setaffinity};
use std::hint::black_box;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub(crate) const PAGE: usize = 4096;
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));
/// Slots of every carrier, as of ours: the sender may write one while the other is read.
const SLOTS: usize = 2;

/// The application's use of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// Nothing is written or read.
    Nothing,
    /// The sender writes a byte of every page where the receiver finds it, and the receiver reads them.
    Touch,
    /// All of it, from and to private memory.
    Copy,
}

/// How a side waits for the other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    Asleep,
    Spinning,
}

impl Waits {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Asleep => "asleep",
            Self::Spinning => "spinning",
        }
    }
}

/// How long a side looks that is said to spin. One that hears nothing for longer sleeps, so that carriers can take turns.
pub(crate) const SPIN: Duration = Duration::from_millis(2);

/// Lives as long as its figure is measured, so that all but the first messages find pages, caches and thread as they are in
/// use. The side that answers is a thread on another CPU.
pub(crate) trait Lane {
    /// A message there and an empty answer back.
    fn round_trip(&mut self);

    /// Time of `rounds` of them, after one that wakes the side that sleeps.
    fn round_trips(&mut self, rounds: u64) -> Duration {
        self.round_trip();
        let begun = Instant::now();
        (0..rounds).for_each(|_| self.round_trip());
        begun.elapsed()
    }
}

/// Where a thread runs: on one CPU a wake is a switch and no line ever moves, and which it is would be chance.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Sends,
    Answers,
}

/// Binds this thread; without effect where there is one CPU.
pub(crate) fn pin(place: Place) {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    let cpus = CPUS.get_or_init(|| {
        let Ok(all) = sched_getaffinity(None) else { return Vec::new() };
        (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu)).collect()
    });
    if let [sends, answers, ..] = cpus[..] {
        let mut set = CpuSet::new();
        set.set(match place {
            Place::Sends => sends,
            Place::Answers => answers,
        });
        let _ = sched_setaffinity(None, &set);
    }
}

/// Starts the side that answers.
fn answering(echo: impl FnOnce() + Send + 'static) -> Option<JoinHandle<()>> {
    Some(thread::spawn(move || {
        pin(Place::Answers);
        echo();
    }))
}

fn touch(bytes: &[AtomicU8]) -> u64 {
    bytes.iter().step_by(PAGE).map(|byte| u64::from(byte.load(Ordering::Relaxed))).sum()
}

fn private(bytes: usize, how: How, byte: u8) -> Vec<u8> {
    vec![byte; if how == How::Copy { bytes } else { 1 }]
}

fn join(echo: &mut Option<JoinHandle<()>>) {
    if let Some(echo) = echo.take() {
        echo.join().expect("the echo ends");
    }
}

/// Ours: a channel in each direction.
pub(crate) struct Ours {
    there: Sender,
    answered: Receiver,
    private: Vec<u8>,
    bytes: usize,
    how: How,
    sent: u64,
    echo: Option<JoinHandle<()>>,
}

fn pair(bytes: usize, waits: Waits) -> (Sender, Receiver) {
    let spin = if waits == Waits::Asleep { Duration::ZERO } else { SPIN };
    let options = ChannelOptions { spin, ..ChannelOptions::default() };
    let channel = Channel::create(2, bytes.max(1) as u64).expect("a channel");
    let other = channel.as_fd().try_clone_to_owned().expect("a file");
    let other = Channel::open(other).expect("the same");
    (channel.into_sender(options), other.into_receiver(options))
}

impl Ours {
    pub(crate) fn new(bytes: usize, how: How, waits: Waits) -> Self {
        let (there, mut here) = pair(bytes, waits);
        let (mut answer, answered) = pair(PAGE, waits);
        let mut theirs = private(bytes, how, 1);
        let echo = answering(move || {
            loop {
                let tag = if how == How::Copy {
                    let Ok(tag) = here.receive_into(&mut theirs, PATIENCE) else { return };
                    black_box(&theirs);
                    tag
                } else {
                    let Ok(message) = here.receive(PATIENCE) else { return };
                    assert_eq!(message.bytes().len(), bytes);
                    if how == How::Touch {
                        black_box(touch(message.bytes()));
                    }
                    message.tag()
                };
                answer.send(tag, &[], PATIENCE).expect("room");
            }
        });
        let private = private(bytes, how, 2);
        let mut lane = Self { there, answered, private, bytes, how, sent: 0, echo };
        lane.round_trips(4);
        lane
    }
}

impl Lane for Ours {
    fn round_trip(&mut self) {
        if self.how == How::Copy {
            self.there.send(self.sent, black_box(&self.private), PATIENCE).expect("room");
        } else {
            let loan = self.there.loan(PATIENCE).expect("a slot");
            if self.how == How::Touch {
                loan.bytes().iter().step_by(PAGE).for_each(|byte| byte.store(3, Ordering::Relaxed));
            }
            loan.publish(self.sent, self.bytes as u64).expect("it fits");
        }
        self.sent += 1;
        drop(self.answered.receive(PATIENCE).expect("an answer"));
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.there.close();
        join(&mut self.echo);
    }
}

/// The floor: shared memory, a counter in each direction and a futex, and nothing checked. In place only.
pub(crate) struct Bare {
    shared: Arc<Shared>,
    how: How,
    waits: Waits,
    sent: u32,
    echo: Option<JoinHandle<()>>,
}

struct Shared {
    there: Word,
    back: Word,
    slots: [Vec<AtomicU8>; SLOTS],
}

/// A counter with its sleeper; alone on its cache lines.
#[repr(align(128))]
struct Word {
    count: AtomicU32,
    asleep: AtomicU32,
}

/// The message that ends [`Bare`].
const END: u32 = u32::MAX;

impl Word {
    /// Waits until it is not `old`; answers what it is.
    fn wait(&self, old: u32, waits: Waits) -> u32 {
        let mut begun = None;
        loop {
            // Looks far more often than at the clock.
            for _ in 0..if waits == Waits::Spinning { 1_000 } else { 1 } {
                let seen = self.count.load(Ordering::Acquire);
                if seen != old {
                    return seen;
                }
                std::hint::spin_loop();
            }
            if waits == Waits::Asleep || begun.get_or_insert_with(Instant::now).elapsed() > SPIN {
                self.asleep.store(1, Ordering::SeqCst);
                if self.count.load(Ordering::SeqCst) == old {
                    let _ = futex::wait(&self.count, futex::Flags::empty(), old, None);
                }
                self.asleep.store(0, Ordering::SeqCst);
            }
        }
    }

    fn set(&self, new: u32) {
        self.count.store(new, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) != 0 {
            let _ = futex::wake(&self.count, futex::Flags::empty(), 1);
        }
    }
}

impl Bare {
    pub(crate) fn new(bytes: usize, how: How, waits: Waits) -> Self {
        let word = || Word { count: AtomicU32::new(0), asleep: AtomicU32::new(0) };
        let slot = || (0..bytes).map(|_| AtomicU8::new(1)).collect();
        let shared = Arc::new(Shared { there: word(), back: word(), slots: [slot(), slot()] });
        let theirs = Arc::clone(&shared);
        let echo = answering(move || {
            let mut seen = 0;
            loop {
                seen = theirs.there.wait(seen, waits);
                if seen == END {
                    return;
                }
                if how == How::Touch {
                    let slot = theirs.slots[seen as usize % SLOTS].iter().step_by(PAGE);
                    black_box(slot.map(|byte| u64::from(byte.load(Ordering::Relaxed))).sum::<u64>());
                }
                theirs.back.set(seen);
            }
        });
        let mut lane = Self { shared, how, waits, sent: 0, echo };
        lane.round_trips(4);
        lane
    }
}

impl Lane for Bare {
    fn round_trip(&mut self) {
        self.sent += 1;
        if self.how == How::Touch {
            let slot = self.shared.slots[self.sent as usize % SLOTS].iter().step_by(PAGE);
            slot.for_each(|byte| byte.store(3, Ordering::Relaxed));
        }
        self.shared.there.set(self.sent);
        self.shared.back.wait(self.sent - 1, self.waits);
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        self.shared.there.set(END);
        join(&mut self.echo);
    }
}

/// One copy from private to private memory, whose pages are there: what any carrier has to pay. No other thread.
pub(crate) struct Memcpy {
    to: Vec<u8>,
    from: Vec<u8>,
}

impl Memcpy {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { to: private(bytes, How::Copy, 1), from: private(bytes, How::Copy, 2) }
    }
}

impl Lane for Memcpy {
    fn round_trip(&mut self) {
        black_box(&mut self.to).copy_from_slice(black_box(&self.from));
    }
}

/// ipc-channel: bytes copied into a message and out of it. It sleeps.
pub(crate) struct Ipc {
    there: Option<ipc_channel::ipc::IpcBytesSender>,
    answered: ipc_channel::ipc::IpcBytesReceiver,
    private: Vec<u8>,
    echo: Option<JoinHandle<()>>,
}

impl Ipc {
    pub(crate) fn new(bytes: usize) -> Self {
        let (there, here) = ipc_channel::ipc::bytes_channel().expect("a channel");
        let (answer, answered) = ipc_channel::ipc::bytes_channel().expect("a channel");
        let echo = answering(move || {
            while let Ok(message) = here.recv() {
                black_box(message);
                answer.send(&[0]).expect("room");
            }
        });
        let mut lane = Self { there: Some(there), answered, private: vec![2u8; bytes], echo };
        lane.round_trips(2);
        lane
    }
}

impl Lane for Ipc {
    fn round_trip(&mut self) {
        self.there.as_ref().expect("open").send(black_box(&self.private)).expect("room");
        drop(self.answered.recv().expect("an answer"));
    }
}

impl Drop for Ipc {
    fn drop(&mut self) {
        drop(self.there.take());
        join(&mut self.echo);
    }
}

/// iceoryx2, bytes copied into a sample and out of it: a publisher and a subscriber in each direction. Who sleeps does so on
/// an event that is told after each message.
pub(crate) struct Iceoryx {
    here: Ports,
    private: Vec<u8>,
    answer: Vec<u8>,
    echo: Option<JoinHandle<()>>,
}

type Service = iceoryx2::service::ipc::Service;

/// One thread's.
struct Ports {
    sends: Publisher<Service, [u8], ()>,
    receives: Subscriber<Service, [u8], ()>,
    tells: Notifier<Service>,
    hears: Listener<Service>,
    waits: Waits,
    _node: Node<Service>,
}

impl Ports {
    /// Sends up to `bytes` on the service `to`, and receives from the service `from`.
    fn new(to: &str, from: &str, bytes: usize, waits: Waits) -> Self {
        let node = NodeBuilder::new().create::<Service>().expect("a node");
        let service = |name: &str| {
            let builder = node.service_builder(&name.try_into().expect("a name"));
            let builder = builder.publish_subscribe::<[u8]>().subscriber_max_buffer_size(SLOTS);
            builder.subscriber_max_borrowed_samples(1).open_or_create().expect("a service")
        };
        let event = |name: &str| {
            let name = format!("{name}/event").as_str().try_into().expect("a name");
            node.service_builder(&name).event().open_or_create().expect("an event")
        };
        let (to_service, from_service) = (service(to), service(from));
        let sends = to_service.publisher_builder().initial_max_slice_len(bytes);
        Self {
            sends: sends.create().expect("a publisher"),
            receives: from_service.subscriber_builder().create().expect("a subscriber"),
            tells: event(to).notifier_builder().create().expect("a notifier"),
            hears: event(from).listener_builder().create().expect("a listener"),
            waits,
            _node: node,
        }
    }

    fn send(&self, bytes: &[u8]) {
        let loan = self.sends.loan_slice_uninit(bytes.len()).expect("a slot");
        loan.write_from_slice(bytes).send().expect("sent");
        if self.waits == Waits::Asleep {
            self.tells.notify().expect("told");
        }
    }

    /// Waits for a message and copies it.
    fn receive(&self, buffer: &mut Vec<u8>) {
        loop {
            if let Some(sample) = self.receives.receive().expect("connected") {
                buffer.clear();
                buffer.extend_from_slice(sample.payload());
                black_box(buffer);
                return;
            }
            match self.waits {
                Waits::Spinning => std::hint::spin_loop(),
                Waits::Asleep => drop(self.hears.blocking_wait_one().expect("an event")),
            }
        }
    }
}

/// A message that ends the echo.
const LAST: u8 = 9;

impl Iceoryx {
    pub(crate) fn new(bytes: usize, waits: Waits) -> Self {
        let [there, back] = ["there", "back"].map(|way| format!("gshare-bench/{}/{way}", std::process::id()));
        let (ready, theirs_ready) = std::sync::mpsc::channel();
        let (to, from) = (back.clone(), there.clone());
        let echo = answering(move || {
            let ports = Ports::new(&to, &from, 1, waits);
            let mut theirs = private(bytes, How::Copy, 1);
            ready.send(()).expect("a thread waits");
            loop {
                ports.receive(&mut theirs);
                if theirs[0] == LAST {
                    return;
                }
                ports.send(&[0]);
            }
        });
        theirs_ready.recv().expect("the echo is there");
        let here = Ports::new(&there, &back, bytes, waits);
        let mut lane = Self { here, private: private(bytes, How::Copy, 2), answer: Vec::new(), echo };
        lane.round_trips(8);
        lane
    }
}

impl Lane for Iceoryx {
    fn round_trip(&mut self) {
        self.here.send(black_box(&self.private));
        self.here.receive(&mut self.answer);
    }
}

impl Drop for Iceoryx {
    fn drop(&mut self) {
        self.here.send(&[LAST]);
        join(&mut self.echo);
    }
}
