//! Gaps and mistakes of Algorithms 1 and 2 of GPU-enabled FaaS, one test for each, named for its claim.
//! Numbers 3 and 13 are tested beside the code (`queue`, `cache`), numbers 8 and 10 beside the literal algorithms.

use Order::{Evict, Forget, Load, LoadFromHost, Reject, Run};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    BasisPoints, Bytes, Duration, Engine, FunctionId, GpuId, GpuKind, InstanceId, NodeId, Quota, RequestId,
    SmShare, TenantId, Timestamp,
};
use gshare_sched::Tier;
use gshare_sched::platform::{
    Choice, DeviceSpec, FunctionSpec, InstanceReport, Locality, Platform, PlatformAction, PlatformConfig,
    PlatformEvent, Regime, Rejection, TenantLimits, WholeConfig, WholeDevices, WholePolicy, WholePool, Work,
};
use gshare_sim::scenario::LoadBalance;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

const A: u32 = 0;
const B: u32 = 1;
const C: u32 = 2;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// An order of the platform: GPU, request and model by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Load(u32, u32),
    LoadFromHost(u32, u32),
    Run(u32, u64, u32),
    Evict(u32, u32),
    Reject(u64, Rejection),
    /// The model leaves host memory.
    Forget(u32),
}

fn o3(skip_limit: u32) -> WholeConfig {
    WholeConfig::paper(skip_limit)
}

/// A policy, with a note of each GPU behind whose work it has a request wait.
struct Noted {
    policy: Box<dyn WholePolicy>,
    queued: Arc<Mutex<Vec<u32>>>,
}

impl WholePolicy for Noted {
    fn skip_limit(&self) -> u32 {
        self.policy.skip_limit()
    }

    fn seeks_copies(&self) -> bool {
        self.policy.seeks_copies()
    }

    fn choose(&mut self, devices: &WholeDevices, function: FunctionId, gpu: GpuId) -> Choice {
        let choice = self.policy.choose(devices, function, gpu);
        if let Choice::Queue(on) = choice {
            self.queued.lock().unwrap().push(on.number());
        }
        choice
    }
}

/// Size in GiB, times to load and to run in ms, least and most instances, tenant.
#[derive(Clone, Copy)]
struct Model(u64, u64, u64, (u32, u32), u32);

/// A platform driven step by step. Models A, B, C need 4 of a GPU's 8 GiB, load in 3 s and run in 1 s.
struct Rig {
    platform: Platform,
    now: Timestamp,
    /// The time that loads took, which `at` leaves out.
    loads: Duration,
    models: BTreeMap<u32, Model>,
    deployed: BTreeSet<u32>,
    /// GPU and model of each instance, and the time of its start.
    instances: BTreeMap<InstanceId, (u32, u32, Timestamp)>,
    /// The test's numbers of requests, by the platform's.
    requests: Vec<u64>,
    queued: Arc<Mutex<Vec<u32>>>,
}

impl Rig {
    fn new(config: WholeConfig, gpus: u32) -> Self {
        Self::under(config, Box::new(Locality::new(&config)), gpus)
    }

    fn load_balance(gpus: u32) -> Self {
        Self::under(o3(0), Box::new(LoadBalance), gpus)
    }

    fn under(config: WholeConfig, policy: Box<dyn WholePolicy>, gpus: u32) -> Self {
        let queued = Arc::<Mutex<Vec<u32>>>::default();
        let noted = Box::new(Noted { policy, queued: Arc::clone(&queued) });
        let pool = WholePool::new(config).unwrap().with_policy(noted);
        let day = Duration::from_secs(86_400);
        let bounds = PlatformConfig::default().with_max_wait(day).with_start_timeout(day);
        let bounds = bounds.with_drain_timeout(day).with_max_attempts(100);
        let mut rig = Self {
            platform: Platform::new(bounds, vec![pool.into()]).unwrap(),
            now: Timestamp::ZERO,
            loads: Duration::ZERO,
            models: [A, B, C].map(|model| (model, Model(4, 3_000, 1_000, (0, 100), 0))).into(),
            deployed: BTreeSet::new(),
            instances: BTreeMap::new(),
            requests: Vec::new(),
            queued,
        };
        (0..gpus).for_each(|gpu| assert_eq!(rig.join(gpu, 0, 8), []));
        rig
    }

