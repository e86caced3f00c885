//! Tests of the mappings one by one, against a host with scripted answers.

use super::*;
use crate::Tier;
use crate::platform::PlatformAction;
use crate::platform::PlatformEvent;
use crate::platform::testing::{self, dispatch, reject};
use gshare_core::Quota;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Engine, NodeId, SmShare};

type Host = testing::Host<WholePool>;

impl Host {
    /// GPUs of 16 GiB; evicted models end.
    fn new(gpus: u32) -> Self {
        Self::with(WholeConfig::default().with_park(false), gpus)
    }

    /// GPUs of 16 GiB; evicted models go to host memory.
    fn parking(gpus: u32) -> Self {
        Self::with(WholeConfig::default(), gpus)
    }

    fn with(config: WholeConfig, gpus: u32) -> Self {
        let mut host = Self::around(WholePool::new(config).unwrap());
        for gpu in 0..gpus {
            host.join(gpu);
        }
        host
    }

    fn join(&mut self, gpu: u32) -> Vec<PlatformAction> {
        let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16)).with_regime(Regime::Whole);
        self.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec })
    }

    fn add(&mut self, function: u32, gib: u64) {
        let event = PlatformEvent::FunctionDeployed {
            function: FunctionId::new(function),
            spec: Box::new(inference(gib)),
        };
        assert_eq!(self.tell(event), []);
    }

    fn request(&mut self, request: u64, function: u32) -> Vec<PlatformAction> {
        self.arrive(request, function, None)
    }
}

fn inference(gib: u64) -> FunctionSpec {
    let time = Duration::from_millis(20);
    let point = |percent, batch, time| {
        let sm = SmShare::from_percent(percent).unwrap();
        ProfilePoint::measured(sm, Quota::WHOLE, batch, 50.0, time, time).unwrap()
    };
    let slow = Duration::from_millis(90);
    let points = vec![point(25, 1, slow), point(100, 1, time), point(100, 8, slow)];
    let profile = Some(ProfileTable::sparse(points).unwrap());
    FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(gib))
        .with_loads(Duration::from_secs(3), Duration::from_millis(700))
}

fn started(actions: &[PlatformAction]) -> Option<(u64, u32, u32)> {
    match actions {
        [PlatformAction::Start { instance, function, parts, from: Tier::Disk, takes, parked: false }] => {
            assert_eq!((parts.len(), *takes), (1, Duration::from_secs(3)));
            Some((instance.number(), function.number(), parts[0].gpu.number()))
        }
        _ => None,
    }
}

fn ended(instance: u64, cause: StopCause) -> [PlatformAction; 2] {
    let instance = InstanceId::new(instance);
    [PlatformAction::Drain { instance }, PlatformAction::Stop { instance, cause }]
}

/// The example of the module.
#[test]
fn a_model_that_needs_room_is_started_when_the_one_before_it_is_gone() {
    let mut host = Host::new(1);
    host.add(0, 9);
    host.add(1, 10);
    assert_eq!(started(&host.request(0, 0)), Some((0, 0, 0)));
    assert_eq!(host.report(0, InstanceReport::Ready), [dispatch(0, 0)]);
    assert_eq!(host.done(0), []);
    host.now = 600_000;
    assert_eq!(host.request(1, 1), ended(0, StopCause::Evicted));
    assert_eq!(started(&host.report(0, InstanceReport::Gone)), Some((1, 1, 0)));
    assert_eq!(host.report(1, InstanceReport::Ready), [dispatch(1, 1)]);
}

#[test]
fn the_cost_of_a_request_is_that_of_the_largest_point_without_batches() {
    assert_eq!(infer(&inference(1)), Some(Duration::from_millis(20)));
}

