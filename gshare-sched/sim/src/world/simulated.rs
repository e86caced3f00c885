//! The simulated part of a run: devices with their programs, and the bodies of instances.

use super::curve::Curve;
use super::kernels::{Nodes, Running, Worker};
use super::outcome::{Record, Spent};
use super::run_plan::{Function, Limits};
use super::slow_down::{FULL, InUse, TURN, Use};
use super::stages::Staged;
use crate::rng::Rng;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Duration, InstanceId, NodeId, Quota, RequestId, ServiceClass, SmShare, Timestamp};
use gshare_sched::platform::{DeviceSpec, Part, Regime, Work};
use std::rc::Rc;

/// The GPU time of a request, times parts of a device of 10^8: all of it, and the part beyond its instance's guarantee.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Took {
    pub(super) used: u128,
    pub(super) beyond: u128,
}

/// A device, present or lost.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) spec: DeviceSpec,
    pub(super) there: bool,
    in_use: InUse,
    /// The jobs with a part on the device; only kept on devices with mutual slow-down.
    jobs: Vec<usize>,
}

/// The state of an instance's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) enum Phase {
    /// The processes start and load onto the device.
    #[default]
    Loading,
    /// The processes start and load into host memory.
    StartsParked,
    /// The processes are on the device.
    Up,
    /// The processes are on the way to host memory.
    Leaving,
    /// The processes are parked.
    Away,
    /// The processes are on the way back to the device.
    Returning,
    /// The processes have ended, or are about to because of an order.
    Ended,
}

/// The processes of an instance.
#[derive(Debug, Default)]
pub(super) struct Body {
    pub(super) function: usize,
    pub(super) node: Option<NodeId>,
    pub(super) parts: Vec<Part>,
    pub(super) phase: Phase,
    /// Whether its processes live while it is parked.
    pub(super) lives: bool,
    /// A number that changes with each order, to recognise the effects of earlier orders.
    pub(super) epoch: u32,
    /// The platform hears nothing of the instance before this time.
    pub(super) told: Timestamp,
    pub(super) jobs: Vec<usize>,
    /// The measured times at its limits, by batch size.
    times: Vec<Measured>,
    /// The measured times at its requests, if it runs at its requests until it is full.
    at_request: Vec<Measured>,
    /// The measured GPU times, if kernels are simulated.
    gpu_times: Vec<(u32, Duration)>,
    /// The part of a device for a request, of 10^8, and the guaranteed part of it.
    area: u64,
    guaranteed: u64,
    /// The instance's shares of devices with mutual slow-down.
    uses: Vec<(usize, Use)>,
    /// The end of its last work.
    rests: Timestamp,
    /// The time from which each part of a pipeline is free.
    free: Vec<Timestamp>,
    /// Its processes, if kernels are simulated.
    workers: Vec<Worker>,
    /// Whether its requests are never answered.
    pub(super) hangs: bool,
    /// The time of its last order to come back to its device, and the time of its arrival there.
    pub(super) unparked: Option<(Timestamp, Timestamp)>,
}

impl Body {
    /// The body of a starting instance.
    pub(super) fn new(function: usize) -> Self {
        Self { function, ..Self::default() }
    }

    /// The part of a device in use by its work at full pace, of 10^8.
    pub(super) const fn area(&self) -> u64 {
        self.area
    }
}

/// Work under way.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) instance: InstanceId,
    /// The request of the job; `None` for a training job.
    pub(super) request: Option<RequestId>,
    pub(super) began: Timestamp,
    /// The remaining work at `since`, in ns at full pace.
    left: u64,
    since: Timestamp,
    pace: u64,
    epoch: u32,
    live: bool,
    /// Whether the job waits for its first turn, and takes nothing of its devices until then.
    waits: bool,
    /// The [`Body::uses`] of its instance.
    uses: Vec<(usize, Use)>,
    /// The pace with less than its limits.
    curve: Rc<Curve>,
    /// The workers still at work on the job; 0 if kernels are not simulated.
    parts: usize,
}

impl Job {
    fn left_at(&self, now: Timestamp) -> u64 {
        let elapsed = u128::from(now.saturating_since(self.since).as_nanos());
        let done = elapsed * u128::from(self.pace) / u128::from(FULL);
        self.left.saturating_sub(u64::try_from(done).unwrap_or(u64::MAX))
    }
}