    fn send(&mut self, event: PlatformEvent) -> Vec<Order> {
        let actions = self.platform.orders(self.now, event).unwrap();
        self.platform.invariants();
        actions.iter().filter_map(|action| self.read(action)).collect()
    }

    fn read(&mut self, action: &PlatformAction) -> Option<Order> {
        let name = |request: &RequestId| self.requests[usize::try_from(request.number()).unwrap()];
        Some(match action {
            PlatformAction::Start { instance, function, parts, from, .. } => {
                let (gpu, model) = (parts[0].gpu.number(), function.number());
                self.instances.insert(*instance, (gpu, model, self.now));
                if *from == Tier::Host { LoadFromHost(gpu, model) } else { Load(gpu, model) }
            }
            PlatformAction::Stop { instance, .. } => {
                let (gpu, model, _) = self.instances[instance];
                Evict(gpu, model)
            }
            PlatformAction::Dispatch { request, instance } => {
                let (gpu, model, _) = self.instances[instance];
                Run(gpu, name(request), model)
            }
            PlatformAction::Reject { request, reason } => Reject(name(request), *reason),
            PlatformAction::Forget { function, .. } => Forget(function.number()),
            _ => return None,
        })
    }

    fn at(&mut self, millis: u64) -> &mut Self {
        self.now = Timestamp::from_millis(millis) + self.loads;
        self
    }

    /// Another size and other times of a model that was not asked for yet.
    fn model(&mut self, model: u32, gib: u64, load: u64, infer: u64) {
        self.models.insert(model, Model(gib, load, infer, (0, 100), 0));
    }

    fn deploy(&mut self, model: u32) -> Vec<Order> {
        if !self.deployed.insert(model) {
            return Vec::new();
        }
        let Model(gib, load, infer, (least, most), tenant) = self.models[&model];
        let point =
            ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 1, 1.0, ms(infer), ms(infer)).unwrap();
        let work = Work::Inference { profile: Some(ProfileTable::sparse(vec![point]).unwrap()) };
        let mut spec = FunctionSpec::new(work, Bytes::from_gib(gib));
        spec.tenant = TenantId::new(tenant);
        let spec = spec.with_loads(ms(load), ms(load / 10)).with_instances(least, most);
        self.send(PlatformEvent::FunctionDeployed { function: FunctionId::new(model), spec: Box::new(spec) })
    }

    fn bound(&mut self, model: u32, bounds: (u32, u32)) -> Vec<Order> {
        let (function, (min_instances, max_instances)) = (FunctionId::new(model), bounds);
        self.send(PlatformEvent::BoundsChanged { function, min_instances, max_instances })
    }

    fn join(&mut self, gpu: u32, kind: u8, gib: u64) -> Vec<Order> {
        let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(gib)).with_kind(GpuKind::new(kind));
        let spec = spec.with_regime(Regime::Whole);
        self.send(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec })
    }

    fn lose(&mut self, gpu: u32) -> Vec<Order> {
        self.instances.retain(|_, (on, _, _)| *on != gpu);
        self.send(PlatformEvent::DeviceLost { gpu: GpuId::new(gpu) })
    }

    fn ask(&mut self, request: u64, model: u32) -> Vec<Order> {
        self.ask_until(request, model, None)
    }

    fn ask_until(&mut self, request: u64, model: u32, deadline: Option<Timestamp>) -> Vec<Order> {
        self.deploy(model);
        let id = RequestId::new(self.requests.len() as u64);
        self.requests.push(request);
        let function = FunctionId::new(model);
        self.send(PlatformEvent::RequestArrived { request: id, function, deadline })
    }

    fn request(&self, request: u64) -> RequestId {
        let id = self.requests.iter().position(|name| *name == request).unwrap();
        RequestId::new(id as u64)
    }

    fn instance(&self, gpu: u32, model: u32) -> InstanceId {
        let mut all = self.instances.iter().rev();
        *all.find(|(_, (on, of, _))| (*on, *of) == (gpu, model)).expect("it was started").0
    }

    fn report(&mut self, gpu: u32, model: u32, report: InstanceReport) -> Vec<Order> {
        let instance = self.instance(gpu, model);
        let orders = self.send(PlatformEvent::Instance { instance, report });
        if report != InstanceReport::Ready {
            self.instances.remove(&instance);
        }
        orders
    }

    /// A load has taken its time.
    fn loaded(&mut self, gpu: u32, model: u32) -> Vec<Order> {
        let (_, _, since) = self.instances[&self.instance(gpu, model)];
        let end = since + ms(self.models[&model].1);
        self.loads += end.saturating_since(self.now);
        self.now = self.now.max(end);
        self.report(gpu, model, InstanceReport::Ready)
    }

    fn gone(&mut self, gpu: u32, model: u32) -> Vec<Order> {
        self.report(gpu, model, InstanceReport::Gone)
    }

    fn done(&mut self, request: u64) -> Vec<Order> {
        self.done_in(request, ms(1_000))
    }

    fn done_in(&mut self, request: u64, took: Duration) -> Vec<Order> {
        self.send(PlatformEvent::RequestDone { request: self.request(request), took })
    }

    /// Loads a model by a request that is done at once.
    fn warm(&mut self, gpu: u32, request: u64, model: u32) {
        self.busy(gpu, request, model);
        let took = ms(self.models[&model].2);
        assert_eq!(self.done_in(request, took), []);
    }

    /// Loads a model by a request which does not end.
    fn busy(&mut self, gpu: u32, request: u64, model: u32) {
        assert_eq!(self.ask(request, model), [Load(gpu, model)]);
        assert_eq!(self.loaded(gpu, model), [Run(gpu, request, model)]);
    }

    /// Loads a model that stays.
    fn keep(&mut self, gpu: u32, model: u32) {
        self.models.get_mut(&model).unwrap().3 = (1, 100);
        assert_eq!(self.deploy(model), [Load(gpu, model)]);
        assert_eq!(self.loaded(gpu, model), []);
    }

    /// The GPUs behind whose work requests were given since the last call.
    fn queued(&self) -> Vec<u32> {
        core::mem::take(&mut self.queued.lock().unwrap())
    }
}