#[test]
fn a_process_that_dies_is_started_again_for_the_request_that_it_ran() {
    let mut host = Host::new(1);
    host.add(0, 9);
    host.request(0, 0);
    host.report(0, InstanceReport::Ready);
    assert_eq!(started(&host.report(0, InstanceReport::Gone)), Some((1, 0, 0)));
    assert_eq!(host.platform.waiting(FunctionId::new(0)), 1);
    assert_eq!(host.report(0, InstanceReport::Gone), [], "an old report");
    assert_eq!(host.report(1, InstanceReport::Ready), [dispatch(0, 1)]);
    assert_eq!(host.done(0), []);
    // An idle instance that died starts again when a request needs it.
    assert_eq!(host.report(1, InstanceReport::Gone), []);
    assert_eq!(started(&host.request(1, 0)), Some((2, 0, 0)));
}

#[test]
fn a_request_whose_starts_are_refused_is_given_up() {
    let mut host = Host::new(1);
    host.add(0, 9);
    assert_eq!(started(&host.request(0, 0)), Some((0, 0, 0)));
    assert_eq!(started(&host.report(0, InstanceReport::Refused)), Some((1, 0, 0)));
    assert_eq!(started(&host.report(1, InstanceReport::Gone)), Some((2, 0, 0)));
    assert_eq!(host.report(2, InstanceReport::Refused), [reject(0, Rejection::AttemptsExhausted)]);
}

#[test]
fn a_request_that_came_before_the_first_device_is_served_and_one_that_fits_none_is_not() {
    let mut host = Host::new(0);
    host.add(0, 9);
    host.add(1, 17);
    for request in 0..3 {
        assert_eq!(host.request(request, u32::from(request == 2)), []);
    }
    host.cancel(1);
    let actions = host.join(0);
    assert!(actions.contains(&reject(2, Rejection::NeverFits)), "{actions:?}");
    assert_eq!(actions.len(), 2, "{actions:?}");
    assert_eq!(host.request(3, 1), [reject(3, Rejection::NeverFits)]);
}

#[test]
fn what_ran_on_a_lost_device_is_served_by_another_one() {
    let mut host = Host::new(2);
    host.add(0, 9);
    let (_, _, gpu) = started(&host.request(0, 0)).unwrap();
    host.report(0, InstanceReport::Ready);
    let again = started(&host.tell(PlatformEvent::DeviceLost { gpu: GpuId::new(gpu) })).unwrap();
    assert_eq!((again.0, again.2), (1, 1 - gpu));
    for report in [InstanceReport::Gone, InstanceReport::Ready] {
        assert_eq!(host.report(0, report), [], "an old report");
    }
    assert_eq!(host.report(1, InstanceReport::Ready), [dispatch(0, 1)]);
}

#[test]
fn a_caller_that_gives_up_while_the_model_loads_leaves_the_gpu_free() {
    let mut host = Host::new(1);
    host.add(0, 9);
    host.request(0, 0);
    assert_eq!(host.cancel(0), []);
    assert_eq!(host.platform.waiting(FunctionId::new(0)), 0);
    assert_eq!(host.request(1, 0), []);
    assert_eq!(host.report(0, InstanceReport::Ready), [dispatch(1, 0)]);
    assert_eq!(host.done(1), []);
}

#[test]
fn a_removed_function_is_stopped_once_idle_and_its_name_is_free_for_another_size() {
    let mut host = Host::new(1);
    host.add(0, 9);
    host.request(0, 0);
    host.report(0, InstanceReport::Ready);
    host.request(1, 0);
    let function = FunctionId::new(0);
    assert_eq!(host.tell(PlatformEvent::FunctionRemoved { function }), [reject(1, Rejection::Removed)]);
    assert_eq!(host.done(0), ended(0, StopCause::Removed));
    assert_eq!(host.report(0, InstanceReport::Gone), []);
    host.add(0, 4);
    assert_eq!(started(&host.request(2, 0)), Some((1, 0, 0)));
    // No request waits for the starting instance, so it ends as soon as it is ready.
    host.cancel(2);
    assert_eq!(host.tell(PlatformEvent::FunctionRemoved { function }), []);
    assert_eq!(host.report(1, InstanceReport::Ready), ended(1, StopCause::Removed));
}

