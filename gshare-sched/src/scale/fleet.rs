//! The instances of all functions, kept alike for every horizontal scaler and rule of decision.
//!
//! A scaler of your own is a struct with a `fleet: Fleet<S>` and a function `decide(&mut self, function, load, &mut actions)`, which is
//! called with each report of load: it looks at a [`Function`], and orders by [`Fleet::start`] and [`Fleet::take_away`].
//! [`horizontal_scaler!`](crate::horizontal_scaler) does the rest.
//!
//! ```text
//! Start ─▶ starting ─ InstanceReady ─▶ ready ─ Drain ─▶ draining ─ InstanceGone ─▶ gone
//!             └─ StartRefused, InstanceGone, or not needed: Stop ─▶ gone
//! ```
//! Starting and ready instances make up the **capacity**. A stopped instance is forgotten at once, whether the host reports it gone or
//! not. The time that a start and a drain may take is the host's business.

use crate::scale::{FunctionScale, HorizontalAction, HorizontalError, HorizontalEvent, InstanceCounts};
use core::cmp::Ordering;
use gshare_core::profile::{ProfilePoint, RequestRate};
use gshare_core::{ConfigError, InstanceId, TimeWentBack};
#[doc(hidden)]
pub use gshare_core::{Duration, Engine, FunctionId, Timestamp};
use std::collections::BTreeMap;

/// The most instances of one function.
const MAX_INSTANCES: u32 = 4096;

crate::settings_table::settings! {
    /// Settings that every horizontal scaler has.
    pub struct FleetConfig {
        /// Length of a tick. 1 s (Dilu, section 4): shorter ticks see noise, longer ticks miss a burst.
        #[cfg_attr(feature = "serde", serde(rename = "tick_ns"))]
        pub tick: Duration = Duration::from_secs(1), with_tick;
        /// Time before another try of a point refused for lack of room. 30 s: placements change by then.
        #[cfg_attr(feature = "serde", serde(rename = "retry_after_ns"))]
        pub retry_after: Duration = Duration::from_secs(30), with_retry_after;
        /// Number of functions. 1,048,576.
        pub max_functions: u32 = 1 << 20, with_max_functions;
    }
}

impl FleetConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let (ms, hour) = (Duration::from_millis(1), Duration::from_secs(3600));
        gshare_core::check_fields!("fleet.", self {
            tick, retry_after in ms..=hour, "need 1ms to 3600s";
            max_functions in 1..=1 << 24, "need 1 to 16777216";
        })
    }
}

/// Makes a policy a scaler: its `fleet` takes each event, and its `decide` each report of load. A policy with early reports names a
/// function for their use.
#[macro_export]
macro_rules! horizontal_scaler {
    ($policy:ty $(, $early:expr)?) => {
        impl $crate::scale::fleet::Engine for $policy {
            type Event = $crate::scale::HorizontalEvent;
            type Action = $crate::scale::HorizontalAction;
            type Error = $crate::scale::HorizontalError;

            fn handle(
                &mut self,
                now: $crate::scale::fleet::Timestamp,
                event: $crate::scale::HorizontalEvent,
                actions: &mut Vec<$crate::scale::HorizontalAction>,
            ) -> Result<(), $crate::scale::HorizontalError> {
                if let Some((function, load)) = self.fleet.take(now, event, actions)? {
                    if let Some(load) = load {
                        self.decide(function, load, actions);
                    }
                    self.fleet.invariants(function);
                }
                Ok(())
            }

            fn next_deadline(&self) -> Option<$crate::scale::fleet::Timestamp> {
                None
            }
        }

        impl $crate::scale::HorizontalScaler for $policy {
            fn instances(&self, function: $crate::scale::fleet::FunctionId) -> Option<$crate::scale::InstanceCounts> {
                self.fleet.counts(function)
            }

            fn tick(&self) -> $crate::scale::fleet::Duration {
                self.fleet.config().tick
            }

            $(fn early_reports(&self) -> bool {
                let early: fn(&Self) -> bool = $early;
                early(self)
            })?
        }
    };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Starting,
    Ready,
    Draining,
}

#[derive(Debug)]
struct Instance {
    /// Index into the profile.
    point: usize,
    stage: Stage,
    /// The time of its start.
    since: Timestamp,
}