/// One GPU runs B; A and then B wait: the test asks for the next decision.
fn overtaken(config: WholeConfig) -> Vec<Order> {
    let mut rig = Rig::new(config, 1);
    rig.busy(0, 1, B);
    assert_eq!(rig.ask(2, A), []);
    assert_eq!(rig.ask(3, B), []);
    rig.done(1)
}

#[test]
fn hole_01_limit_zero_is_in_order() {
    assert_eq!(overtaken(o3(0)), [Load(0, A)], "no request is skipped");
    assert_eq!(overtaken(o3(1)), [Run(0, 3, B)], "A is skipped once");
}

#[test]
fn hole_01_a_request_is_skipped_as_often_as_the_limit_and_no_more() {
    let mut rig = Rig::new(o3(2), 1);
    rig.busy(0, 1, B);
    rig.ask(2, A);
    (3..7).for_each(|request| assert_eq!(rig.ask(request, B), []));
    assert_eq!(rig.done(1), [Run(0, 3, B)]);
    assert_eq!(rig.done(3), [Run(0, 4, B)]);
    assert_eq!(rig.done(4), [Load(0, A)], "skipped twice");
}

#[test]
fn hole_02_a_scan_that_passes_by_is_no_skip() {
    let mut rig = Rig::new(o3(1), 1);
    // GPU 0 is idle but full of a kept model, so a request for another one is scanned at every event and stays.
    rig.model(C, 8, 1_000, 1_000);
    rig.keep(0, C);
    for request in 20..30 {
        // GPU 1 shall have the turn before GPU 0.
        rig.ask(request, C);
        rig.done(request);
    }
    rig.join(1, 0, 8);
    rig.model(B, 4, 1_000, 10_000);
    rig.busy(1, 2, B);
    assert_eq!(rig.ask(3, A), []);
    (0..10).for_each(|_| assert_eq!(rig.send(PlatformEvent::DeadlineReached), []));
    assert_eq!(rig.ask(4, B), []);
    assert_eq!(rig.ask(5, B), []);
    assert_eq!(rig.done_in(2, ms(10_000)), [Run(1, 4, B)], "A was scanned often, and skipped by none");
    assert_eq!(rig.done_in(4, ms(10_000)), [Load(1, A)], "now it was skipped once");
}

