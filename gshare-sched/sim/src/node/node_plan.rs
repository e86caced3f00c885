//! The plan of a seed: the node, its instances with their programs, and its faults.

use super::faults::{self, Fault, Kinds};
use crate::rng::Rng;
use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Bytes, Duration, MemoryRange, Quota, QuotaRange, ResourceSpec, SmShare, Timestamp};

/// The promise to the instances of a device, which decides how shares are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Request and limit are equal, with any SMs, and the limits fit even one after the other. An instance that keeps the device busy
    /// gets its limit, regardless of the others.
    Capped,
    /// Request and limit are equal, and all SMs fit at once, so the limits may add up to more than one.
    SideBySide,
    /// No two instances fit at once, and the limits leave room. Requests are met first, and the clients share the rest in
    /// proportion to their limits.
    Elastic,
    /// No share is compared: the instances have shares of any kind, for example from a fuzzer.
    Any,
}

/// The behaviour of a process's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the whole of a program")]
pub struct Program {
    /// The shortest and the longest of its kernels.
    pub kernel: (Duration, Duration),
    /// The number of its kernel functions, each with its own length.
    pub functions: u64,
    /// The largest deviation of a launch from the length of its function, in per cent; predicted costs are wrong by as much.
    pub spread_percent: u64,
    /// Whether the program waits for each kernel before it launches the next.
    pub synchronises: bool,
    /// The shortest and the longest pause after each such wait.
    pub pause: (Duration, Duration),
    /// Whether the program now and then launches nothing for a while.
    pub silences: bool,
    /// Whether the program allocates and frees device memory.
    pub allocates: bool,
    /// Memory that the program allocates first and keeps, and that can go to host memory. Zero: the process cannot be parked.
    pub weights: Bytes,
}

impl Program {
    /// Whether the device always has work of this program.
    pub const fn keeps_busy(&self) -> bool {
        !self.silences && !self.synchronises
    }
}

/// One instance on one device.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_structs, reason = "the whole of an instance")]
pub struct InstancePlan {
    /// The share of the instance.
    pub spec: ResourceSpec,
    /// The behaviour of its processes after the loss of the daemon.
    pub on_loss: OnDaemonLoss,
    /// The start and the program of each process.
    pub processes: Vec<(Timestamp, Program)>,
}

/// One device and its instances.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_structs, reason = "the whole of a device")]
pub struct GpuPlan {
    /// The promise to check.
    pub shape: Shape,
    /// The device memory.
    pub memory: Bytes,
    /// The instances on the device.
    pub instances: Vec<InstancePlan>,
}

/// The shortest and the longest of each delay.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "all delays")]
pub struct Delays {
    /// The delay of a frame.
    pub frame: (Duration, Duration),
    /// The delay of a thread between its new work and its turn.
    pub wake: (Duration, Duration),
}

/// The whole run.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_structs, reason = "the whole of a run")]
pub struct NodePlan {
    /// The seed of everything left open here: delays, lengths of kernels, allocations.
    pub seed: u64,
    /// The kinds of faults in this run.
    pub kinds: Kinds,
    /// The devices.
    pub gpus: Vec<GpuPlan>,
    /// The delays of frames and threads.
    pub delays: Delays,
    /// The bound of a client's GPU time in flight.
    pub in_flight: Duration,
    /// The number of simulated windows.
    pub windows: u64,
    /// The faults with their times.
    pub faults: Vec<(Timestamp, Fault)>,
}

/// The most devices of a node.
pub const GPUS: u64 = 4;
/// The most instances of a node at one time.
pub const INSTANCES: u64 = 64;

const MIB: u64 = 1 << 20;

impl NodePlan {
    /// A node without devices, for workers with any start and end. With `faults` the plan stops processes of the node's programs
    /// now and then, kills and stops the daemon, delays frames and sets clocks back.
    pub fn host(seed: u64, length: Duration, faults: bool) -> Self {
        let micros = Duration::from_micros;
        let mut kinds = Kinds::default();
        if faults {
            (kinds.stops, kinds.daemon_kills, kinds.daemon_stops) = (true, true, true);
            (kinds.late_frames, kinds.clock) = (true, true);
        }
        Self {
            seed,
            kinds,
            gpus: Vec::new(),
            delays: Delays { frame: (micros(5), micros(30)), wake: (micros(2), micros(50)) },
            in_flight: Duration::from_millis(4),
            windows: 0,
            faults: faults::draw(kinds, length, &mut Rng::new(seed)),
        }
    }

