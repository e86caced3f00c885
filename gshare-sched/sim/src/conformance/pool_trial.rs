//! Whether a platform with one pool keeps its contract, in a [`world`](crate::world) with all its faults.
//!
//! # Runs
//! Devices are lost and come back, starts are refused, take long and die, callers give up, and reports come late. Besides,
//! functions are removed and deployed again, bounds change, and outdated reports arrive.
//!
//! # Checks
//! The suite checks all rules of the [`Book`], and:
//! - the platform's instances are the book's instances, and its number of waiting requests is the book's number;
//! - a live function has its minimum of instances, starting instances included, within a minute, unless it was counted as unmet since
//!   it last had the minimum. Also when unmet, it has the minimum again within ten seconds in which it surely fits a device and none of
//!   its starts fails. No order drains an instance of the minimum, and after the last fault each function has its minimum within a
//!   bound;
//! - every part of an instance has a limit of memory, and the platform orders no profile.

use super::story::{Broken, Log, claim};
use crate::arrivals::{ArrivalError, Arrivals};
use crate::rng::Rng;
use crate::story::Story;
use crate::world::{self, Book, Change, Device, Fault, Function, Outcome, Plan};
use gshare_core::{Duration, Engine, FunctionId, GpuId, InstanceId, Timestamp};
use gshare_sched::Wrapped;
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Part, Platform, PlatformAction, PlatformError, PlatformEvent,
    Regime, Work,
};
use std::collections::BTreeMap;

/// The devices, functions and load of a pool's trial.
#[derive(Debug, Clone)]
pub(crate) struct PoolTrial {
    /// The devices at the start.
    pub(crate) devices: Vec<DeviceSpec>,
    /// The functions; each fits at least one of the devices, and there is room for the minimum of each.
    pub(crate) functions: Vec<FunctionSpec>,
    /// The approximate number of requests.
    pub(crate) requests: u32,
    /// The mean time between two requests, apart from pauses after every hundred.
    pub(crate) every: Duration,
    /// Whether faults strike.
    pub(crate) faults: bool,
    /// The time from the arrival of the last request to the end of all requests.
    pub(crate) patience: Duration,
}

const KEEPS: &str = "every order can be carried out, no device is oversold, and each request ends once";
const TAKES: &str = "an event that may come is taken";
const VIEWS: &str = "instances and waiting requests are those that were ordered and told";
const LEAST: &str = "the fewest instances of a function are kept";
const SHARES: &str = "an instance is ordered with a share of memory on each device, and without a profile";

/// Quiet times let keep-alives and windows end.
const PAUSE: Duration = Duration::from_secs(30);
/// The time in which a pool starts a function's missing instances, or reports that it cannot. A scaler waits a while after a
/// refused start.
const SOON: Duration = Duration::from_secs(60);
/// The same time for a function that surely fits a device, from the later of this fit and its last failed start.
const RESTORED: Duration = Duration::from_secs(10);

/// Runs a platform of one pool, without devices and functions, in the world of a seed, and returns counts.
///
/// # Errors
/// The first broken claim.
pub(crate) fn pool(platform: Wrapped<Platform>, trial: &PoolTrial, seed: u64) -> Result<Outcome, Story> {
    let log = Log::default();
    let broken = |broken| log.story(seed, broken);
    let plan = trial.plan(seed).map_err(|error| broken((KEEPS, error.to_string())))?;
    let alone = Alone {
        platform: log.watch(Box::new(platform)),
        book: Book::new(),
        log: log.clone(),
        rng: Rng::new(!seed),
        faults: trial.faults,
        quiet: Timestamp::ZERO + plan.length + Duration::from_nanos(plan.settle.as_nanos() / 2),
        live: BTreeMap::new(),
        ready: None,
    };
    let (result, _) = world::story(&plan, seed, alone);
    let outcome = result.map_err(|failure| broken((KEEPS, failure.wrong)))?;
    log.is_unbroken().map_err(broken).map(|()| outcome)
}