#[test]
fn hole_04_a_gpu_that_was_given_a_request_is_busy_in_the_same_round() {
    let mut rig = Rig::new(o3(25), 1);
    rig.busy(0, 1, A);
    rig.join(1, 0, 8);
    assert_eq!((rig.ask(2, A), rig.queued()), (vec![], vec![0]), "to wait is sooner than to load");
    rig.join(2, 0, 8);
    // Both requests are without a GPU in one round. The first goes to GPU 1; for the second GPU 1 is busy, and GPU 2 is sooner.
    assert_eq!(rig.lose(0), [Load(1, A), Load(2, A)]);
}

#[test]
fn hole_05_an_idle_gpu_has_no_local_queue() {
    let mut rig = Rig::new(o3(0), 2);
    rig.busy(0, 1, A);
    rig.ask(2, A);
    assert_eq!(rig.queued(), [0], "1 s to wait is less than 3 s to load on GPU 1");
    rig.busy(1, 3, B);
    rig.ask(4, C);
    assert_eq!(rig.done(1), [Run(0, 2, A)], "the local queue first, although C waits and is due");
    assert_eq!(rig.done(2), [Load(0, C)]);
}

#[test]
fn hole_06_local_queues_are_no_longer_than_a_load_is_worth() {
    let mut rig = Rig::new(o3(25), 2);
    rig.model(A, 4, 3_200, 1_300);
    rig.busy(0, 1, A);
    let loads: Vec<Order> = (2..40).flat_map(|request| rig.ask(request, A)).collect();
    assert_eq!(rig.queued(), [0, 0], "waits of 1.3 and 2.6 s are below 3.2 s, one of 3.9 s is not");
    assert_eq!(loads, [Load(1, A)]);
}

#[test]
fn hole_07_of_the_busy_gpus_the_best_is_taken() {
    let mut rig = Rig::new(o3(25), 3);
    rig.busy(0, 1, A);
    rig.ask(2, A);
    rig.ask(3, A);
    assert_eq!(rig.queued(), [0, 0], "GPU 0 is free at 3 s");
    assert_eq!(rig.ask(4, A), [Load(1, A)]);
    rig.at(600).report(1, A, InstanceReport::Ready);
    // GPU 1 is free at 1.6 s. Both waits are below a load on GPU 2; GPU 0 comes first in any list.
    rig.ask(5, A);
    assert_eq!(rig.queued(), [1]);
}

#[test]
fn hole_09_a_model_that_is_loading_is_cached() {
    let mut rig = Rig::new(o3(25), 2);
    assert_eq!(rig.ask(1, A), [Load(0, A)]);
    assert_eq!(rig.at(2_000).ask(2, A), [], "1 s of loading, 1 s of running: less than a second load");
    assert_eq!(rig.queued(), [0]);
}

#[test]
fn hole_11_if_everything_is_kept_the_request_waits() {
    let mut rig = Rig::new(o3(25), 1);
    rig.keep(0, A);
    rig.keep(0, B);
    assert_eq!(rig.ask(3, C), []);
    assert_eq!(rig.bound(A, (0, 100)), [Evict(0, A)], "the one that is not kept");
    assert_eq!(rig.gone(0, A), [Load(0, C)], "not before there is room");
}

/// Under every policy: under load balancing each of these would be loaded on a GPU of its own.
#[test]
fn a_model_that_has_as_many_copies_as_it_may_have_is_waited_for() {
    for mut rig in [Rig::load_balance(3), Rig::new(o3(25), 3), Rig::new(WholeConfig::default(), 3)] {
        rig.models.get_mut(&A).unwrap().3 = (0, 2);
        assert_eq!(rig.ask(1, A), [Load(0, A)]);
        rig.loaded(0, A);
        // Waiting would take longer than a load from the third request on.
        let loads: Vec<Order> = (2..20).flat_map(|request| rig.ask(request, A)).collect();
        assert!(loads.len() <= 1, "{loads:?}");
        assert_eq!(rig.ask(20, B), [Load(2, B)], "the third one is free for others");
        // None waits for a GPU that may never be idle: those with A run all that ask for A.
        let mut next = rig.done(1);
        for _ in 2..19 {
            let [Run(0 | 1, request, A), ..] = next[..] else { panic!("{next:?}") };
            next = rig.done(request);
            if loads.len() == 1 && next.is_empty() {
                break;
            }
        }
    }
}