/// A function with its policy's state.
#[derive(Debug)]
pub struct Function<S> {
    spec: FunctionScale,
    /// Indices of the points within the bound on p95, by efficacy, the best first; each with the end of its refusal.
    points: Vec<(usize, Timestamp)>,
    /// Requests per second of an instance at its limit, by point.
    surges: Vec<RequestRate>,
    /// In the order of their starts.
    instances: BTreeMap<InstanceId, Instance>,
    capacity: RequestRate,
    counts: InstanceCounts,
    reported: Option<Timestamp>,
    /// The last start time of an instance, from its start until it was ready.
    start_time: Duration,
    /// The policy's state of the function.
    pub state: S,
}

impl<S> Function<S> {
    /// Requests per second of the starting and ready instances.
    pub const fn capacity(&self) -> RequestRate {
        self.capacity
    }

    /// Starting and ready instances.
    pub const fn deployed(&self) -> u32 {
        self.counts.starting + self.counts.ready
    }

    /// The function's specification, with the current bounds.
    pub const fn spec(&self) -> &FunctionScale {
        &self.spec
    }

    /// The last start time of an instance; 0 before the first was ready.
    pub const fn start_time(&self) -> Duration {
        self.start_time
    }

    /// Points that may be started now, the most effective first, by their index in the profile.
    pub fn startable(&self, now: Timestamp) -> impl Iterator<Item = (usize, &ProfilePoint)> {
        let points = self.points.iter().filter(move |(_, until)| *until <= now);
        points.map(|&(index, _)| (index, &self.spec.profile.points()[index]))
    }

    /// Deployed instances in the order of removal: the least effective first, of equal ones the smallest, then the youngest (FaST-GShare,
    /// section 3.4.1: the queue `L_j`).
    pub fn by_efficacy(&self) -> Vec<(InstanceId, RequestRate)> {
        let points = self.spec.profile.points();
        let mut order: Vec<(InstanceId, &ProfilePoint)> = Vec::new();
        for (id, instance) in self.instances.iter().filter(|(_, instance)| instance.stage != Stage::Draining)
        {
            order.push((*id, &points[instance.point]));
        }
        order
            .sort_by(|(a, x), (b, y)| x.cmp_efficacy(y).then(x.throughput.cmp(&y.throughput)).then(b.cmp(a)));
        order.into_iter().map(|(id, point)| (id, point.throughput)).collect()
    }

    /// Starting and ready instances.
    fn counted(&self) -> impl Iterator<Item = &Instance> {
        self.instances.values().filter(|instance| instance.stage != Stage::Draining)
    }

    /// Requests per second of the smallest deployed instance.
    pub fn smallest(&self) -> Option<RequestRate> {
        self.counted().map(|instance| self.spec.profile.points()[instance.point].throughput).min()
    }

    /// The youngest deployed instance, starting ones before ready ones.
    pub fn youngest(&self) -> Option<(InstanceId, RequestRate)> {
        let of = |stage| self.instances.iter().rev().find(|(_, instance)| instance.stage == stage);
        let (id, instance) = of(Stage::Starting).or_else(|| of(Stage::Ready))?;
        Some((*id, self.spec.profile.points()[instance.point].throughput))
    }

    /// The most effective point, available now or not; `None` where no point is fast enough.
    pub fn best(&self) -> Option<&ProfilePoint> {
        self.points.first().map(|&(index, _)| &self.spec.profile.points()[index])
    }

    /// Requests per second of the deployed instances at their limits.
    pub fn surge(&self) -> RequestRate {
        let surges = self.counted().map(|instance| self.surges[instance.point]);
        surges.fold(RequestRate::ZERO, RequestRate::saturating_add)
    }
}

/// Requests per second of an instance at its limit, by the index of its point. The instance reaches the highest throughput among the
/// points of its batch and quota within the bound on p95 and twice its SMs (Dilu, section 3.2: a limit is twice the request).
fn surges(spec: &FunctionScale) -> Vec<RequestRate> {
    let points = spec.profile.points();
    let fast = |point: &&ProfilePoint| spec.max_p95.is_none_or(|max| point.p95 <= max);
    let of = |own: &ProfilePoint| {
        let reach = u32::from(own.sm.get()) * 2;
        let within = |point: &&ProfilePoint| {
            (point.batch, point.quota) == (own.batch, own.quota) && u32::from(point.sm.get()) <= reach
        };
        let most = points.iter().filter(fast).filter(within).map(|point| point.throughput).max();
        most.unwrap_or(own.throughput).max(own.throughput)
    };
    points.iter().map(of).collect()
}