impl PoolTrial {
    fn plan(&self, seed: u64) -> Result<Plan, ArrivalError> {
        let (mut rng, count) = (Rng::new(seed), u32::try_from(self.functions.len()).unwrap_or(u32::MAX));
        let (hundred, each) = (self.every.saturating_mul(100), self.every.as_secs_f64() * f64::from(count));
        let mut functions = Vec::new();
        for (index, spec) in self.functions.iter().enumerate() {
            let arrivals = Arrivals::on_off(hundred, PAUSE, 1.0 / each)?;
            let mut function = Function::new(format!("f{index}"), spec.clone()).with_arrivals(arrivals);
            let patience = rng.duration(Duration::from_millis(50), Duration::from_secs(20));
            function.patience = (self.faults && rng.percent(30)).then_some(patience);
            functions.push(function);
        }
        let length = (hundred + PAUSE).saturating_mul(u64::from(self.requests / 100));
        let mut plan = Plan::new(self.devices.clone(), functions, length);
        (plan.settle, plan.jitter) = (self.patience, 50);
        if !self.faults {
            return Ok(plan);
        }
        for (fault, seconds) in [
            (Fault::DeviceLost, 15),
            (Fault::InstanceDies, 8),
            (Fault::StartRefused, 15),
            (Fault::LoadSlow, 20),
            (Fault::ReportLate, 15),
            (Fault::ClientCancels, 1),
        ] {
            plan.faults.every.insert(fault, Duration::from_secs(seconds));
        }
        plan.faults.back = (Duration::from_millis(1), Duration::from_secs(6));
        let mut at = Duration::ZERO;
        while !self.functions.is_empty() && at < length {
            at += rng.duration(Duration::ZERO, Duration::from_secs(24));
            let index = usize::try_from(rng.below(count.into())).unwrap_or(0);
            let spec = &self.functions[index];
            if rng.percent(50) {
                let back = rng.duration(Duration::from_millis(1), Duration::from_secs(6));
                plan.changes.extend([(at, index, Change::Removed), (at + back, index, Change::Deployed)]);
            } else {
                let least = spec.min_instances - u32::from(spec.min_instances > 0 && rng.percent(50));
                let most = rng.between(least.max(1).into(), spec.max_instances.max(least.max(1)).into());
                let most = u32::try_from(most).unwrap_or(spec.max_instances);
                plan.changes.push((at, index, Change::Bounds(least, most)));
            }
        }
        Ok(plan)
    }
}

/// A deployed function.
struct Live {
    spec: Box<FunctionSpec>,
    least: u32,
    /// The function was counted as unmet since it last had its minimum; then the count.
    unmet: bool,
    counted: u64,
    /// The time from which the function has been below its minimum, and the time from which it has surely fitted a device.
    below: Option<Timestamp>,
    fits: Option<Timestamp>,
    /// The time of the last failed start of the function.
    failed: Timestamp,
}

/// A platform of one pool, with books of its own.
struct Alone {
    platform: Wrapped<Wrapped<Platform>>,
    book: Book,
    log: Log,
    rng: Rng,
    faults: bool,
    /// From this time on no fault strikes, and nothing is under way.
    quiet: Timestamp,
    live: BTreeMap<FunctionId, Live>,
    /// The function of an instance that is ready just now and may take the place of another instance.
    ready: Option<FunctionId>,
}

impl Engine for Alone {
    type Event = PlatformEvent;
    type Action = PlatformAction;
    type Error = PlatformError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: PlatformEvent,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), PlatformError> {
        self.take(now, event, actions).map_err(|broken| {
            let why = broken.1.clone();
            self.log.breaks(broken);
            PlatformError::Policy { why }
        })
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.platform.next_deadline()
    }
}

impl Alone {
    fn inner(&self) -> &Platform {
        self.platform.engine().engine()
    }