#[test]
fn copies_beyond_a_limit_go_as_soon_as_nothing_runs_on_them() {
    let mut rig = Rig::load_balance(4);
    for gpu in 0..4 {
        assert_eq!(rig.ask(gpu.into(), A), [Load(gpu, A)]);
    }
    (0..3).for_each(|gpu| assert_eq!(rig.loaded(gpu, A), [Run(gpu, gpu.into(), A)]));
    rig.done(0);
    assert_eq!(rig.bound(A, (0, 1)), [Evict(0, A)], "the unused one");
    assert_eq!(rig.gone(0, A), []);
    assert_eq!(rig.done(1), [Evict(1, A)]);
    // The process of a running request is gone: its model is not loaded again beside the last copy, which is still loading.
    assert_eq!(rig.gone(2, A), []);
    assert_eq!(rig.loaded(3, A), [Run(3, 3, A)]);
    assert_eq!(rig.done(3), [Run(3, 2, A)]);
    assert_eq!(rig.bound(A, (0, 2)), []);
    assert_eq!(rig.ask(5, A), [Load(0, A)], "a limit that was raised");
}

#[test]
fn a_copy_for_which_room_is_still_being_made_is_given_up() {
    let mut rig = Rig::load_balance(2);
    assert_eq!(rig.ask(1, A), [Load(0, A)]);
    rig.loaded(0, A);
    rig.warm(1, 2, B);
    rig.warm(1, 3, C);
    assert_eq!(rig.ask(4, A), [Evict(1, B)]);
    assert_eq!(rig.bound(A, (0, 1)), []);
    assert_eq!(rig.gone(1, B), [], "no load is ordered");
    assert_eq!(rig.ask(5, C), [Run(1, 5, C)]);
    assert_eq!(rig.done(1), [Run(0, 4, A)]);
}

#[test]
fn hole_12_a_model_that_fits_no_gpu_is_rejected_and_one_that_fits_some_goes_there() {
    let mut rig = Rig::new(o3(25), 1);
    rig.model(9, 9, 3_000, 1_000);
    assert_eq!(rig.ask(1, 9), [Reject(1, Rejection::NeverFits)]);
    rig.join(1, 1, 16);
    assert_eq!(rig.ask(2, 9), [Load(1, 9)]);
    assert_eq!(rig.ask(3, 9), [], "GPU 0 is idle, and too small");
}

#[test]
fn hole_13_victims_are_as_few_as_suffice() {
    let mut rig = Rig::new(o3(25), 1);
    rig.model(A, 1, 3_000, 1_000);
    rig.model(B, 6, 3_000, 1_000);
    rig.model(C, 5, 3_000, 1_000);
    rig.warm(0, 1, A);
    rig.warm(0, 2, B);
    assert_eq!(rig.ask(3, C), [Evict(0, B)], "A is least recently used, but B alone suffices");
}

#[test]
fn hole_14_idle_gpus_are_taken_fewest_dispatches_first() {
    let mut rig = Rig::new(o3(25), 2);
    rig.warm(0, 1, A);
    rig.warm(1, 2, B);
    assert_eq!(rig.ask(3, B), [Run(1, 3, B)]);
    rig.done(3);
    assert_eq!(rig.ask(4, C), [Load(0, C)], "GPU 0 was dispatched once, GPU 1 twice");
}

#[test]
fn hole_15_nobody_is_skipped_for_ever_even_when_nothing_is_dispatched() {
    let mut rig = Rig::new(o3(1_000_000), 1);
    rig.busy(0, 1, B);
    rig.ask(2, A);
    rig.ask(3, B);
    rig.ask(4, B);
    assert_eq!(rig.at(59_999).done(1), [Run(0, 3, B)]);
    assert_eq!(rig.at(60_000).done(3), [Load(0, A)], "old, so not skipped any more");
}