    /// The plan of a seed, for windows of this length.
    pub fn draw(seed: u64, window: Duration) -> Self {
        let rng = &mut Rng::new(seed);
        let kinds = Kinds::draw(rng);
        let gpus = rng.between(1, GPUS);
        // Small nodes are as frequent as large nodes.
        let most = *rng.pick(&[4, 8, 16, 32, INSTANCES]).unwrap_or(&INSTANCES);
        let instances = rng.between(2, most);
        let micros = Duration::from_micros;
        let delays = Delays {
            frame: (micros(rng.between(5, 20)), micros(rng.between(20, 40))),
            wake: (micros(rng.between(2, 10)), micros(rng.between(10, 60))),
        };
        let habits = Habits::draw(rng);
        let gpus = (0..gpus)
            .map(|gpu| {
                let count = instances / gpus + u64::from(gpu < instances % gpus);
                GpuPlan::draw(count, habits, delays, rng)
            })
            .collect();
        let windows = 26;
        let length = window.saturating_mul(windows);
        let in_flight = micros(rng.between(1_000, 5_000));
        let faults = faults::draw(kinds, length, rng);
        let mut plan = Self { seed: rng.next_u64(), kinds, gpus, delays, in_flight, windows, faults };
        let late = habits.joins.then(|| length.as_nanos() / 2);
        plan.draw_starts(late, rng);
        // A generator of its own leaves the plans of nodes without parking as they are.
        let rng = &mut Rng::new(!seed);
        if rng.percent(30) {
            plan.gpus.iter_mut().for_each(|gpu| gpu.draw_parking(rng));
        }
        plan
    }

    /// Whether processes of this node can be parked.
    pub fn parks(&self) -> bool {
        let programs =
            self.gpus.iter().flat_map(|gpu| &gpu.instances).flat_map(|instance| &instance.processes);
        programs.into_iter().any(|(_, program)| program.weights > Bytes::ZERO)
    }

    /// Draws the starts: most in the first milliseconds, and some before `late`, if given.
    fn draw_starts(&mut self, late: Option<u64>, rng: &mut Rng) {
        let processes = self.gpus.iter_mut().flat_map(|gpu| &mut gpu.instances);
        for (start, _) in processes.flat_map(|instance| &mut instance.processes) {
            let latest = late.filter(|_| rng.percent(30)).unwrap_or(2_000_000);
            *start = Timestamp::from_nanos(rng.below(latest));
        }
    }
}

/// The habits of a run's programs, apart from faults.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each on or off by itself")]
struct Habits {
    silences: bool,
    synchronises: bool,
    joins: bool,
    siblings: bool,
    mispredicted: bool,
    allocates: bool,
    closed: bool,
}

impl Habits {
    fn draw(rng: &mut Rng) -> Self {
        let mut coin = || rng.percent(50);
        Self {
            silences: coin(),
            synchronises: coin(),
            joins: coin(),
            siblings: coin(),
            mispredicted: coin(),
            allocates: coin(),
            closed: coin(),
        }
    }
}

impl GpuPlan {
    fn draw(count: u64, habits: Habits, delays: Delays, rng: &mut Rng) -> Self {
        let shape = *rng.pick(&[Shape::Capped, Shape::SideBySide, Shape::Elastic]).unwrap_or(&Shape::Capped);
        let count_or_one = count.max(1);
        // Every hand-over may leave the device idle for two frames and three thread wake-ups, and each client gets the device a few
        // times a window. No share can promise this lost time.
        let hand_over = 2 * delays.frame.1.as_nanos() + 3 * delays.wake.1.as_nanos();
        let lost = (4 * count_or_one + 20) * hand_over / 10_000;
        let promised = 9_000_u64.saturating_sub(lost).max(2_000);
        // The longest kernel is small beside the smallest share: 10 windows of a client hold at least ten kernels.
        let longest = rng.between(100, 1_000).min(20_000 / count_or_one);
        let memory = Bytes(rng.between(64, 512) * MIB);
        let instances = (0..count).map(|_| {
            let part = promised / count_or_one;
            let request = rng.between(part / 2, part).max(1);
            let (request, limit, sm) = match shape {
                Shape::Capped | Shape::Any => (request, request, rng.between(100, 10_000)),
                Shape::SideBySide => {
                    let limit = rng.between(500, 9_000);
                    (limit, limit, rng.between(50, 10_000 / count_or_one))
                }
                Shape::Elastic => (request, rng.between(request, 10_000), rng.between(5_001, 10_000)),
            };
            let limit_of_memory = habits.allocates.then(|| Bytes(rng.between(8, memory.0 / MIB / 2) * MIB));
            let spec = spec(request, limit, sm, limit_of_memory);
            let siblings = if habits.siblings { rng.between(1, 3) } else { 1 };
            let processes = (0..siblings).map(|_| (Timestamp::ZERO, program(shape, longest, habits, rng)));
            let processes = processes.collect();
            let closed = habits.closed && rng.percent(50);
            let on_loss = if closed { OnDaemonLoss::Closed } else { OnDaemonLoss::Open };
            InstancePlan { spec, on_loss, processes }
        });
        let instances = instances.collect();
        Self { shape, memory, instances }
    }