/// A job's end, to be scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub(super) job: usize,
    pub(super) epoch: u32,
    pub(super) at: Timestamp,
}

/// The time of a batch at an instance's limits, and its change with less.
#[derive(Debug, Clone)]
struct Measured {
    batch: u32,
    time: Duration,
    curve: Rc<Curve>,
}

/// All devices and their work.
#[derive(Debug)]
pub(super) struct Floor<'a> {
    pub(super) devices: Vec<Device>,
    jobs: Vec<Job>,
    spare: Vec<usize>,
    /// The curve of unmeasured work, with a pace equal to its part of its limits.
    in_proportion: Rc<Curve>,
    /// The ends of jobs after their beginning or a change of pace, for the caller to take out and schedule.
    pub(super) ends: Vec<End>,
    /// The nodes, if kernels are simulated.
    nodes: Option<Running<'a>>,
    /// The record of requests and slices, if the plan asks for one.
    pub(super) record: Option<Record>,
}

impl<'a> Floor<'a> {
    pub(super) fn new(devices: &[DeviceSpec], nodes: Option<&'a Nodes>) -> Self {
        let device = |spec: &DeviceSpec| Device {
            spec: spec.clone(),
            there: false,
            in_use: InUse::default(),
            jobs: Vec::new(),
        };
        let devices = devices.iter().map(device).collect();
        let nodes = nodes.map(Running::new);
        Self {
            devices,
            jobs: Vec::new(),
            spare: Vec::new(),
            in_proportion: Rc::default(),
            ends: Vec::new(),
            nodes,
            record: None,
        }
    }

    /// The time of the next event on a node with simulated kernels.
    pub(super) fn next_at(&self) -> Option<Timestamp> {
        self.nodes.as_ref().and_then(Running::next_at)
    }

    /// Lets time pass on the nodes, and adds the jobs due now to the ends.
    ///
    /// # Errors
    /// The violation of a node.
    pub(super) fn advance(&mut self, now: Timestamp) -> Result<(), String> {
        let Some(nodes) = &mut self.nodes else { return Ok(()) };
        for task in nodes.advance(now)? {
            let (job, epoch) = job_of(task);
            let Some(found) = self.jobs.get_mut(job).filter(|found| found.live && found.epoch == epoch)
            else {
                continue;
            };
            found.parts = found.parts.saturating_sub(1);
            if found.parts == 0 {
                self.ends.push(End { job, epoch, at: now });
            }
        }
        Ok(())
    }

    /// The number of ended kernels.
    pub(super) fn kernels(&self) -> u64 {
        self.nodes.as_ref().map_or(0, Running::kernels)
    }

    /// The number of an instance's kernels since its processes came to their devices.
    pub(super) fn kernels_of(&self, body: &Body) -> u64 {
        let nodes = self.nodes.iter();
        nodes.flat_map(|nodes| body.workers.iter().map(|worker| nodes.kernels_of(*worker))).sum()
    }

    /// The remaining work of a training job, or of its slowest worker, in time at full pace.
    pub(super) fn left(&self, now: Timestamp, body: &Body) -> Option<Duration> {
        let &number = body.jobs.last()?;
        let job = &self.jobs[number];
        let task = task_of(number, job.epoch);
        let of = |nodes: &Running<'_>| body.workers.iter().map(|worker| nodes.left(*worker, task)).max();
        let by_kernels = self.nodes.as_ref().and_then(of);
        Some(by_kernels.unwrap_or_else(|| Duration::from_nanos(job.left_at(now))))
    }

    /// Brings the processes of an instance up on their devices.
    pub(super) fn up(&mut self, now: Timestamp, body: &mut Body, function: &Function) {
        let Some(nodes) = &mut self.nodes else { return };
        let start = |part: &Part| nodes.start(now, part.gpu.index(), &part.share, function.class);
        body.workers = body.parts.iter().filter_map(start).collect();
    }

    /// Takes the processes of an instance off their devices, and returns their used part of a device, of 10^8 ns.
    pub(super) fn down(&mut self, now: Timestamp, body: &mut Body, killed: bool) -> u128 {
        let Some(nodes) = &mut self.nodes else { return 0 };
        body.workers.drain(..).map(|worker| nodes.end(now, worker, killed)).sum()
    }