    fn take(
        &mut self,
        now: Timestamp,
        event: PlatformEvent,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), Broken> {
        self.note(now, &event).map_err(|wrong| (KEEPS, wrong))?;
        self.tell(now, event, actions)?;
        self.ready = None;
        if self.faults && self.rng.percent(2) {
            self.old_report(now, actions)?;
        }
        self.agree(now)
    }

    /// Keeps the books before the platform gets an event.
    fn note(&mut self, now: Timestamp, event: &PlatformEvent) -> Result<(), String> {
        let starts = self.book.instances.iter().filter(|(_, one)| one.ready.is_none());
        let starts: Vec<(InstanceId, FunctionId)> = starts.map(|(id, one)| (*id, one.function)).collect();
        self.book.told(now, event)?;
        for (_, function) in starts.iter().filter(|(instance, _)| !self.book.has_instance(*instance)) {
            self.live.entry(*function).and_modify(|live| live.failed = now);
        }
        match event {
            PlatformEvent::FunctionDeployed { function, spec } => {
                let (spec, least, failed) = (spec.clone(), spec.min_instances, Timestamp::ZERO);
                let live = Live { spec, least, unmet: false, counted: 0, below: None, fits: None, failed };
                self.live.insert(*function, live);
            }
            PlatformEvent::BoundsChanged { function, min_instances, .. } => {
                self.live.entry(*function).and_modify(|live| live.least = *min_instances);
            }
            PlatformEvent::FunctionRemoved { function } => {
                let least = self.live.remove(function).map_or(0, |live| live.least);
                let has = self.staying(*function);
                if now >= self.quiet && has < least {
                    return Err(format!("{function} has {has} of the {least} instances that are kept"));
                }
            }
            PlatformEvent::Instance { instance, report: InstanceReport::Ready } => {
                self.ready = self.book.instances.get(instance).map(|one| one.function);
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends the platform an event it must accept.
    fn tell(
        &mut self,
        now: Timestamp,
        event: PlatformEvent,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), Broken> {
        let before = actions.len();
        self.platform.handle(now, event, actions).map_err(|error| (TAKES, error.to_string()))?;
        for order in actions.iter().skip(before) {
            self.order(now, order)?;
        }
        self.inner().invariants();
        Ok(())
    }

    fn order(&mut self, now: Timestamp, order: &PlatformAction) -> Result<(), Broken> {
        self.book.ordered(now, order).map_err(|wrong| (KEEPS, wrong))?;
        match order {
            PlatformAction::Drain { instance } => {
                let function = self.book.instances[instance].function;
                let least = self.live.get(&function).map_or(0, |live| live.least);
                let has = self.staying(function);
                claim(has >= least || self.ready == Some(function), LEAST, || {
                    format!("{function} has {has} instances now, fewer than are kept")
                })?;
            }
            PlatformAction::Start { parts, .. } | PlatformAction::Unpark { parts, .. } => {
                let limited = parts.iter().all(|part| part.share.memory().is_some());
                claim(limited, SHARES, || format!("{parts:?}"))?;
            }
            PlatformAction::Profile { function } => return Err((SHARES, format!("{function} is profiled"))),
            _ => {}
        }
        Ok(())
    }

    /// Sends the platform a report about an unknown instance, or a repeated report.
    fn old_report(&mut self, now: Timestamp, actions: &mut Vec<PlatformAction>) -> Result<(), Broken> {
        const OLD: [InstanceReport; 5] = [
            InstanceReport::Ready,
            InstanceReport::Refused,
            InstanceReport::Parked,
            InstanceReport::Unparked,
            InstanceReport::Gone,
        ];
        let names: Vec<InstanceId> = self.book.names.iter().copied().collect();
        let Some(&instance) = self.rng.pick(&names) else { return Ok(()) };
        let report = match self.book.instances.get(&instance) {
            None => *self.rng.pick(&OLD).unwrap_or(&InstanceReport::Gone),
            Some(one) if one.ready.is_none() => InstanceReport::Unparked,
            Some(one) if one.moving => InstanceReport::Ready,
            Some(_) => InstanceReport::Parked,
        };
        self.tell(now, PlatformEvent::Instance { instance, report }, actions)
    }

    /// Checks that the platform's view equals the book, and that functions have their minimums.
    fn agree(&mut self, now: Timestamp) -> Result<(), Broken> {
        let mut views = Vec::new();
        self.inner()
            .instances(&mut |view| views.push((view.instance, view.function, view.requests as usize)));
        let book = self.book.instances.iter().map(|(id, one)| (*id, one.function, one.requests.len()));
        let book: Vec<_> = book.collect();
        claim(views == book, VIEWS, || {
            format!("the platform's instances are {views:?}, those of the book {book:?}")
        })?;
        let mut waits: BTreeMap<FunctionId, usize> = BTreeMap::new();
        for request in self.book.requests.values().filter(|found| found.on.is_none()) {
            *waits.entry(request.function).or_default() += 1;
        }
        for function in self.book.functions.keys() {
            let (told, waits) = (self.inner().waiting(*function), waits.get(function).copied().unwrap_or(0));
            claim(told == waits, VIEWS, || {
                format!("{told} requests of {function} wait, {waits} by the book")
            })?;
        }
        let platform = self.platform.engine().engine();
        for (function, live) in &mut self.live {
            let counted = platform.function(*function).map_or(0, |of| of.stats.unmet);
            live.unmet |= core::mem::replace(&mut live.counted, counted) < counted;
        }
        let fitting: Vec<bool> = self.live.values().map(|live| self.surely_fits(&live.spec)).collect();
        for ((function, live), fits) in self.live.iter_mut().zip(fitting) {
            let has = self.book.functions.get(function).map_or(0, |of| of.instances);
            let least = live.least;
            if has >= least {
                (live.unmet, live.below, live.fits) = (false, None, None);
                continue;
            }
            live.fits = fits.then(|| live.fits.unwrap_or(now));
            let late = live.fits.is_some_and(|fits| now > fits.max(live.failed) + RESTORED);
            claim(!late, LEAST, || {
                format!(
                    "{function} has {has} of {least} instances, and has fitted a device since {:?}",
                    live.fits
                )
            })?;
            let since = *live.below.get_or_insert(now);
            claim(now <= since + SOON || live.unmet, LEAST, || {
                format!("{function} has {has} of {least} instances since {since}, and is not unmet")
            })?;
        }
        Ok(())
    }

    /// The instances of a function that start, are ready or are parked.
    fn staying(&self, function: FunctionId) -> u32 {
        self.book.functions.get(&function).map_or(0, |of| of.instances)
    }

    /// Whether a device holds another instance of a function for every position of its present instances. A whole device must have
    /// no instance. On a fractional device with k instances, the widest point must fit in the widest of k + 1 gaps in the worst
    /// case.
    fn surely_fits(&self, spec: &FunctionSpec) -> bool {
        let Work::Inference { profile: Some(profile) } = &spec.work else { return false };
        let widest = profile.points().iter().map(|point| u64::from(point.sm.get())).max().unwrap_or(0);
        let regime = self.inner().regime_for(spec);
        let room = |(gpu, device): (&GpuId, &Device)| {
            let there = self.book.instances.values().filter(|one| one.placed).flat_map(|one| &one.parts);
            let on: Vec<&Part> = there.filter(|part| part.gpu == *gpu).collect();
            let taken = on.iter().map(|part| part.share.memory().map_or(u64::MAX, |memory| memory.get()));
            let weights = spec.weights.map_or(0, |weights| weights.bytes.get()) + device.weights_memory();
            let memory = taken.fold(spec.memory.get() + weights, u64::saturating_add);
            let sms: u64 = on.iter().map(|part| u64::from(part.share.sm().get())).sum();
            let gap = 10_000u64.saturating_sub(sms) / (on.len() as u64 + 1);
            let free = if regime == Regime::Whole { on.is_empty() } else { gap >= widest };
            memory <= device.spec.memory.get() && free
        };
        spec.devices == 1 && regime != Regime::Sliced && self.book.devices.iter().any(room)
    }
}