/// All functions and instances; `S` is a policy's state of a function.
#[derive(Debug, Default)]
pub struct Fleet<S> {
    config: FleetConfig,
    now: Timestamp,
    functions: Vec<Option<Function<S>>>,
    homes: BTreeMap<InstanceId, FunctionId>,
    next_instance: u64,
}

impl<S: Default> Fleet<S> {
    /// A fleet without functions.
    pub fn new(config: FleetConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Its settings.
    pub const fn config(&self) -> &FleetConfig {
        &self.config
    }

    /// The time of the last event.
    pub const fn now(&self) -> Timestamp {
        self.now
    }

    /// A function that was added.
    pub fn get(&self, function: FunctionId) -> Option<&Function<S>> {
        self.functions.get(function.index()).and_then(Option::as_ref)
    }

    /// The same, to change the policy's state of it.
    pub fn get_mut(&mut self, function: FunctionId) -> Option<&mut Function<S>> {
        self.functions.get_mut(function.index()).and_then(Option::as_mut)
    }

    /// How many instances of a function are in which stage.
    pub fn counts(&self, function: FunctionId) -> Option<InstanceCounts> {
        self.get(function).map(|function| function.counts)
    }

    fn stage(&self, instance: InstanceId) -> Option<Stage> {
        let function = self.get(*self.homes.get(&instance)?)?;
        function.instances.get(&instance).map(|instance| instance.stage)
    }

    /// Takes an event in as for every policy. Answers the function to look at, with its load if the event reported it.
    ///
    /// # Errors
    /// An event that cannot be; nothing changed.
    pub fn take(
        &mut self,
        now: Timestamp,
        event: HorizontalEvent,
        actions: &mut Vec<HorizontalAction>,
    ) -> Result<Option<(FunctionId, Option<RequestRate>)>, HorizontalError> {
        self.check(now, &event)?;
        self.now = now;
        if self.rebound(&event, actions) {
            return Ok(None);
        }
        let added = match event {
            HorizontalEvent::FunctionAdded { function, .. }
            | HorizontalEvent::MinimumLacking { function } => Some(function),
            _ => None,
        };
        let load = self.apply(event);
        let function = added.or(load.map(|(function, _)| function));
        if let Some(function) = function {
            self.keep_minimum(function, actions);
        }
        Ok(function.map(|function| (function, load.map(|(_, load)| load))))
    }

    /// Refuses an impossible event before any change.
    fn check(&self, now: Timestamp, event: &HorizontalEvent) -> Result<(), HorizontalError> {
        TimeWentBack::check(now, self.now)?;
        let known = |function| self.get(function).ok_or(HorizontalError::UnknownFunction { function });
        let starting = |instance| match self.stage(instance) {
            Some(Stage::Starting) => Ok(()),
            _ => Err(HorizontalError::UnknownInstance { instance, expected: "starting" }),
        };
        match *event {
            HorizontalEvent::FunctionAdded { function, ref spec } => self.check_added(function, spec),
            HorizontalEvent::FunctionRemoved { function } | HorizontalEvent::MinimumLacking { function } => {
                known(function).map(|_| ())
            }
            HorizontalEvent::BoundsChanged { function, min_instances, max_instances } => {
                known(function)?;
                Self::check_bounds(function, min_instances, max_instances)
            }
            HorizontalEvent::LoadReported { function, .. } => {
                let half = Duration::from_nanos(self.config.tick.as_nanos() / 2);
                match known(function)?.reported.map(|last| last.saturating_add(half)) {
                    Some(due) if now < due => Err(HorizontalError::ReportTooEarly { function, now, due }),
                    _ => Ok(()),
                }
            }
            HorizontalEvent::InstanceReady { instance } | HorizontalEvent::StartRefused { instance } => {
                starting(instance)
            }
            // The host may report a stopped instance gone, too.
            HorizontalEvent::InstanceGone { instance } if instance.number() >= self.next_instance => {
                Err(HorizontalError::UnknownInstance { instance, expected: "one that was started" })
            }
            _ => Ok(()),
        }
    }

    fn check_added(&self, function: FunctionId, spec: &FunctionScale) -> Result<(), HorizontalError> {
        if function.number() >= self.config.max_functions {
            return Err(HorizontalError::TooManyFunctions { function, limit: self.config.max_functions });
        }
        if self.get(function).is_some() {
            return Err(HorizontalError::FunctionExists { function });
        }
        Self::check_bounds(function, spec.min_instances, spec.max_instances)?;
        let fastest = spec.profile.points().iter().min_by_key(|point| point.p95);
        match (spec.max_p95, fastest) {
            (Some(max_p95), Some(point)) if point.p95 > max_p95 => {
                let (best, setting) = (point.p95, point.setting());
                Err(HorizontalError::SloUnreachable { function, max_p95, best, setting })
            }
            _ => Ok(()),
        }
    }

    fn check_bounds(
        function: FunctionId,
        min_instances: u32,
        max_instances: u32,
    ) -> Result<(), HorizontalError> {
        if max_instances < min_instances.max(1) || max_instances > MAX_INSTANCES {
            let limit = MAX_INSTANCES;
            return Err(HorizontalError::BadInstanceBounds { function, min_instances, max_instances, limit });
        }
        Ok(())
    }

    /// Takes the event in if it sets the bounds of a function; answers whether it does.
    fn rebound(&mut self, event: &HorizontalEvent, actions: &mut Vec<HorizontalAction>) -> bool {
        let HorizontalEvent::BoundsChanged { function, min_instances, max_instances } = *event else {
            return false;
        };
        let Some(known) = self.get_mut(function) else { return true };
        (known.spec.min_instances, known.spec.max_instances) = (min_instances, max_instances);
        while let Some(known) = self.get(function).filter(|known| known.deployed() > max_instances) {
            let Some((youngest, _)) = known.youngest() else { break };
            self.take_away(youngest, actions);
        }
        self.keep_minimum(function, actions);
        self.invariants(function);
        true
    }

    /// Takes in the part of an event without a decision. Answers the function of a load report, and the load.
    fn apply(&mut self, event: HorizontalEvent) -> Option<(FunctionId, RequestRate)> {
        match event {
            HorizontalEvent::FunctionAdded { function, spec } => {
                self.add(function, spec);
                None
            }
            HorizontalEvent::FunctionRemoved { function } => {
                let function = self.functions[function.index()].take()?;
                for instance in function.instances.keys() {
                    self.homes.remove(instance);
                }
                None
            }
            HorizontalEvent::MinimumLacking { function } => {
                let known = self.get_mut(function)?;
                if known.deployed() < known.spec.min_instances {
                    known.points.iter_mut().for_each(|(_, until)| *until = Timestamp::ZERO);
                }
                None
            }
            HorizontalEvent::LoadReported { function, rate } => {
                let now = self.now;
                self.get_mut(function)?.reported = Some(now);
                Some((function, rate))
            }
            HorizontalEvent::InstanceReady { instance } => {
                self.enter(instance, Stage::Ready);
                None
            }
            HorizontalEvent::InstanceGone { instance } => {
                self.forget(instance);
                None
            }
            HorizontalEvent::StartRefused { instance } => {
                let until = self.now.saturating_add(self.config.retry_after);
                let function = self.homes.get(&instance).copied().and_then(|home| self.get_mut(home))?;
                let point = function.instances.get(&instance)?.point;
                if let Some(entry) = function.points.iter_mut().find(|(index, _)| *index == point) {
                    entry.1 = until;
                }
                self.forget(instance);
                None
            }
            _ => None,
        }
    }

    fn add(&mut self, function: FunctionId, spec: FunctionScale) {
        while self.functions.len() <= function.index() {
            self.functions.push(None);
        }
        let all = spec.profile.points();
        let fast = |&index: &usize| spec.max_p95.is_none_or(|max| all[index].p95 <= max);
        let mut points: Vec<usize> = (0..all.len()).filter(fast).collect();
        points.sort_by(|&a, &b| match all[b].cmp_efficacy(&all[a]) {
            Ordering::Equal => (all[a].area(), a).cmp(&(all[b].area(), b)),
            other => other,
        });
        self.functions[function.index()] = Some(Function {
            points: points.into_iter().map(|index| (index, Timestamp::ZERO)).collect(),
            surges: surges(&spec),
            spec,
            instances: BTreeMap::new(),
            capacity: RequestRate::ZERO,
            counts: InstanceCounts::default(),
            reported: None,
            start_time: Duration::ZERO,
            state: S::default(),
        });
    }

    /// Starts instances of the most effective points until the function has its minimum, or no point is left to start.
    fn keep_minimum(&mut self, function: FunctionId, actions: &mut Vec<HorizontalAction>) {
        let now = self.now;
        while let Some(known) = self.get(function) {
            if known.deployed() >= known.spec.min_instances {
                return;
            }
            let Some((point, _)) = known.startable(now).next() else { return };
            self.start(function, point, actions);
        }
    }

    /// Starts an instance at a point (by index). The caller must keep to the maximum.
    pub fn start(&mut self, function: FunctionId, point: usize, actions: &mut Vec<HorizontalAction>) {
        let (id, since) = (InstanceId::new(self.next_instance), self.now);
        let Some(known) = self.get_mut(function) else { return };
        let chosen = known.spec.profile.points()[point];
        known.instances.insert(id, Instance { point, stage: Stage::Starting, since });
        known.counts.starting += 1;
        known.capacity = known.capacity.saturating_add(chosen.throughput);
        self.next_instance += 1;
        self.homes.insert(id, function);
        actions.push(HorizontalAction::Start { function, instance: id, point: chosen });
    }

    /// Takes a deployed instance away: drains it if it is ready, else stops it.
    pub fn take_away(&mut self, instance: InstanceId, actions: &mut Vec<HorizontalAction>) {
        match self.stage(instance) {
            Some(Stage::Ready) => {
                self.enter(instance, Stage::Draining);
                actions.push(HorizontalAction::Drain { instance });
            }
            Some(Stage::Starting) => {
                self.forget(instance);
                actions.push(HorizontalAction::Stop { instance });
            }
            _ => {}
        }
    }

    fn enter(&mut self, id: InstanceId, stage: Stage) {
        let Some(known) = self.homes.get(&id).and_then(|home| self.functions[home.index()].as_mut()) else {
            return;
        };
        let Some(instance) = known.instances.get_mut(&id) else { return };
        *count(&mut known.counts, instance.stage) -= 1;
        *count(&mut known.counts, stage) += 1;
        if stage == Stage::Ready {
            known.start_time = self.now.saturating_since(instance.since);
        }
        instance.stage = stage;
        if stage == Stage::Draining {
            let throughput = known.spec.profile.points()[instance.point].throughput;
            known.capacity = known.capacity.saturating_sub(throughput);
        }
    }

    fn forget(&mut self, id: InstanceId) {
        let Some(home) = self.homes.remove(&id) else { return };
        let Some(known) = self.functions[home.index()].as_mut() else { return };
        let Some(instance) = known.instances.remove(&id) else { return };
        *count(&mut known.counts, instance.stage) -= 1;
        if instance.stage != Stage::Draining {
            let throughput = known.spec.profile.points()[instance.point].throughput;
            known.capacity = known.capacity.saturating_sub(throughput);
        }
    }

    /// Checks one function's books, in debug builds.
    ///
    /// # Panics
    /// On a broken book, a mistake of this module.
    pub fn invariants(&self, function: FunctionId) {
        if !cfg!(debug_assertions) {
            return;
        }
        let Some(known) = self.get(function) else { return };
        let mut counts = InstanceCounts::default();
        let mut capacity = RequestRate::ZERO;
        for (id, instance) in &known.instances {
            *count(&mut counts, instance.stage) += 1;
            if instance.stage != Stage::Draining {
                capacity = capacity.saturating_add(known.spec.profile.points()[instance.point].throughput);
            }
            assert_eq!(self.homes.get(id), Some(&function), "an instance has one home");
        }
        assert_eq!((counts, capacity), (known.counts, known.capacity), "counts and capacity are sums");
        assert!(known.deployed() <= known.spec.max_instances, "never more than the most");
    }
}

const fn count(counts: &mut InstanceCounts, stage: Stage) -> &mut u32 {
    match stage {
        Stage::Starting => &mut counts.starting,
        Stage::Ready => &mut counts.ready,
        Stage::Draining => &mut counts.draining,
    }
}
