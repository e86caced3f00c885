//! A world around a platform of one queue and one instance for each function, intact and broken on purpose.

use super::simulated::{Body, Floor};
use super::{Change, Fault, Function, Limits, Outcome, Plan, run};
use crate::arrivals::Arrivals;
use gshare_core::dag::ComponentSet;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, GpuShare, InstanceId, NodeId, Quota, QuotaRange, RequestId,
    SmShare, Timestamp,
};
use gshare_sched::Tier;
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Part, PlatformAction, PlatformEvent, Rejection, StopCause, Work,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The mistake of a platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    DispatchesEarly,
    DispatchesTwice,
    LosesRequests,
    RejectsTwice,
    OrdersAfterTheEnd,
    StopsWhileRunning,
    Oversells,
    StartsOnLostDevices,
    StartsWhatWasRemoved,
    NeverStops,
    Refuses,
    Spins,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Starting,
    Idle,
    /// A request with its deadline.
    Running(RequestId, Option<Timestamp>),
    Stopping,
}

struct Served {
    spec: FunctionSpec,
    waiting: VecDeque<(RequestId, Option<Timestamp>)>,
    instance: Option<(InstanceId, State)>,
    removed: bool,
}

/// Function `f` has one instance, on device `f` modulo the devices, with a quarter of it. The instance starts with a request, and
/// stops with its function's removal.
struct OneQueue {
    bug: Option<Bug>,
    devices: u32,
    there: BTreeSet<GpuId>,
    functions: BTreeMap<FunctionId, Served>,
    next: u64,
}

impl OneQueue {
    fn new(devices: u32, bug: Option<Bug>) -> Self {
        Self { bug, devices, there: BTreeSet::new(), functions: BTreeMap::new(), next: 0 }
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn gpu(&self, function: FunctionId) -> GpuId {
        GpuId::new(function.number() % self.devices)
    }

    fn share(&self) -> GpuShare {
        let quota = Quota::from_percent(if self.has(Bug::Oversells) { 60 } else { 25 }).unwrap();
        GpuShare::new(QuotaRange::new(quota, quota).unwrap(), SmShare::WHOLE, SmShare::WHOLE, None).unwrap()
    }

    /// Orders the instances for the function's state.
    fn settle(&mut self, now: Timestamp, function: FunctionId, actions: &mut Vec<PlatformAction>) {
        let (gpu, share, bug, name) = (self.gpu(function), self.share(), self.bug, self.next);
        let there = self.there.contains(&gpu) || bug == Some(Bug::StartsOnLostDevices);
        let Some(served) = self.functions.get_mut(&function) else { return };
        if served.removed {
            let left = served.waiting.drain(..);
            actions.extend(
                left.map(|(request, _)| PlatformAction::Reject { request, reason: Rejection::Removed }),
            );
        }
        let late = |deadline: Option<Timestamp>| deadline.is_some_and(|deadline| now >= deadline);
        for &(request, _) in served.waiting.iter().filter(|(_, deadline)| late(*deadline)) {
            actions.push(PlatformAction::Reject { request, reason: Rejection::DeadlineMissed });
            if bug == Some(Bug::RejectsTwice) {
                actions.push(PlatformAction::Reject { request, reason: Rejection::DeadlineMissed });
            }
        }
        served.waiting.retain(|(_, deadline)| !late(*deadline));
        match served.instance {
            None if there
                && (!served.waiting.is_empty() && !served.removed
                    || served.removed && bug == Some(Bug::StartsWhatWasRemoved)) =>
            {
                let instance = InstanceId::new(name);
                self.next += 1;
                served.instance = Some((instance, State::Starting));
                let part = Part { gpu, share, slice: None, stage: 0, components: ComponentSet::EMPTY };
                let takes = served.spec.load_disk;
                let (parts, from) = (vec![part], Tier::Disk);
                actions.push(PlatformAction::Start { instance, function, parts, from, takes, parked: false });
                if bug == Some(Bug::DispatchesEarly)
                    && let Some((request, _)) = served.waiting.pop_front()
                {
                    actions.push(PlatformAction::Dispatch { request, instance });
                }
            }
            Some((instance, State::Idle)) if !served.waiting.is_empty() => {
                if let Some((request, deadline)) = served.waiting.pop_front() {
                    served.instance = Some((instance, State::Running(request, deadline)));
                    actions.push(PlatformAction::Dispatch { request, instance });
                    if bug == Some(Bug::DispatchesTwice) {
                        actions.push(PlatformAction::Dispatch { request, instance });
                    }
                }
            }
            Some((instance, State::Running(..))) if bug == Some(Bug::StopsWhileRunning) => {
                served.instance = Some((instance, State::Stopping));
                actions.push(PlatformAction::Stop { instance, cause: StopCause::NotNeeded });
            }
            Some((instance, State::Idle | State::Starting))
                if served.removed && bug != Some(Bug::NeverStops) =>
            {
                served.instance = Some((instance, State::Stopping));
                actions.push(PlatformAction::Stop { instance, cause: StopCause::Removed });
            }
            _ => {}
        }
    }

    /// Handles the loss of the function's instance: its requests wait again.
    fn gone(&mut self, function: FunctionId) {
        let loses = self.has(Bug::LosesRequests);
        let Some(served) = self.functions.get_mut(&function) else { return };
        if let Some((_, State::Running(request, deadline))) = served.instance.take()
            && !loses
        {
            served.waiting.push_front((request, deadline));
        }
    }
}

impl Engine for OneQueue {
    type Event = PlatformEvent;
    type Action = PlatformAction;
    type Error = core::fmt::Error;