#[test]
fn hole_16_the_earliest_request_of_all_models_on_the_gpu_is_found_behind_many_others() {
    let mut rig = Rig::new(o3(u32::MAX), 1);
    rig.warm(0, 1, A);
    rig.busy(0, 2, B);
    (10..1_000).for_each(|request| assert_eq!(rig.ask(request, C), []));
    rig.ask(2_000, B);
    rig.ask(2_001, A);
    rig.ask(2_002, B);
    assert_eq!(rig.done(2), [Run(0, 2_000, B)]);
    assert_eq!(rig.done(2_000), [Run(0, 2_001, A)]);
    assert_eq!(rig.done(2_001), [Run(0, 2_002, B)]);
}

#[test]
fn hole_17_a_process_that_dies_under_its_request_is_loaded_again() {
    let mut rig = Rig::new(o3(25), 1);
    rig.warm(0, 1, A);
    assert_eq!(rig.ask(2, A), [Run(0, 2, A)]);
    assert_eq!(rig.gone(0, A), [Load(0, A)]);
    assert_eq!(rig.loaded(0, A), [Run(0, 2, A)]);
    assert_eq!(rig.done(2), []);
    assert_eq!(rig.gone(0, A), [], "nobody needs it");
    assert_eq!(rig.ask(3, A), [Load(0, A)]);
}

#[test]
fn hole_18_a_lost_gpu_returns_its_requests_in_arrival_order() {
    let mut rig = Rig::new(o3(0), 2);
    rig.busy(0, 1, A);
    rig.busy(1, 2, B);
    rig.ask(4, A);
    rig.ask(5, B);
    assert_eq!(rig.lose(0), []);
    // 1 is before 4 again, although it came back last.
    assert_eq!(rig.done(2), [Load(1, A)]);
    assert_eq!(rig.loaded(1, A), [Run(1, 1, A)]);
}

#[test]
fn hole_18_as_many_loads_for_a_request_fail_as_may() {
    let mut rig = Rig::new(o3(25), 1);
    assert_eq!(rig.ask(1, A), [Load(0, A)]);
    assert_eq!(rig.report(0, A, InstanceReport::Refused), [Load(0, A)]);
    assert_eq!(rig.gone(0, A), [Load(0, A)]);
    assert_eq!(rig.gone(0, A), [Reject(1, Rejection::AttemptsExhausted)]);
}

#[test]
fn hole_19_observed_times_replace_profiled_ones() {
    let second = |took: u64| {
        let mut rig = Rig::new(o3(25), 1);
        rig.warm(0, 1, A);
        for request in 2..60 {
            rig.ask(request, A);
            rig.done_in(request, ms(took));
        }
        rig.ask(100, A);
        rig.join(1, 0, 8);
        (rig.ask(101, A), rig.queued())
    };
    assert_eq!(second(1_000), (vec![], vec![0]), "1 s + 1 s < 3 s + 1 s");
    assert_eq!(second(4_000), (vec![Load(1, A)], vec![]), "4 s + 4 s > 3 s + 4 s");
}

// Beyond the paper.

/// GPU 0 holds A, often asked for, and runs it; GPU 1 is idle and full of B, often asked for, too. Another A arrives.
fn wait_or_evict(config: WholeConfig) -> Vec<Order> {
    let mut rig = Rig::new(config, 0);
    rig.model(A, 8, 1_500, 1_000);
    rig.model(B, 8, 1_500, 1_000);
    rig.join(0, 0, 8);
    rig.warm(0, 1, A);
    rig.join(1, 0, 8);
    rig.warm(1, 2, B);
    for request in 10..40 {
        rig.ask(request, B);
        rig.done(request);
    }
    rig.ask(3, A);
    rig.ask(4, A);
    rig.ask(5, A)
}

#[test]
fn priced_evictions_wait_rather_than_evicting_what_is_needed() {
    assert_eq!(wait_or_evict(o3(25)), [Evict(1, B)], "a wait of 2 s is longer than a load of 1.5 s");
    assert_eq!(wait_or_evict(WholeConfig::default()), [], "but B is asked for all the time");
}