#[test]
fn a_deadline_rejects_what_can_no_longer_be_complete() {
    let mut host = Host::new(1);
    host.add(0, 9);
    host.request(0, 0);
    host.report(0, InstanceReport::Ready);
    let (request, function) = (RequestId::new(1), FunctionId::new(0));
    let deadline = Some(Timestamp::from_millis(100));
    let event = PlatformEvent::RequestArrived { request, function, deadline };
    assert_eq!(host.tell(event), []);
    let at = host.platform.next_deadline().unwrap();
    assert!(at > Timestamp::from_millis(79) && at <= Timestamp::from_millis(81), "{at}");
    host.now = 81;
    assert_eq!(host.tell(PlatformEvent::DeadlineReached), [reject(1, Rejection::WouldBeLate)]);
}

#[test]
fn a_device_or_function_that_cannot_be_is_refused_by_field_and_bound() {
    let mut host = Host::new(1);
    let mut device = |gpu: u32, spec: DeviceSpec| {
        host.try_tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec }).unwrap_err()
    };
    let of = |gib| DeviceSpec::new(NodeId::new(0), Bytes::from_gib(gib)).with_regime(Regime::Whole);
    assert!(device(1, of(17)).contains("memory of gpu1 is"), "GPUs of a kind are alike");
    let many = of(16).with_kind(gshare_core::GpuKind::new(63));
    assert!(device(1, many).contains("kind is 63: must be below 63"));
    let mut function = |spec: FunctionSpec| {
        let event = PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec: Box::new(spec) };
        host.try_tell(event).unwrap_err()
    };
    let time = Duration::from_millis(20);
    let point = ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 8, 50.0, time, time).unwrap();
    let profile = Some(ProfileTable::sparse(vec![point]).unwrap());
    let batches = FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(1));
    assert!(function(batches).contains("need an inference function whose profile has a point of batch 1"));
    let slow = inference(1).with_loads(Duration::from_secs(3_601), Duration::ZERO);
    assert!(function(slow).contains("load_disk is 3601s: need at most 3600s"));
}

fn kept(min_instances: u32) -> PlatformEvent {
    let spec = Box::new(inference(9).with_instances(min_instances, 4));
    PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec }
}

#[test]
fn a_copy_that_is_kept_is_there_without_a_request_and_no_other_model_takes_its_place() {
    let mut host = Host::new(1);
    assert_eq!(started(&host.tell(kept(1))), Some((0, 0, 0)));
    assert_eq!(host.report(0, InstanceReport::Ready), [], "no request is dispatched");
    host.add(1, 10);
    host.now = 86_400_000;
    assert_eq!(host.request(0, 1), [], "it waits");
    assert_eq!(host.request(1, 0), [dispatch(1, 0)]);
    assert_eq!(host.done(1), []);
    assert_eq!(started(&host.join(1)), Some((1, 1, 1)), "on another device");
    // A dead instance comes back where there is room, as does an instance of a lost device.
    assert_eq!(started(&host.report(0, InstanceReport::Gone)), Some((2, 0, 0)));
    host.report(1, InstanceReport::Ready);
    host.done(0);
    host.report(2, InstanceReport::Ready);
    let lost = host.tell(PlatformEvent::DeviceLost { gpu: GpuId::new(0) });
    assert_eq!(lost, ended(1, StopCause::Evicted));
    assert_eq!(started(&host.report(1, InstanceReport::Gone)), Some((3, 0, 1)));
    host.report(3, InstanceReport::Ready);
    let function = FunctionId::new(0);
    let none = PlatformEvent::BoundsChanged { function, min_instances: 0, max_instances: 4 };
    assert_eq!(host.tell(none), [], "it stays until another needs the room");
    assert_eq!(host.request(2, 1), ended(3, StopCause::Evicted));
}