    /// Gives the first instances more memory together than the device has. A move takes at most 10 ms.
    fn draw_parking(&mut self, rng: &mut Rng) {
        let parked = usize::try_from(rng.between(2, 4)).unwrap_or(2);
        self.shape = Shape::Any;
        for (number, instance) in self.instances.iter_mut().enumerate() {
            let quota = instance.spec.quota();
            let (request, limit) = (u64::from(quota.request().get()), u64::from(quota.limit().get()));
            instance.spec = spec(request, limit, u64::from(instance.spec.sm().get()), None);
            let weights = Bytes(self.memory.0 / 100 * rng.between(52, 80));
            let guaranteed = Bytes(self.memory.0 / 10 * rng.below(2));
            for (_, program) in &mut instance.processes {
                program.allocates = number < parked;
                if number < parked {
                    program.weights = weights;
                }
            }
            if let Ok(range) = MemoryRange::new(guaranteed, None)
                && number < parked
            {
                instance.processes.truncate(1);
                instance.spec = instance.spec.with_memory(range);
            }
        }
    }
}

fn program(shape: Shape, longest: u64, habits: Habits, rng: &mut Rng) -> Program {
    let micros = Duration::from_micros;
    let shortest = rng.between(longest / 2, longest);
    let pauses = shape != Shape::Elastic;
    let synchronises = pauses && habits.synchronises && rng.percent(30);
    Program {
        kernel: (micros(shortest), micros(longest)),
        functions: rng.between(1, 3),
        // Without a spread the accounts can be compared to the nanosecond.
        // A prediction follows a falling length faster than a rising one. A program with varying kernels therefore gets too much
        // wherever the meter charges predictions: at the start of each turn, and nearly always for a program with a wait after each
        // kernel. A tenth up and down keeps the surplus within a point; programs with such waits do not vary here.
        spread_percent: if habits.mispredicted && !synchronises { rng.between(2, 10) } else { 0 },
        synchronises,
        pause: (micros(1), micros(rng.between(2, 1_000))),
        silences: pauses && habits.silences && rng.percent(40),
        allocates: habits.allocates,
        weights: Bytes::ZERO,
    }
}

/// A share, in basis points.
pub(super) fn spec(request: u64, limit: u64, sm: u64, memory: Option<Bytes>) -> ResourceSpec {
    let quota = |points: u64| u16::try_from(points).ok().and_then(Quota::new).unwrap_or(Quota::WHOLE);
    let sm = u16::try_from(sm).ok().and_then(SmShare::new).unwrap_or(SmShare::WHOLE);
    let quota = QuotaRange::new(quota(request), quota(limit)).unwrap_or(QuotaRange::BEST_EFFORT);
    ResourceSpec::new(quota, sm, memory).unwrap_or(ResourceSpec::UNLIMITED)
}

/// A share no larger than the old one, which keeps to the promise of the shape.
pub(super) fn smaller(shape: Shape, old: ResourceSpec, percent: u64) -> ResourceSpec {
    let quota = old.quota();
    let request = (u64::from(quota.request().get()) * percent / 100).max(1);
    let limit = match shape {
        Shape::Elastic => u64::from(quota.limit().get()),
        Shape::Capped | Shape::SideBySide | Shape::Any => request,
    };
    let new = spec(request, limit, u64::from(old.sm().get()), None);
    old.memory_range().map_or(new, |memory| new.with_memory(memory))
}