    fn handle(
        &mut self,
        now: Timestamp,
        event: PlatformEvent,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), core::fmt::Error> {
        match event {
            PlatformEvent::DeviceFound { gpu, .. } => {
                self.there.insert(gpu);
            }
            PlatformEvent::DeviceLost { gpu } => {
                self.there.remove(&gpu);
                let lost: Vec<_> =
                    self.functions.keys().copied().filter(|one| self.gpu(*one) == gpu).collect();
                lost.into_iter().for_each(|function| self.gone(function));
            }
            PlatformEvent::FunctionDeployed { function, spec } => {
                let served = Served { spec: *spec, waiting: VecDeque::new(), instance: None, removed: false };
                self.functions.insert(function, served);
            }
            PlatformEvent::FunctionRemoved { function } => {
                self.functions.get_mut(&function).unwrap().removed = true;
            }
            PlatformEvent::RequestArrived { request, function, deadline } => {
                self.functions.get_mut(&function).unwrap().waiting.push_back((request, deadline));
            }
            PlatformEvent::RequestDone { request, .. } => {
                for served in self.functions.values_mut() {
                    if let Some((_, state)) = &mut served.instance
                        && matches!(*state, State::Running(ran, _) if ran == request)
                    {
                        *state = State::Idle;
                    }
                }
            }
            PlatformEvent::RequestCancelled { request } => {
                for served in self.functions.values_mut() {
                    let before = served.waiting.len();
                    served.waiting.retain(|(other, _)| *other != request);
                    if served.waiting.len() < before {
                        actions.push(PlatformAction::Reject { request, reason: Rejection::Cancelled });
                    }
                }
            }
            PlatformEvent::Instance { instance, report } => {
                let of = |served: &Served| served.instance.is_some_and(|(id, _)| id == instance);
                let function =
                    self.functions.iter().find(|(_, served)| of(served)).map(|(function, _)| *function);
                let function = function.ok_or(core::fmt::Error)?;
                if report == InstanceReport::Ready {
                    let served = self.functions.get_mut(&function).unwrap();
                    if let Some((_, state @ State::Starting)) = &mut served.instance {
                        *state = State::Idle;
                    }
                } else {
                    self.gone(function);
                    if self.has(Bug::OrdersAfterTheEnd) {
                        actions.push(PlatformAction::Drain { instance });
                    }
                }
                if self.has(Bug::Refuses) && report == InstanceReport::Refused {
                    return Err(core::fmt::Error);
                }
            }
            _ => {}
        }
        let all: Vec<_> = self.functions.keys().copied().collect();
        all.into_iter().for_each(|function| self.settle(now, function, actions));
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        if self.has(Bug::Spins) {
            return Some(Timestamp::ZERO);
        }
        let waiting = self.functions.values().flat_map(|served| &served.waiting);
        waiting.filter_map(|(_, deadline)| *deadline).min()
    }
}

fn profile(at_quarter: u64, at_whole: u64) -> ProfileTable {
    let point = |percent, time| {
        let (quota, time) = (Quota::from_percent(percent).unwrap(), Duration::from_millis(time));
        ProfilePoint::measured(SmShare::WHOLE, quota, 1, 10.0, time, time).unwrap()
    };
    ProfileTable::grid(vec![point(25, at_quarter), point(100, at_whole)]).unwrap()
}

/// Four functions on two devices of two nodes.
fn plan() -> Plan {
    let device = |node| DeviceSpec::new(NodeId::new(node), Bytes::from_gib(16));
    let function = |number: u64| {
        let work = Work::Inference { profile: Some(profile(40 + 20 * number, 10)) };
        let spec = FunctionSpec::new(work, Bytes::from_gib(2 + number)).with_slo(Duration::from_millis(500));
        let mut function = Function::new(format!("f{number}"), spec);
        function = function.with_arrivals(Arrivals::poisson(4.0).unwrap());
        function.patience = (number == 0).then(|| Duration::from_millis(900));
        function
    };
    let mut plan =
        Plan::new(vec![device(0), device(1)], (0..4).map(function).collect(), Duration::from_secs(120));
    let often = |fault| (fault, Duration::from_secs(if fault == Fault::ClientCancels { 2 } else { 20 }));
    let all = Fault::ALL.into_iter().filter(|fault| !Fault::HANGS.contains(fault));
    plan.faults.every = all.map(often).collect();
    plan
}

fn play(seed: u64, bug: Option<Bug>) -> Result<Outcome, crate::Story> {
    run(&plan(), seed, || Ok(OneQueue::new(2, bug)))
}

#[test]
fn a_platform_of_one_queue_keeps_its_promises_under_every_fault() {
    let mut all = Outcome::default();
    for seed in 0..40 {
        all.add(&play(seed, None).unwrap());
    }
    for fault in Fault::ALL.into_iter().filter(|fault| !Fault::HANGS.contains(fault)) {
        assert!(all.faults.get(&fault).is_some_and(|count| *count > 0), "{fault} never happened");
    }
    assert!(all.deaths.len() >= 2, "deaths in {:?}", all.deaths);
    for function in &all.functions {
        let rejected: u64 = function.rejected.values().sum();
        assert_eq!(function.requests, function.answered + rejected);
        assert!(function.answered > 2_000 && function.starts > 100, "{}", function.name);
        assert!(function.used < function.held && function.cold_starts > 0);
        let attained = function.attainment().unwrap();
        assert!(attained > 0.0 && attained < 1.0, "{}: {attained}", function.name);
    }
    assert!(all.functions[0].rejected.contains_key(&Rejection::DeadlineMissed));
}

#[test]
fn a_seed_replays_and_another_does_not() {
    let (first, again, other) = (play(3, None).unwrap(), play(3, None).unwrap(), play(4, None).unwrap());
    assert_eq!(first, again);
    assert_ne!(first.hash, other.hash);
}

/// The suite finds every intentionally broken platform, and tells its story.
#[test]
fn each_broken_platform_is_found_out_with_a_story() {
    let found = |bug, claim: &str| {
        let failure = (0..40).find_map(|seed| play(seed, Some(bug)).err());
        let failure = failure.unwrap_or_else(|| panic!("{bug:?} was not found"));
        assert!(failure.wrong.contains(claim), "{bug:?}: {failure}");
        assert!(!failure.events.is_empty() || bug == Bug::Spins, "{bug:?}");
        // Any seed fails again in the same way.
        assert_eq!(play(failure.seed.unwrap(), Some(bug)).unwrap_err(), failure);
    };
    found(Bug::DispatchesEarly, "which is starting");
    found(Bug::DispatchesTwice, "but it runs on");
    found(Bug::LosesRequests, "after load and faults have ended, request");
    found(Bug::RejectsTwice, "but it has ended");
    found(Bug::OrdersAfterTheEnd, "but it is gone");
    found(Bug::StopsWhileRunning, "while it has 1 requests");
    found(Bug::Oversells, "% of gpu");
    found(Bug::StartsOnLostDevices, "which is not there");
    found(Bug::StartsWhatWasRemoved, "was removed");
    found(Bug::NeverStops, "after all functions were removed, instance");
    found(Bug::Refuses, "the platform refused what it was told");
    found(Bug::Spins, "again and again");
}

/// A function is removed for ten seconds: no request comes then, and its counts go on afterwards.
#[test]
fn a_function_that_was_removed_is_not_called_until_it_is_deployed_again() {
    let mut plan = plan();
    plan.record = true;
    let at = Duration::from_secs;
    plan.changes =
        vec![(at(30), 1, Change::Removed), (at(35), 1, Change::Removed), (at(40), 1, Change::Deployed)];
    let outcome = run(&plan, 5, || Ok(OneQueue::new(2, None))).unwrap();
    let ends = outcome.record.unwrap().ends;
    let came = |from: u64, to: u64, function: u32| {
        let within = Timestamp::from_millis(from)..Timestamp::from_millis(to);
        ends.iter().filter(|end| end.function.number() == function && within.contains(&end.arrived)).count()
    };
    assert_eq!(came(30_000, 40_000, 1), 0);
    assert!(came(0, 30_000, 1) > 60 && came(42_000, 72_000, 1) > 60 && came(30_000, 40_000, 2) > 10);
    let of = &outcome.functions[1];
    assert_eq!(of.requests, came(0, 120_000, 1) as u64, "those before count too");
}

#[test]
fn a_request_takes_the_time_of_the_nearest_point() {
    let mut plan = plan();
    (plan.faults.every, plan.jitter) = (BTreeMap::new(), 0);
    let outcome = run(&plan, 1, || Ok(OneQueue::new(2, None))).unwrap();
    // The first request has waited for its start; at a quarter of the device f1 takes 60 ms.
    assert_eq!(outcome.functions[1].latencies[0], Duration::from_millis(60));
    let answered = outcome.functions[1].answered;
    // A constantly busy function answers 100 in a second there: 10 ms of a quarter of the device each.
    assert_eq!(outcome.functions[1].used, Duration::from_micros(10_000 * answered / 4));
}

/// `RoBERTa`-large of Dilu's measurements, with 30 % of the SMs, a limit of 60 % and two requests at once.
#[test]
fn an_instance_may_run_at_its_request_until_it_is_full() {
    let percent = |percent| SmShare::from_percent(percent).unwrap();
    let point = |sm, batch, micros| {
        let time = Duration::from_micros(micros);
        let throughput = f64::from(batch) / time.as_secs_f64();
        ProfilePoint::measured(percent(sm), Quota::WHOLE, batch, throughput, time, time).unwrap()
    };
    let points = vec![point(30, 1, 20_700), point(60, 1, 20_600), point(30, 2, 22_500), point(60, 2, 21_300)];
    let work = Work::Inference { profile: Some(ProfileTable::sparse(points).unwrap()) };
    let device = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
    let time = QuotaRange::new(Quota::WHOLE, Quota::WHOLE).unwrap();
    let share = GpuShare::new(time, percent(30), percent(60), None).unwrap();
    let (now, instance) = (Timestamp::ZERO, InstanceId::new(0));
    let part = Part { gpu: GpuId::new(0), share, slice: None, stage: 0, components: ComponentSet::EMPTY };
    let run = |limits| {
        let mut function = Function::new("roberta", FunctionSpec::new(work.clone(), Bytes::from_gib(1)));
        function.limits = limits;
        let (mut floor, mut body) = (Floor::new(core::slice::from_ref(&device), None), Body::new(0));
        floor.lay(now, &mut body, &function, &[part]);
        [0, 1].map(|request| {
            let request = RequestId::new(request);
            let took = floor.serve(now, instance, &mut body, &function, (request, None), (1, 0));
            let micros = |area: u128| area / 1_000 / 1_000_000;
            (floor.ends.pop().unwrap().at.as_nanos() / 1_000, micros(took.used), micros(took.beyond))
        })
    };
    // The end in us; GPU time in hundredths of a us, and its part beyond the request.
    assert_eq!(run(Limits::Always), [(20_600, 1_236_000, 618_000), (21_300, 639_000, 319_500)]);
    assert_eq!(run(Limits::WhileFull), [(20_700, 621_000, 0), (21_300, 639_000, 319_500)]);
}

#[test]
fn a_stopped_instance_ends_after_the_time_of_the_plan() {
    let mut plan = plan();
    let stop = Duration::from_secs(3);
    (plan.faults.every, plan.stop) = (BTreeMap::new(), (stop, stop));
    let outcome = run(&plan, 1, || Ok(OneQueue::new(2, None))).unwrap();
    // Instances stop with the removal of functions, after half of the time to become quiet.
    let removed = plan.length + Duration::from_nanos(plan.settle.as_nanos() / 2);
    assert_eq!(outcome.time, removed + stop);
}