#[test]
fn a_copy_that_cannot_be_loaded_is_unmet_once_and_tried_again_later() {
    let mut host = Host::new(0);
    assert_eq!(host.unmet(0, kept(1)), 1, "no device");
    assert_eq!(host.unmet(0, PlatformEvent::DeadlineReached), 0, "told once");
    assert_eq!(started(&host.join(0)), Some((0, 0, 0)));
    for instance in 0..2 {
        let again = host.report(instance, InstanceReport::Refused);
        assert_eq!(started(&again), Some((instance + 1, 0, 0)));
    }
    assert_eq!(host.report(2, InstanceReport::Refused), [], "three in a row");
    assert_eq!(host.platform.next_deadline(), Some(Timestamp::from_millis(10_000)));
    host.now = 10_000;
    assert_eq!(started(&host.tell(PlatformEvent::DeadlineReached)), Some((3, 0, 0)));
    host.tell(PlatformEvent::FunctionRemoved { function: FunctionId::new(0) });
    host.report(3, InstanceReport::Ready);
    host.report(3, InstanceReport::Gone);
    assert!(host.platform.function(FunctionId::new(0)).is_none());
}

#[test]
fn a_copy_that_waits_for_a_busy_device_is_not_unmet() {
    let mut host = Host::new(1);
    host.add(1, 10);
    assert_eq!(started(&host.request(0, 1)), Some((0, 1, 0)));
    assert_eq!(host.unmet(0, kept(1)), 0, "it starts");
    host.report(0, InstanceReport::Ready);
    assert_eq!(host.done(0), ended(0, StopCause::Evicted), "and makes room when it is idle");
    assert_eq!(started(&host.report(0, InstanceReport::Gone)), Some((1, 0, 0)));
    // Beside the kept copy there is no room for another.
    let second = FunctionId::new(2);
    let spec = Box::new(inference(9).with_instances(1, 1));
    assert_eq!(host.unmet(2, PlatformEvent::FunctionDeployed { function: second, spec }), 1);
    assert_eq!(host.unmet(2, PlatformEvent::DeadlineReached), 0, "told once");
    assert_eq!(started(&host.join(1)), Some((2, 2, 1)));
    assert_eq!(host.unmet(2, PlatformEvent::DeviceLost { gpu: GpuId::new(1) }), 1, "told again");
}

#[test]
fn a_copy_that_no_device_holds_is_unmet() {
    let mut host = Host::new(1);
    let spec = Box::new(inference(17).with_instances(1, 1));
    let event = PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec };
    assert_eq!(host.unmet(0, event), 1);
}

fn bounded(max_instances: u32) -> PlatformEvent {
    PlatformEvent::BoundsChanged { function: FunctionId::new(0), min_instances: 0, max_instances }
}

struct LoadBalance;

impl WholePolicy for LoadBalance {
    fn seeks_copies(&self) -> bool {
        false
    }

    fn choose(&mut self, devices: &WholeDevices, function: FunctionId, gpu: GpuId) -> Choice {
        devices.room(function, gpu, &|copy| (copy.used, 0)).map_or(Choice::Wait, Choice::Load)
    }
}