#[test]
fn priced_evictions_load_where_least_is_lost() {
    let victim = |config: WholeConfig| {
        let mut rig = Rig::new(config, 0);
        rig.model(A, 8, 3_000, 1_000);
        rig.model(B, 8, 3_000, 1_000);
        rig.join(0, 0, 8);
        rig.warm(0, 1, A);
        for request in 10..40 {
            rig.ask(request, A);
            rig.done(request);
        }
        rig.join(1, 0, 8);
        rig.warm(1, 50, B);
        // GPU 0 was dispatched more often, so GPU 1 has the turn; make it the other way round.
        for request in 60..100 {
            rig.ask(request, B);
            rig.done(request);
        }
        rig.at(600_000).ask(98_000, A);
        rig.done(98_000);
        rig.ask(99_000, C)
    };
    assert_eq!(victim(o3(25)), [Evict(0, A)], "fewest dispatches");
    assert_eq!(
        victim(WholeConfig::default().with_park(false)),
        [Evict(1, B)],
        "no request asks for B any more"
    );
}

#[test]
fn a_deadline_that_cannot_be_met_rejects() {
    let mut rig = Rig::new(o3(25), 1);
    rig.busy(0, 1, B);
    let until = |rig: &Rig, millis| Some(rig.now + ms(millis));
    let deadline = until(&rig, 900);
    assert_eq!(rig.ask_until(2, A, deadline), [Reject(2, Rejection::WouldBeLate)], "it takes 1 s");
    let deadline = until(&rig, 5_000);
    assert_eq!(rig.ask_until(3, A, deadline), []);
    let latest = rig.platform.next_deadline().unwrap();
    assert_eq!(latest, rig.now + ms(4_000) + Duration::from_nanos(1), "at 4 s it could still be started");
    rig.now = latest;
    assert_eq!(rig.send(PlatformEvent::DeadlineReached), [Reject(3, Rejection::WouldBeLate)]);
}

#[test]
fn a_cancelled_request_is_gone_from_wherever_it_waits() {
    let mut rig = Rig::new(o3(25), 2);
    rig.busy(0, 1, A);
    rig.ask(2, A);
    assert_eq!(rig.queued(), [0]);
    let request = rig.request(2);
    let cancelled = PlatformEvent::RequestCancelled { request };
    assert_eq!(rig.send(cancelled), [Reject(2, Rejection::Cancelled)]);
    assert_eq!(rig.done(1), []);
}

#[test]
fn the_second_load_on_a_node_comes_from_its_host_memory() {
    let mut rig = Rig::new(o3(25).with_host_memory(Bytes::from_gib(6)), 2);
    rig.busy(0, 1, A);
    assert_eq!(rig.ask(2, A), [LoadFromHost(1, A)], "0.3 s + 1 s is less than waiting for 1 s + 1 s");
    assert_eq!(rig.report(1, A, InstanceReport::Ready), [Run(1, 2, A)]);
    rig.done(1);
    rig.done(2);
    assert_eq!(rig.ask(3, B), [Load(0, B)]);
    assert_eq!(rig.loaded(0, B), [Forget(A), Run(0, 3, B)], "6 GiB hold one of them");
}

#[test]
fn a_tenant_has_no_more_memory_than_its_share() {
    let mut rig = Rig::new(o3(25), 2);
    let mut limits = TenantLimits::default();
    limits.memory = BasisPoints::from_percent(50).unwrap();
    rig.send(PlatformEvent::TenantLimited { tenant: TenantId::new(7), limits });
    for model in [A, B, C] {
        rig.models.get_mut(&model).unwrap().4 = 7;
    }
    rig.warm(0, 1, A);
    rig.warm(1, 2, B);
    // Both GPUs have 4 GiB free, but 8 GiB are all it may take: it gives up its oldest model, on another GPU if need be, and
    // loads the next when that is gone.
    assert_eq!(rig.ask(3, C), [Evict(0, A)]);
    assert_eq!(rig.gone(0, A), [Load(0, C)]);
    rig.model(8, 4, 3_000, 1_000);
    assert_eq!(rig.ask(4, 8), [Load(1, 8)], "others are not held");
}

#[test]
fn a_configuration_out_of_bounds_is_refused_by_name() {
    let error = WholePool::new(o3(25).with_max_loads(0)).unwrap_err();
    assert_eq!(error.to_string(), "max_loads is 0: need more than 0");
}