    /// The job, if its epoch is still the same.
    pub(super) fn job(&self, job: usize, epoch: u32) -> Option<&Job> {
        self.jobs.get(job).filter(|found| found.live && found.epoch == epoch)
    }

    /// Lays the parts of an instance on devices, which determines the times of its requests.
    pub(super) fn lay(&self, now: Timestamp, body: &mut Body, function: &Function, parts: &[Part]) {
        body.parts = parts.to_vec();
        body.free = vec![now; parts.len()];
        body.uses.clear();
        (body.area, body.guaranteed) = (0, 0);
        for part in parts {
            let Some(device) = self.devices.get(part.gpu.index()) else { continue };
            body.node = Some(device.spec.node);
            let (area, guaranteed) = match device.spec.effective_regime() {
                Regime::Fractional => {
                    let sensitive = function.class.is_some_and(ServiceClass::is_slo_sensitive);
                    let one = Use { share: part.share.tokens(), sm: part.share.sm(), sensitive };
                    body.uses.push((part.gpu.index(), one));
                    let area = |time: Quota, sm: SmShare| u64::from(time.get()) * u64::from(sm.get());
                    let (time, share) = (part.share.time(), &part.share);
                    (area(time.limit(), share.sm_limit()), area(time.request(), share.sm()))
                }
                Regime::Sliced => {
                    let (compute, whole) =
                        slice_of(&device.spec, part).map_or((1, 1), |(_, g, whole)| (g, whole));
                    (100_000_000 * compute / whole, 100_000_000 * compute / whole)
                }
                Regime::Whole => (100_000_000, 100_000_000),
            };
            body.area += area;
            body.guaranteed += guaranteed;
        }
        let Some(part) = parts.first() else { return };
        let profile = match &function.spec.work {
            Work::Inference { profile } => function.learned.as_ref().or(profile.as_ref()),
            _ => None,
        };
        let device = self.devices.get(part.gpu.index());
        (body.times, body.at_request, body.gpu_times) = Default::default();
        if let (Some(profile), Some(device)) = (profile, device) {
            body.times = times(profile, &device.spec, part, true);
            body.gpu_times = gpu_times(profile, part.share.sm().get());
            if function.limits == Limits::WhileFull {
                body.at_request = times(profile, &device.spec, part, false);
            }
        }
        if part.share.sm() == SmShare::WHOLE && part.share.time().limit() == Quota::WHOLE {
            // Only turns of others make it wait, and the others differ from the measurement: a latency has waits in it.
            for (one, (_, gpu)) in body.times.iter_mut().zip(&body.gpu_times) {
                one.time = one.time.min(*gpu);
            }
        }
    }