/// Load balancing loads a copy for each request to a busy device.
#[test]
fn no_more_copies_start_than_a_function_may_have() {
    let pool = WholePool::new(WholeConfig::default()).unwrap().with_policy(Box::new(LoadBalance));
    let mut host = Host::around(pool);
    (0..4).for_each(|gpu| {
        host.join(gpu);
    });
    let spec = Box::new(inference(9).with_instances(0, 2));
    host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec });
    let starts = |actions: &[PlatformAction]| {
        actions.iter().filter(|order| matches!(order, PlatformAction::Start { .. })).count()
    };
    let mut started = 0;
    for request in 0..8 {
        started += starts(&host.request(request, 0));
    }
    assert_eq!(started, 2);
    assert_eq!(starts(&host.tell(bounded(3))), 0, "those that wait have a copy to wait for");
    assert_eq!(starts(&host.request(8, 0)), 1);
    let ready: Vec<PlatformAction> =
        (0..3).flat_map(|instance| host.report(instance, InstanceReport::Ready)).collect();
    assert_eq!(ready.len(), 3, "{ready:?}");
    assert_eq!(host.tell(bounded(1)), [], "all three run requests");
    // Two instances end as soon as they have answered.
    let PlatformAction::Dispatch { request, instance } = ready[0] else { panic!("{ready:?}") };
    assert_eq!(host.done(request.number()), ended(instance.number(), StopCause::Drained));
    let PlatformAction::Dispatch { request, instance } = ready[2] else { panic!("{ready:?}") };
    assert_eq!(host.done(request.number()), ended(instance.number(), StopCause::Drained));
    let PlatformAction::Dispatch { request, instance } = ready[1] else { panic!("{ready:?}") };
    let next = host.done(request.number());
    assert!(
        matches!(next[..], [PlatformAction::Dispatch { instance: on, .. }] if on == instance),
        "{next:?}"
    );
}

#[test]
fn more_than_one_copy_cannot_be_kept() {
    let mut host = Host::new(1);
    let text = "min_instances is 2: need at most 1 on whole devices";
    assert!(host.try_tell(kept(2)).unwrap_err().ends_with(text));
    host.add(0, 9);
    let function = FunctionId::new(0);
    let two = PlatformEvent::BoundsChanged { function, min_instances: 2, max_instances: 4 };
    assert!(host.try_tell(two).unwrap_err().ends_with(text));
}

fn park(instance: u64) -> PlatformAction {
    PlatformAction::Park { instance: InstanceId::new(instance), keeps: true }
}

fn unparked(actions: &[PlatformAction]) -> Option<(u64, u32, Duration)> {
    match actions {
        [PlatformAction::Unpark { instance, parts, takes }] => {
            Some((instance.number(), parts[0].gpu.number(), *takes))
        }
        _ => None,
    }
}

impl Host {
    /// Functions 0 and 1 answer a request each; the first is parked for the second.
    fn serve_in_turn(&mut self) {
        self.serve(0, 0, 0);
        self.request(1, 1);
        self.report(0, InstanceReport::Parked);
        self.report(1, InstanceReport::Ready);
        self.done(1);
    }

    /// Loads the function, answers one request, and lets ten minutes pass. Gives the orders of the request.
    fn serve(&mut self, request: u64, function: u32, instance: u64) -> Vec<PlatformAction> {
        let orders = self.request(request, function);
        self.now += 3_000;
        self.report(instance, InstanceReport::Ready);
        self.done(request);
        self.now += 600_000;
        orders
    }
}

#[test]
fn the_processes_of_an_evicted_model_live_and_its_memory_comes_back_to_the_same_device() {
    let mut host = Host::parking(1);
    host.add(0, 9);
    host.add(1, 10);
    host.serve(0, 0, 0);
    assert_eq!(host.request(1, 1), [park(0)]);
    host.now += 500;
    assert_eq!(started(&host.report(0, InstanceReport::Parked)), Some((1, 1, 0)));
    host.now += 3_000;
    host.report(1, InstanceReport::Ready);
    host.done(1);
    host.now += 600_000;
    assert_eq!(host.request(2, 0), [park(1)]);
    let back = unparked(&host.report(1, InstanceReport::Parked));
    assert_eq!(back, Some((0, 0, Duration::from_millis(500))), "as long as the copy out");
    host.now += 400;
    assert_eq!(host.report(0, InstanceReport::Unparked), [dispatch(2, 0)]);
    host.done(2);
    host.now += 600_000;
    assert_eq!(host.request(3, 1), [park(0)]);
    assert_eq!(unparked(&host.report(0, InstanceReport::Parked)).map(|(instance, ..)| instance), Some(1));
    // The processes may die on their way back, as in a start.
    assert_eq!(started(&host.report(1, InstanceReport::Gone)), Some((2, 1, 0)));
}