    /// Begins a request on an instance on its devices, and returns its time on the devices, apart from slow-down by others.
    pub(super) fn serve(
        &mut self,
        now: Timestamp,
        id: InstanceId,
        body: &mut Body,
        function: &Function,
        (request, batch): (RequestId, Option<usize>),
        (seed, jitter): (u64, u64),
    ) -> Took {
        let mut noise = Rng::new(seed ^ request.number().wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let percent = noise.between(100 - jitter, 100 + jitter);
        let vary = |time: Duration| Duration::from_nanos((time.as_nanos() * percent / 100).max(1));
        let Work::Pipeline { dag, goal } = &function.spec.work else {
            if !body.workers.is_empty() {
                let count = u64::try_from(batch.unwrap_or(body.jobs.len() + 1)).unwrap_or(u64::MAX);
                let batch = body.gpu_times.iter().find(|(batch, _)| u64::from(*batch) >= count);
                let batch = batch.or(body.gpu_times.last()).copied();
                let work = batch.map_or(Duration::ZERO, |(batch, time)| {
                    Duration::from_nanos(time.as_nanos() / u64::from(batch.max(1)).min(count))
                });
                self.begin(now, id, body, Some(request), (Duration::ZERO, vary(work)), None);
                // Kernels count their own time.
                return Took::default();
            }
            // Without a batch that the platform chose, it is this request and the instance's present requests.
            let count = batch.unwrap_or(body.jobs.len() + 1);
            let full = body.times.last().is_none_or(|most| count >= most.batch as usize);
            let (times, area) = match full || body.at_request.is_empty() {
                true => (&body.times, body.area),
                false => (&body.at_request, body.guaranteed),
            };
            let measured = times.iter().find(|one| one.batch as usize >= count).or(times.last());
            let (batch, time, curve) = measured
                .map_or((1, Duration::ZERO, None), |one| (one.batch, one.time, Some(Rc::clone(&one.curve))));
            let (work, shared) = (vary(time), u128::from(batch));
            // A program that goes on at once keeps the device.
            let rested = body.jobs.is_empty() && body.rests < now;
            let most = if rested { self.turn(now, &body.uses) } else { Duration::ZERO };
            let turn = Duration::from_nanos(noise.between(0, most.as_nanos()));
            self.begin(now, id, body, Some(request), (turn, work), curve);
            let gpu =
                body.gpu_times.iter().find(|(of, _)| u128::from(*of) == shared).map(|(_, time)| vary(*time));
            let time = u128::from(gpu.unwrap_or(work).min(work).as_nanos());
            let beyond = time * u128::from(area.saturating_sub(body.guaranteed)) / shared;
            return Took { used: time * u128::from(area) / shared, beyond };
        };
        let staged = Staged { dag, goal, seed, number: request.number() };
        let (end, used) = self.stages(now, body, staged, request, vary);
        self.begin(now, id, body, Some(request), (Duration::ZERO, end.saturating_since(now)), None);
        Took { used, beyond: 0 }
    }

    /// Gives each part of a pipeline its work for a request, and returns the end of the last part's work, and the time on the
    /// devices, times their parts.
    fn stages(
        &mut self,
        now: Timestamp,
        body: &mut Body,
        staged: Staged<'_>,
        request: RequestId,
        vary: impl Fn(Duration) -> Duration,
    ) -> (Timestamp, u128) {
        let (mut end, mut used) = (now, 0);
        let unparked = body.unparked.take().filter(|(_, at)| *at == now);
        let load = unparked.map_or(Duration::ZERO, |(from, at)| at.saturating_since(from));
        let mut spent = Spent { load, slices: body.parts.len(), ..Spent::default() };
        let mut index = 0;
        for stage in body.parts.chunk_by(|one, next| one.stage == next.stage) {
            let (at, mut longest) = (end, (Duration::ZERO, Duration::ZERO));
            for part in stage {
                let device = self.devices.get(part.gpu.index());
                let slice = device.and_then(|device| slice_of(&device.spec, part));
                let components = if part.components.is_empty() { staged.dag.all() } else { part.components };
                let (name, transfer) = (slice.map(|(name, _, _)| name), staged.hand_offs(components));
                let time = vary(staged.work(components, name) + transfer);
                let from = at.max(body.free[index]);
                body.free[index] = from + time;
                index += 1;
                if from + time >= end {
                    (end, longest) = (from + time, (time.saturating_sub(transfer), transfer.min(time)));
                }
                let (compute, whole) = slice.map_or((1, 1), |(_, compute, whole)| (compute, whole));
                used += u128::from(time.as_nanos()) * u128::from(100_000_000 * compute / whole);
                if let Some(record) = &mut self.record {
                    record.worked.entry((part.gpu, part.slice)).or_default().push((from, from + time));
                }
            }
            spent.execution += longest.0;
            spent.transfer += longest.1;
        }
        if let Some(record) = &mut self.record {
            record.open.insert(request, spent);
        }
        (end, used)
    }

    /// The longest wait of a program for its first turn on these devices. The wait is zero if the program runs beside the work
    /// there, or beside some of it, since the rest then does not have the device. Work with an end within a turn leaves the device
    /// by then, and the pace of the two programs covers their loss to each other.
    fn turn(&self, now: Timestamp, uses: &[(usize, Use)]) -> Duration {
        let waits = |&(device, one): &(usize, Use)| {
            let jobs = self.devices[device].jobs.iter().map(|job| &self.jobs[*job]);
            let mut others = jobs.filter_map(|job| {
                let other = job.uses.iter().find(|(of, _)| *of == device)?.1;
                Some((other.fits_beside(one), job.left_at(now)))
            });
            let turns = |(beside, left): (bool, u64)| !beside && left > TURN.as_nanos();
            !self.devices[device].jobs.is_empty() && others.all(turns)
        };
        if uses.iter().any(waits) { TURN } else { Duration::ZERO }
    }

    /// Begins a job of `work` at full pace, after a wait for its turn; without a curve its pace is its part of its limits.
    pub(super) fn begin(
        &mut self,
        now: Timestamp,
        instance: InstanceId,
        body: &mut Body,
        request: Option<RequestId>,
        (turn, work): (Duration, Duration),
        curve: Option<Rc<Curve>>,
    ) {
        let job = self.spare.pop().unwrap_or(self.jobs.len());
        if job == self.jobs.len() {
            self.jobs.push(Job {
                instance,
                request,
                began: now,
                left: 0,
                since: now,
                pace: 0,
                epoch: 0,
                live: true,
                waits: false,
                uses: Vec::new(),
                curve: Rc::default(),
                parts: 0,
            });
        }
        let new = &mut self.jobs[job];
        (new.instance, new.request, new.began, new.since, new.live) = (instance, request, now, now, true);
        // The pace is impossible, so that the job's end is scheduled.
        (new.left, new.pace) = (work.as_nanos(), 0);
        new.parts = body.workers.len();
        if let Some(nodes) = self.nodes.as_mut().filter(|_| new.parts > 0) {
            // Pace and end are the node's business.
            new.uses.clear();
            for &worker in &body.workers {
                nodes.give(now, worker, task_of(job, new.epoch), work);
            }
            return body.jobs.push(job);
        }
        new.uses.clone_from(&body.uses);
        new.curve = curve.unwrap_or_else(|| Rc::clone(&self.in_proportion));
        new.waits = !turn.is_zero();
        body.jobs.push(job);
        if new.waits {
            return self.ends.push(End { job, epoch: new.epoch, at: now.saturating_add(turn) });
        }
        self.take_devices(now, job, body);
    }

    /// Lets a job take its devices after its wait for a turn, and returns whether it waited.
    pub(super) fn take_turn(&mut self, now: Timestamp, job: usize, body: &Body) -> bool {
        let waited = core::mem::take(&mut self.jobs[job].waits);
        if waited {
            self.take_devices(now, job, body);
        }
        waited
    }

    fn take_devices(&mut self, now: Timestamp, job: usize, body: &Body) {
        // An instance has its share once, for any number of its requests.
        let first = body.jobs.iter().all(|other| *other == job || self.jobs[*other].waits);
        for (device, one) in &body.uses {
            let device = &mut self.devices[*device];
            device.jobs.push(job);
            if first {
                device.in_use.add(*one);
            }
        }
        self.pace(now, job);
        self.others(now, &body.uses);
    }

    /// Ends a job, and returns its remaining work in ns.
    pub(super) fn end(&mut self, now: Timestamp, job: usize, body: &mut Body) -> Duration {
        let ended = &mut self.jobs[job];
        let mut left = ended.left_at(now);
        if let Some(nodes) = self.nodes.as_ref().filter(|_| !body.workers.is_empty()) {
            let task = task_of(job, ended.epoch);
            left = body.workers.iter().map(|worker| nodes.left(*worker, task).as_nanos()).max().unwrap_or(0);
        }
        let waited = core::mem::take(&mut ended.waits);
        ended.live = false;
        ended.epoch = ended.epoch.wrapping_add(1);
        self.spare.push(job);
        body.jobs.retain(|one| *one != job);
        body.rests = now;
        if waited || !body.workers.is_empty() {
            return Duration::from_nanos(left);
        }
        let last = body.jobs.iter().all(|other| self.jobs[*other].waits);
        for (device, one) in &body.uses {
            let device = &mut self.devices[*device];
            device.jobs.retain(|other| *other != job);
            if last {
                device.in_use.remove(*one);
            }
        }
        self.others(now, &body.uses);
        Duration::from_nanos(left)
    }

    /// Paces all jobs on these devices.
    fn others(&mut self, now: Timestamp, uses: &[(usize, Use)]) {
        for &(device, _) in uses {
            let jobs = core::mem::take(&mut self.devices[device].jobs);
            for &job in &jobs {
                self.pace(now, job);
            }
            self.devices[device].jobs = jobs;
        }
    }

    /// Gives a job the pace of its slowest part, and schedules its end after a change.
    fn pace(&mut self, now: Timestamp, job: usize) {
        let of = |&(device, one): &(usize, Use)| self.devices[device].in_use.part(one);
        let part = self.jobs[job].uses.iter().map(of).min().unwrap_or(FULL);
        let paced = &mut self.jobs[job];
        let pace = paced.curve.pace(part);
        if paced.pace == pace {
            return;
        }
        (paced.left, paced.since, paced.pace) = (paced.left_at(now), now, pace);
        paced.epoch = paced.epoch.wrapping_add(1);
        let takes = (u128::from(paced.left) * u128::from(FULL)).div_ceil(u128::from(pace));
        let takes = Duration::from_wide_nanos(takes);
        self.ends.push(End { job, epoch: paced.epoch, at: now.saturating_add(takes) });
    }
}

/// The number of a job's tasks on nodes.
fn task_of(job: usize, epoch: u32) -> u64 {
    (u64::try_from(job).unwrap_or(u64::MAX) << 32) | u64::from(epoch)
}

fn job_of(task: u64) -> (usize, u32) {
    let epoch = u32::try_from(task & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    (usize::try_from(task >> 32).unwrap_or(usize::MAX), epoch)
}

/// The GPU times by batch size at the nearest measured SM share, with the largest quota measured there: the quota used by a
/// constantly busy function for each batch. A latency would count waiting as work.
fn gpu_times(profile: &ProfileTable, sm: u16) -> Vec<(u32, Duration)> {
    let off = |point: &&ProfilePoint| (point.sm.get().abs_diff(sm), core::cmp::Reverse(point.quota));
    let Some(nearest) = profile.points().iter().min_by_key(off) else { return Vec::new() };
    let there =
        profile.points().iter().filter(|point| (point.sm, point.quota) == (nearest.sm, nearest.quota));
    let work = |point: &ProfilePoint| {
        let quota = u128::from(point.batch) * u128::from(point.quota.get()) * 100_000_000;
        Duration::from_wide_nanos(quota / u128::from(point.throughput.as_milli().max(1))).min(point.p50)
    };
    there.map(|point| (point.batch, work(point))).collect()
}

/// The name of the part's slice, its compute slices, and the GPU's compute slices.
fn slice_of<'a>(spec: &'a DeviceSpec, part: &Part) -> Option<(&'a str, u64, u64)> {
    let layout = spec.mig.as_ref()?;
    let profile = layout.model().get(part.slice?.profile)?;
    Some((&profile.name, profile.compute_slices.into(), layout.model().family.compute_slices().into()))
}

/// The medians by batch size at the measured SM share and quota nearest to the limits of the part, or to its requests, by the sum
/// of the differences.
fn times(profile: &ProfileTable, spec: &DeviceSpec, part: &Part, limits: bool) -> Vec<Measured> {
    let (sm, quota) = match spec.effective_regime() {
        Regime::Whole => (SmShare::WHOLE.get(), Quota::WHOLE.get()),
        Regime::Fractional if !limits => (part.share.sm().get(), part.share.time().request().get()),
        Regime::Fractional => (part.share.sm_limit().get(), part.share.time().limit().get()),
        Regime::Sliced => {
            let (compute, whole) =
                slice_of(spec, part).map_or((1, 1), |(_, compute, whole)| (compute, whole));
            let sm = 10_000 * compute / whole;
            (u16::try_from(sm).unwrap_or(10_000), Quota::WHOLE.get())
        }
    };
    let off = |point: &&ProfilePoint| {
        u32::from(point.sm.get().abs_diff(sm)) + u32::from(point.quota.get().abs_diff(quota))
    };
    let Some(nearest) = profile.points().iter().min_by_key(off) else { return Vec::new() };
    // Points are in the order of their batch first.
    let there =
        profile.points().iter().filter(|point| (point.sm, point.quota) == (nearest.sm, nearest.quota));
    let measured = |point: &ProfilePoint| {
        let curve =
            Curve::new(profile, point.batch, (point.sm.get(), point.quota.get()), part.share.sm().get());
        Measured { batch: point.batch, time: point.p50, curve: Rc::new(curve) }
    };
    there.map(measured).collect()
}