/// GPU-enabled FaaS, Algorithm 2: a request waits for a busy device if that answers it before a load elsewhere would.
#[test]
fn a_parked_model_waits_for_its_busy_device_if_that_is_shorter_than_a_start() {
    let mut host = Host::parking(1);
    host.add(0, 9);
    host.add(1, 10);
    host.serve(0, 0, 0);
    host.request(1, 1);
    host.report(0, InstanceReport::Parked);
    host.now += 3_000;
    host.report(1, InstanceReport::Ready);
    host.join(1);
    assert_eq!(host.request(2, 0), [], "20 ms, a return of 700 ms and 20 ms are less than a start of 3 s");
    assert_eq!(host.done(1), [park(1)]);
    assert_eq!(unparked(&host.report(1, InstanceReport::Parked)).map(|(instance, ..)| instance), Some(0));
    host.now += 700;
    assert_eq!(host.report(0, InstanceReport::Unparked), [dispatch(2, 0)]);
    // 150 requests of 20 ms are before it: a start on the other device is shorter.
    for request in 3..153 {
        assert_eq!(host.request(request, 0), []);
    }
    let orders = host.request(153, 1);
    assert_eq!(orders[..2], ended(1, StopCause::Evicted), "one instance is its maximum");
    assert_eq!(started(&orders[2..]), Some((2, 1, 1)));
}

/// The clients of the other model always have a call out, so the device is never idle.
#[test]
fn a_parked_model_waits_no_longer_than_a_start_takes_for_a_device_that_is_never_idle() {
    let mut host = Host::parking(1);
    host.add(0, 9);
    host.add(1, 10);
    host.serve(0, 0, 0);
    host.request(1, 1);
    host.report(0, InstanceReport::Parked);
    host.now += 3_000;
    host.report(1, InstanceReport::Ready);
    host.join(1);
    assert_eq!(host.request(2, 0), [], "it waits for its device");
    let mut waited = 0;
    let start = loop {
        let call = 3 + waited / 20;
        let mut orders = host.request(call, 1);
        host.now += 20;
        waited += 20;
        orders.extend(host.done(if call == 3 { 1 } else { call - 1 }));
        let start = orders.iter().position(|order| matches!(order, PlatformAction::Start { .. }));
        if let Some(start) = start {
            break started(&orders[start..=start]);
        }
        assert!(waited < 3_000, "it waits for ever");
    };
    assert_eq!(start.map(|(_, function, gpu)| (function, gpu)), Some((0, 1)));
    assert!(waited > 2_000, "after {waited} ms");
}

#[test]
fn processes_that_ended_in_a_parking_are_not_kept() {
    let mut host = Host::parking(1);
    host.add(0, 9);
    host.add(1, 10);
    host.serve(0, 0, 0);
    assert_eq!(host.request(1, 1), [park(0)]);
    let orders = host.report(0, InstanceReport::Unloaded);
    assert_eq!(orders[..2], ended(0, StopCause::Evicted));
    assert_eq!(started(&orders[2..]), Some((1, 1, 0)));
}

#[test]
fn parked_models_take_as_much_host_memory_as_the_device_has_at_most() {
    let mut host = Host::parking(1);
    for (function, gib) in [(0, 9), (1, 8), (2, 10)] {
        host.add(function, gib);
    }
    host.serve_in_turn();
    host.now += 600_000;
    assert_eq!(host.request(2, 2), [park(1)]);
    let orders = host.report(1, InstanceReport::Parked);
    assert_eq!(
        orders[..2],
        ended(0, StopCause::Evicted),
        "the first to be parked: 9 + 8 are more than 16 GiB"
    );
    assert_eq!(started(&orders[2..]), Some((2, 2, 0)));
}

#[test]
fn parked_processes_count_towards_a_functions_limit_and_end_with_their_function() {
    let mut host = Host::parking(1);
    host.add(1, 10);
    host.add(2, 9);
    let one = Box::new(inference(9).with_instances(0, 1));
    host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec: one });
    host.serve(0, 0, 0);
    host.request(1, 1);
    host.report(0, InstanceReport::Parked);
    host.report(1, InstanceReport::Ready);
    host.join(1);
    // Its own device is busy, and keeps another model.
    let keep = |function, min_instances| PlatformEvent::BoundsChanged {
        function: FunctionId::new(function),
        min_instances,
        max_instances: 4,
    };
    assert_eq!(host.tell(keep(1, 1)), []);
    let orders = host.request(2, 0);
    assert_eq!(host.tell(keep(1, 0)), []);
    assert_eq!(orders[..2], ended(0, StopCause::Evicted));
    assert_eq!(started(&orders[2..]), Some((2, 0, 1)));
    host.report(0, InstanceReport::Gone);
    host.report(2, InstanceReport::Ready);
    host.done(1);
    host.done(2);
    host.now += 600_000;
    // A removed function leaves nothing in host memory.
    let before = host.request(3, 2);
    let [PlatformAction::Park { instance, .. }] = before[..] else { panic!("{before:?}") };
    host.report(instance.number(), InstanceReport::Parked);
    let function = FunctionId::new(if instance.number() == 1 { 1 } else { 0 });
    let orders = host.tell(PlatformEvent::FunctionRemoved { function });
    assert_eq!(orders, ended(instance.number(), StopCause::Removed));
    host.report(instance.number(), InstanceReport::Gone);
    assert!(host.platform.function(function).is_none());
}

#[test]
fn a_tenant_with_a_bound_on_processes_or_memory_keeps_none_in_host_memory() {
    let mut host = Host::parking(1);
    host.add(0, 9);
    host.add(1, 10);
    host.serve_in_turn();
    let limits = TenantLimits { max_processes: 1, ..TenantLimits::default() };
    let tenant = inference(9).tenant;
    assert_eq!(host.tell(PlatformEvent::TenantLimited { tenant, limits }), ended(0, StopCause::Evicted));
    host.now += 600_000;
    assert_eq!(host.request(2, 0), ended(1, StopCause::Evicted));
    assert_eq!(host.report(1, InstanceReport::Gone), [], "the tenant has a process still");
    assert_eq!(started(&host.report(0, InstanceReport::Gone)), Some((2, 0, 0)));
}

#[test]
fn a_minimum_is_a_model_on_a_device_and_not_one_in_host_memory() {
    let mut host = Host::parking(1);
    host.add(0, 9);
    host.add(1, 10);
    host.serve_in_turn();
    host.now += 600_000;
    let function = FunctionId::new(0);
    let one = PlatformEvent::BoundsChanged { function, min_instances: 1, max_instances: 4 };
    let orders = host.tell(one);
    assert_eq!(orders[..2], ended(0, StopCause::Evicted));
    assert_eq!(orders[2..], [park(1)]);
    assert_eq!(started(&host.report(1, InstanceReport::Parked)), Some((2, 0, 0)));
}

#[test]
fn a_device_parks_so_few_that_their_contexts_leave_room() {
    let mut host = Host::parking(1);
    for function in 0..6 {
        host.add(function, 2);
    }
    host.add(6, 16);
    for function in 0..6 {
        host.serve(u64::from(function), function, u64::from(function));
    }
    assert_eq!(host.request(6, 6).len(), 6);
    for instance in 0..4 {
        assert_eq!(host.report(instance, InstanceReport::Parked), []);
    }
    assert_eq!(host.report(4, InstanceReport::Parked), ended(0, StopCause::Evicted), "four on 16 GiB");
}
