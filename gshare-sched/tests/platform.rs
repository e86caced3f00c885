//! The platform with a host in virtual time.

mod platform_overload;
mod platform_pools;
mod platform_rules;
#[path = "support/platform_host.rs"]
mod support;

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    BasisPoints, Bytes, Duration, Engine, FunctionId, GpuId, GpuShare, InstanceId, NodeId, Quota, QuotaRange,
    RequestId, SmShare, TenantId, Timestamp,
};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::KeepAlive;
use gshare_sched::platform::TenantLimits;
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, InstanceReport, Life,
    MigLayout, Part, Platform, PlatformAction, PlatformConfig, PlatformError, PlatformEvent,
    PlatformSettings, Regime, Rejection, Work,
};
use gshare_sched::scale::{HorizontalOrder, HorizontalScaler, LoadReport};
use proptest::prelude::*;
use std::collections::BTreeSet;
use support::{End, Host, Later, MS, gib, inference, profile, weights};

#[test]
fn a_function_without_instances_is_given_one_and_loses_it_when_nobody_calls() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(2));
    host.run(MS(5_000));
    assert!(host.orders.is_empty(), "no request came: {:?}", host.orders);
    host.load(0, MS(100), 20);
    host.run(MS(10_000));
    assert_eq!(host.answered(0).len(), 20);
    assert_eq!(host.answered(0)[0], MS(3_010), "a load from disk, and its own time");
    host.run(Duration::from_secs(200));
    assert!(host.instances.is_empty(), "it is kept for ever");
    host.load(0, MS(1), 1);
    host.run(MS(2_000));
    assert_eq!(host.answered(0).last(), Some(&MS(510)), "its weights were in host memory");
}

#[test]
fn load_beyond_one_instance_starts_more_and_each_request_is_answered_once() {
    let mut host = Host::with(&[16, 16]);
    host.deploy(0, inference(2));
    host.takes = MS(18);
    host.load(0, MS(8), 2_500);
    host.run(MS(30_000));
    assert_eq!(host.answered(0).len(), 2_500, "{:?}", host.rejected());
    assert!(host.count(|order| matches!(order, PlatformAction::Start { .. })) > 1);
    let stats = host.platform.function(FunctionId::new(0)).unwrap().stats;
    assert_eq!((stats.arrived, stats.answered, stats.rejected), (2_500, 2_500, 0));
    assert!(stats.within_slo > 1_000, "{stats:?}");
}

/// The devices and the memory in GiB of the last started or returned instance.
fn spread_of(host: &Host) -> (Vec<u32>, Vec<u64>) {
    let parts = host.orders.iter().rev().find_map(|order| match order {
        PlatformAction::Start { parts, .. } | PlatformAction::Unpark { parts, .. } => Some(parts),
        _ => None,
    });
    let parts = parts.unwrap();
    let gib = |part: &Part| part.share.memory().unwrap().get() >> 30;
    (parts.iter().map(|part| part.gpu.number()).collect(), parts.iter().map(gib).collect())
}

#[test]
fn a_model_that_no_device_holds_is_spread_over_devices_of_one_node() {
    let mut host = Host::with(&[16, 16, 16, 16]);
    host.deploy(0, inference(9).with_instances(1, 1));
    host.run(MS(100));
    assert_eq!(spread_of(&host), (vec![0], vec![9]));
    host.deploy(1, inference(24).with_devices(2));
    host.load(1, MS(10), 10);
    host.run(MS(5_000));
    assert_eq!(spread_of(&host), (vec![2, 3], vec![12, 12]), "device 0 has 7 GiB");
    assert_eq!(host.answered(1).len(), 10);
    // Both halves go with one device; with three devices left, room is made beside device 1.
    host.lose(3);
    host.load(1, MS(10), 10);
    host.run(MS(9_000));
    assert_eq!(spread_of(&host), (vec![0, 1], vec![12, 12]));
    let parked = host.orders.iter().filter(|order| matches!(order, PlatformAction::Park { .. })).count();
    assert_eq!((host.answered(1).len(), parked), (20, 1));
    // The platform makes room for the other function, too.
    host.load(0, MS(10), 1);
    host.run(MS(60_000));
    assert_eq!(host.answered(0).len(), 1, "{:?}", host.orders);
}

/// The devices of a function's instances that are placed.
fn devices_of(host: &Host, function: u32) -> Vec<u32> {
    let mine = host.instances.values().filter(|of| of.function == FunctionId::new(function));
    mine.flat_map(|of| &of.parts).map(|part| part.gpu.number()).collect()
}

#[test]
fn instances_of_a_model_go_where_its_weights_are_which_are_booked_once() {
    let mut host = Host::with(&[16, 16]);
    // 9 + 3 x 2 GiB on a device; each by itself would be one on each.
    host.deploy(0, inference(2).with_weights(weights(0, 9)).with_instances(3, 4));
    host.run(MS(5_000));
    assert_eq!(devices_of(&host, 0), [0, 0, 0]);
    // Another function of the model has a GiB there, and then there is none.
    host.deploy(1, inference(1).with_weights(weights(0, 9)).with_instances(1, 1));
    host.deploy(2, inference(1).with_instances(1, 1));
    host.run(MS(5_000));
    assert_eq!((devices_of(&host, 1), devices_of(&host, 2)), (vec![0], vec![1]));
    // Another model has weights of its own.
    host.deploy(3, inference(2).with_weights(weights(1, 12)).with_instances(1, 1));
    host.run(MS(5_000));
    assert_eq!(devices_of(&host, 3), [1]);
    // They are booked until the last one is gone, of whichever function.
    let remove = |host: &mut Host, function| {
        host.tell(PlatformEvent::FunctionRemoved { function: FunctionId::new(function) }).unwrap();
        host.run(MS(5_000));
    };
    remove(&mut host, 0);
    let parked = |host: &Host| host.count(|order| matches!(order, PlatformAction::Park { .. }));
    host.deploy(4, inference(6).with_instances(1, 1));
    host.run(MS(5_000));
    assert_eq!((devices_of(&host, 4), parked(&host)), (vec![0], 0));
    host.deploy(5, inference(10).with_instances(1, 1));
    host.run(MS(5_000));
    assert_eq!((devices_of(&host, 5), parked(&host)), (vec![0], 1), "the weights have 9 of 16 GiB");
}

#[test]
fn parking_counts_the_weights_that_go_with_the_last_of_their_users() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(2).with_weights(weights(0, 9)).with_instances(2, 2));
    host.run(MS(8_000));
    // 3 GiB are free; one instance and the weights would not do.
    host.deploy(1, inference(14));
    host.load(1, MS(10), 5);
    host.run(MS(20_000));
    assert_eq!(host.answered(1).len(), 5, "{:?}", host.orders);
    let parked = || host.orders.iter().filter(|order| matches!(order, PlatformAction::Park { .. })).count();
    assert_eq!(parked(), 2);
    // One that shares the weights needs no more than its own memory.
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(6).with_weights(weights(0, 9)).with_instances(1, 1));
    host.run(MS(8_000));
    host.deploy(1, inference(6).with_weights(weights(0, 9)));
    host.load(1, MS(10), 5);
    host.run(MS(20_000));
    assert_eq!(host.answered(1).len(), 5, "{:?}", host.orders);
}

#[test]
fn weights_that_no_device_holds_beside_an_instance_never_fit() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(2).with_weights(weights(0, 15)));
    host.load(0, MS(10), 1);
    host.run(MS(100));
    assert_eq!(host.rejected(), [Rejection::NeverFits]);
    let spread = inference(2).with_weights(weights(0, 3)).with_devices(2);
    let event = PlatformEvent::FunctionDeployed { function: FunctionId::new(7), spec: Box::new(spread) };
    assert!(host.tell(event).unwrap_err().to_string().contains("weights are shared on one device"));
}

/// On a device that serves one request at a time each instance has weights of its own.
#[test]
fn instances_on_a_whole_device_have_their_weights_in_their_memory() {
    let mut host = Host::new(PlatformSettings::default().build().unwrap());
    host.find(0, DeviceSpec::new(NodeId::new(0), gib(16)).with_regime(Regime::Whole));
    host.deploy(0, inference(2).with_weights(weights(0, 9)).with_instances(1, 1));
    host.run(MS(5_000));
    let parts: Vec<_> = host.instances.values().flat_map(|of| &of.parts).collect();
    assert_eq!(parts[0].share.memory(), Some(gib(11)), "{parts:?}");
}

#[test]
fn devices_of_an_instance_have_bounds() {
    let mut host = Host::with(&[16]);
    let mut refused = |spec| {
        let event = PlatformEvent::FunctionDeployed { function: FunctionId::new(7), spec: Box::new(spec) };
        host.tell(event).unwrap_err().to_string()
    };
    assert!(refused(inference(2).with_devices(0)).ends_with("devices is 0, need 1 to 64"));
    assert!(refused(inference(2).with_devices(65)).ends_with("devices is 65, need 1 to 64"));
    let training = FunctionSpec::new(Work::Training { workers: 2, share: GpuShare::WHOLE }, gib(4));
    assert!(refused(training.with_devices(2)).ends_with("devices is 2, need 1"));
    assert!(host.platform.function(FunctionId::new(7)).is_none());
}

/// A burst beyond one instance's timely capacity. In the order of arrival the later requests are late too.
#[test]
fn requests_that_are_late_wait_behind_those_that_can_be_in_time() {
    let in_time = |late_wait| {
        let config = PlatformConfig::default().with_late_wait(late_wait);
        let pool =
            FractionalPool::new(FractionalConfig::default(), FractionalPolicies::fast().unwrap()).unwrap();
        let mut host = Host::new(Platform::new(config, vec![pool.into()]).unwrap());
        host.find(0, DeviceSpec::new(NodeId::new(0), gib(16)));
        host.deploy(0, inference(2).with_instances(1, 1));
        host.takes = MS(18);
        host.load(0, MS(1), 500);
        host.load(0, MS(25), 800);
        host.run(MS(40_000));
        assert_eq!(host.answered(0).len(), 1_300, "{:?}", host.rejected());
        let slowest = host.answered(0).into_iter().max().unwrap();
        assert!(slowest < MS(25_000), "none waits for ever: {slowest}");
        host.platform.function(FunctionId::new(0)).unwrap().stats.within_slo
    };
    let (by_arrival, late_last) = (in_time(None), in_time(Some(MS(20_000))));
    assert!(by_arrival < 300 && late_last > 600, "{by_arrival} and {late_last} of 1300 in time");
}

/// A device whose functions stay warm for ten minutes.
fn with_long_keep_alive() -> Host {
    let config = FractionalConfig::default().with_keep_alive(KeepAlive::PAPER);
    let pool = FractionalPool::new(config, FractionalPolicies::fast().unwrap()).unwrap();
    let mut host = Host::new(Platform::new(PlatformConfig::default(), vec![pool.into()]).unwrap());
    host.find(0, DeviceSpec::new(NodeId::new(0), gib(16)));
    host
}

#[test]
fn a_function_whose_starts_fail_is_not_started_for_nobody() {
    let mut host = with_long_keep_alive();
    host.deploy(0, inference(9).with_loads(MS(8_000), MS(8_000)));
    host.load(0, MS(1), 1);
    let mut fails = |minutes: u32| {
        for _ in 0..minutes * 20 {
            host.run(MS(3_000));
            let starting = host.instances.iter().filter(|(_, of)| of.life == Life::Starting);
            for id in starting.map(|(id, _)| *id).collect::<Vec<_>>() {
                host.happen(Later::Report(id, InstanceReport::Gone));
            }
        }
        (host.rejected().len(), host.count(|order| matches!(order, PlatformAction::Start { .. })))
    };
    let (rejected, starts) = fails(3);
    assert!(rejected == 1 && starts > 1, "{rejected} and {starts}");
    assert_eq!(fails(10), (rejected, starts), "starts without a call");
}

#[test]
fn a_function_that_serves_is_kept_warm_although_a_further_start_failed() {
    let mut host = with_long_keep_alive();
    host.deploy(0, inference(1));
    host.load(0, MS(1), 1);
    host.run(MS(5_000));
    let served = *host.instances.keys().next().unwrap();
    host.load(0, MS(2), 2_000);
    while host.instances.len() < 2 {
        host.run(MS(100));
    }
    for _ in 0..20 {
        for id in host.instances.keys().copied().filter(|id| *id != served).collect::<Vec<_>>() {
            if host.instances[&id].life == Life::Starting {
                host.happen(Later::Report(id, InstanceReport::Gone));
            }
        }
        host.run(MS(1_000));
    }
    host.run(MS(300_000));
    assert_eq!(host.instances.get(&served).map(|of| of.life), Some(Life::Ready), "five minutes later");
}

#[test]
fn an_instance_that_is_gone_gets_no_orders_from_timers_that_were_due_before() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(1));
    host.load(0, MS(1), 1);
    host.run(MS(5_000));
    let id = *host.instances.keys().next().unwrap();
    // Its host was busy for ten minutes. The end of its rest is overdue.
    host.now = host.now + MS(600_000);
    let before = host.orders.len();
    host.happen(Later::Report(id, InstanceReport::Gone));
    let to_it = host.orders[before..].iter().filter(|order| order.instance() == Some(id));
    assert_eq!(to_it.count(), 0);
}

/// Orders impossible starts before the orders of the scaler it stands for.
struct Wild(Box<dyn HorizontalScaler>);

impl HorizontalScaler for Wild {
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>) {
        let beyond = report.fleet.spec().profile.points().len();
        orders.push(HorizontalOrder::Start(beyond));
        orders.extend([HorizontalOrder::Start(0); 9]);
        self.0.decide(report, orders);
    }

    fn forget(&mut self, function: FunctionId) {
        self.0.forget(function);
    }
}

#[test]
fn a_start_that_a_scaler_cannot_order_is_not_carried_out() {
    let mut policies = FractionalPolicies::fast().unwrap();
    policies.scaler = Box::new(Wild(policies.scaler));
    let pool = FractionalPool::new(FractionalConfig::default(), policies).unwrap();
    let mut host = Host::new(Platform::new(PlatformConfig::default(), vec![pool.into()]).unwrap());
    host.find(0, DeviceSpec::new(NodeId::new(0), gib(16)));
    host.deploy(0, inference(2).with_instances(1, 2));
    host.load(0, MS(100), 20);
    host.run(MS(10_000));
    assert_eq!(host.answered(0).len(), 20);
    assert_eq!(host.instances.len(), 2, "its maximum");
}

/// Two functions of 9 GiB on each of two devices of 16 GiB; a start takes 8 s, and a copy 400 ms. The first call of each is over.
fn four_parked_in_turn() -> Host {
    let mut host = Host::with(&[16, 16]);
    host.copies = Some(MS(400));
    for function in 0..4 {
        let spec = inference(9).with_instances(1, 1).with_slo(MS(6_000));
        host.deploy(function, spec.with_loads(MS(8_000), MS(8_000)));
        host.load(function, MS(1), 1);
        host.run(MS(15_000));
    }
    host
}

#[test]
fn a_parked_instance_comes_back_to_the_device_of_its_process() {
    let mut host = four_parked_in_turn();
    for function in 0..4 {
        host.load(function, MS(1_500), 60);
    }
    host.run(MS(100_000));
    assert_eq!(host.moved, [], "nothing starts anew");
    for function in 0..4 {
        let answered = host.answered(function);
        assert_eq!(answered.len(), 61, "fn{function}: {:?}", host.rejected());
        let slowest = answered[1..].iter().max().unwrap();
        assert!(*slowest <= MS(6_000), "fn{function} waited {slowest}");
    }
    let parked = host.count(|order| matches!(order, PlatformAction::Park { .. }));
    assert!((20..=120).contains(&parked), "{parked} times");
}

/// Functions that have been called three times each and have taken turns, so that their moves are known to take 1.2 s.
fn with_known_copies(devices: &[u64], functions: u32, spec: &FunctionSpec) -> Host {
    let mut host = Host::with(devices);
    host.copies = Some(MS(900));
    for function in 0..functions {
        host.deploy(function, spec.clone());
    }
    for call in 0..3 * functions {
        host.load(call % functions, MS(1), 1);
        host.run(MS(20_000));
    }
    host
}

/// How long a call waits that comes a second after another function's instance has come, which gets a call every so many ms.
fn waits_for_an_instance_called_each(every: u64) -> Duration {
    let spec = inference(9).with_instances(1, 1).with_slo(MS(60_000)).with_loads(MS(8_000), MS(8_000));
    let mut host = with_known_copies(&[16], 2, &spec);
    host.load(0, MS(every), 15_000 / every);
    host.run(MS(2_200));
    host.load(1, MS(1), 1);
    host.run(MS(20_000));
    *host.answered(1).last().unwrap()
}

#[test]
fn an_instance_that_is_idle_between_calls_leaves_after_twice_its_price_and_a_busy_one_after_four_times() {
    let [idle, busy] = [500, 100].map(waits_for_an_instance_called_each);
    assert!((MS(2_400)..MS(3_200)).contains(&idle), "{idle}: 1.4 s, the move and a look");
    assert!((MS(4_800)..MS(6_000)).contains(&busy), "{busy}: 3.8 s, the move and the last call");
}

#[test]
fn functions_that_take_turns_come_back_home_where_a_start_takes_less_than_a_stay() {
    let spec = inference(9).with_instances(0, 1).with_slo(MS(6_000)).with_loads(MS(3_000), MS(3_000));
    let mut host = with_known_copies(&[16, 16], 3, &spec);
    let before = host.moved.len();
    for function in 0..3 {
        host.load(function, MS(500), 240);
    }
    host.run(MS(130_000));
    assert_eq!(host.moved.len(), before, "nothing starts anew");
    for function in 0..3 {
        let answered = host.answered(function);
        // They rested before, so all three have to start again first.
        let slowest = answered.iter().skip(3 + 40).max().unwrap();
        assert!(answered.len() == 243 && *slowest <= MS(6_000), "fn{function} waited {slowest}");
    }
}

/// Processes that end start again at home, or elsewhere at the same price. Then a neighbour which starts at an instance's home keeps the
/// instance waiting for as long as its own start elsewhere takes.
#[test]
fn functions_that_take_turns_find_their_homes_again_after_processes_ended() {
    for ended in 1..=12 {
        let spec = inference(9).with_instances(0, 1).with_slo(MS(6_000)).with_loads(MS(3_400), MS(3_400));
        let mut host = Host::with(&[16, 16]);
        host.copies = Some(MS(70));
        for function in 0..3 {
            host.deploy(function, spec.clone());
            host.load(function, MS(500), 240);
        }
        host.run(MS(40_000));
        host.copies = None;
        host.run(MS(500 * ended));
        host.copies = Some(MS(70));
        host.run(MS(30_000));
        let before = host.moved.len();
        host.run(MS(60_000));
        assert_eq!(host.moved.len(), before, "{ended}: nothing starts anew");
    }
}

#[test]
fn a_parked_instance_starts_elsewhere_once_it_has_waited_as_long_as_a_start() {
    let mut host = four_parked_in_turn();
    let home = |host: &Host, function| {
        let mut all = host.instances.values().filter(|of| of.function == FunctionId::new(function));
        all.next().unwrap().home.clone()
    };
    // Its own device answers a request for a minute, and the other device has room.
    let (own, other): (Vec<u32>, Vec<u32>) = (0..3).partition(|one| home(&host, *one) == home(&host, 3));
    host.load(own[0], MS(1), 1);
    host.run(MS(15_000));
    for function in other {
        host.tell(PlatformEvent::FunctionRemoved { function: FunctionId::new(function) }).unwrap();
    }
    host.takes = MS(60_000);
    host.load(own[0], MS(1), 1);
    host.run(MS(3_000));
    host.takes = MS(10);
    let before = home(&host, 3);
    host.load(3, MS(1), 1);
    host.run(MS(7_000));
    assert_eq!((host.answered(3).len(), host.moved.len()), (1, 0), "it waits at home");
    host.run(MS(12_000));
    assert_eq!((host.answered(3).len(), host.moved.len()), (2, 1), "{:?}", host.rejected());
    assert_ne!(home(&host, 3), before);
}

/// Three functions of 9 GiB on two devices of 16 GiB: an idle function lends its memory to another.
#[test]
fn a_function_that_finds_no_memory_is_served_when_another_has_been_parked() {
    let mut host = Host::with(&[16, 16]);
    for function in 0..3 {
        host.deploy(function, inference(9));
        host.load(function, MS(4_000), 10);
    }
    host.run(Duration::from_secs(60));
    for function in 0..3 {
        assert_eq!(host.answered(function).len(), 10, "fn{function}");
        let slowest = host.answered(function).into_iter().max().unwrap();
        // Two loads, of the one before it and its own, and in between a stay of 2 s and a park.
        assert!(slowest <= MS(8_310), "fn{function} waited {slowest}");
        // Once they take turns, an SLO of 1.5 s is kept: another one rests and is parked for 0.5 s, the copy takes as long.
        let settled = host.answered(function)[4..].iter().copied().max().unwrap();
        assert!(settled <= MS(1_500), "fn{function} waited {settled}");
    }
    assert!(host.count(|order| matches!(order, PlatformAction::Park { .. })) > 0);
    assert!(host.count(|order| matches!(order, PlatformAction::Unpark { .. })) > 0);
}

#[test]
fn a_busy_instance_makes_way_for_one_that_has_waited_long_and_comes_back() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(9));
    host.deploy(1, inference(9));
    host.load(0, MS(12), 2_000);
    host.run(MS(5_000));
    host.load(1, MS(1), 3);
    host.run(MS(6_000));
    assert_eq!(host.answered(1).len(), 3, "{:?}", host.rejected());
    host.run(Duration::from_secs(40));
    assert_eq!(host.answered(0).len(), 2_000, "{:?}", host.rejected());
}

/// The instances of a function that start, are ready or are parked.
fn kept(host: &Host, function: u32) -> usize {
    let of = host.instances.values().filter(|of| of.function == FunctionId::new(function));
    of.filter(|of| !matches!(of.life, Life::Draining | Life::Stopped)).count()
}

#[test]
fn a_minimum_of_several_finds_room_where_idle_instances_can_be_parked_and_pushes_no_busy_one_out() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(9).with_instances(1, 1));
    host.run(MS(4_000));
    host.load(0, MS(100), 100);
    host.deploy(1, inference(5).with_instances(2, 2));
    host.run(MS(9_900));
    let parks = |host: &Host| host.count(|order| matches!(order, PlatformAction::Park { .. }));
    assert_eq!((kept(&host, 1), parks(&host)), (1, 0), "fn0 is called ten times a second");
    host.run(MS(10_000));
    assert_eq!((kept(&host, 0), kept(&host, 1), parks(&host)), (1, 2, 1));
    host.load(0, MS(100), 3);
    host.run(MS(10_000));
    assert_eq!(host.answered(0).len(), 103, "{:?}", host.rejected());
    assert_eq!((kept(&host, 0), kept(&host, 1)), (1, 2), "parked or not");
}

#[test]
fn each_missing_instance_of_a_minimum_tries_all_points() {
    let point = |percent, rate, p50| {
        let sm = SmShare::from_percent(percent).unwrap();
        ProfilePoint::measured(sm, Quota::WHOLE, 1, rate, MS(p50), MS(p50 + 1)).unwrap()
    };
    let with = |points| {
        let work = Work::Inference { profile: Some(ProfileTable::grid(points).unwrap()) };
        FunctionSpec::new(work, gib(1)).with_loads(MS(3_000), MS(500)).with_instances(3, 3)
    };
    let mut host = Host::with(&[16, 16, 16]);
    host.deploy(0, with(vec![point(70, 90.0, 11)]));
    // Half of a device serves more than twice a quarter of one, and three devices have 30 % each.
    host.deploy(1, with(vec![point(25, 30.0, 33), point(50, 90.0, 11)]));
    host.run(MS(500));
    assert_eq!((kept(&host, 0), kept(&host, 1)), (3, 3));
}

/// A restart of the host: functions without a minimum, devices, instances that run, minimums.
#[test]
fn an_instance_of_an_earlier_host_is_kept_where_it_runs_and_counts_towards_the_minimum() {
    let mut host = Host::with(&[16, 16]);
    host.deploy(0, inference(9).with_instances(0, 2));
    let point = host.platform.function(FunctionId::new(0)).map(|view| match &view.spec.work {
        Work::Inference { profile: Some(table) } => table.points()[0],
        work => panic!("{work:?}"),
    });
    let (quota, sm) = point.map(|at| (at.quota, at.sm)).unwrap();
    let found =
        |gpu| PlatformEvent::InstanceFound { function: FunctionId::new(0), gpu: GpuId::new(gpu), quota, sm };
    host.tell(found(1)).unwrap();
    assert_eq!(devices_of(&host, 0), [1]);
    let refused = |host: &mut Host, event| host.tell(event).unwrap_err().to_string();
    assert!(refused(&mut host, found(1)).contains("an instance of fn0 on gpu1: "), "its memory is booked");
    assert_eq!(refused(&mut host, found(7)), "unknown gpu7");
    let other = PlatformEvent::InstanceFound {
        function: FunctionId::new(0),
        gpu: GpuId::new(0),
        quota: Quota::new(7).unwrap(),
        sm,
    };
    assert!(refused(&mut host, other).contains("0.07% of the time"), "a share of an older version");
    let bounds =
        PlatformEvent::BoundsChanged { function: FunctionId::new(0), min_instances: 1, max_instances: 2 };
    host.tell(bounds).unwrap();
    host.run(Duration::from_secs(1));
    assert_eq!(devices_of(&host, 0), [1], "none was missing");
    host.tell(found(0)).unwrap();
    assert!(refused(&mut host, found(0)).contains("at most 2 instances"));
    host.deploy(1, FunctionSpec::new(Work::Training { workers: 1, share: GpuShare::WHOLE }, gib(4)));
    let trains = PlatformEvent::InstanceFound { function: FunctionId::new(1), gpu: GpuId::new(0), quota, sm };
    assert!(refused(&mut host, trains).contains("need the share of the job"));
}

/// The instance is ready at once, since its process runs already. A start of the function still takes 3 s, and a move of its memory 700 ms.
#[test]
fn an_instance_of_an_earlier_host_tells_nothing_about_the_time_of_a_start() {
    let mut host = Host::with(&[16]);
    host.copies = Some(MS(400));
    host.deploy(0, inference(9).with_instances(0, 1).with_slo(MS(60_000)));
    let (function, gpu, point) = (FunctionId::new(0), GpuId::new(0), profile().points()[0]);
    let found = PlatformEvent::InstanceFound { function, gpu, quota: point.quota, sm: point.sm };
    host.tell(found).unwrap();
    let instance = *host.instances.keys().next().unwrap();
    host.happen(Later::Report(instance, InstanceReport::Ready));
    host.tell(PlatformEvent::BoundsChanged { function, min_instances: 1, max_instances: 1 }).unwrap();
    host.deploy(1, inference(9).with_instances(1, 1).with_slo(MS(60_000)));
    for _ in 0..4 {
        for function in [1, 0] {
            host.arrive(FunctionId::new(function), None);
            host.run(MS(10_000));
        }
    }
    let of = |order: &PlatformAction| matches!(order, PlatformAction::Park { instance: of, .. } if *of == instance);
    assert!(host.count(of) > 2, "{:?}", host.orders);
    assert_eq!(
        host.count(|order| matches!(order, PlatformAction::Park { keeps: false, .. })),
        0,
        "{:?}",
        host.orders
    );
}

#[test]
fn a_job_of_an_earlier_host_starts_after_its_bounds_alone_and_its_worker_is_kept() {
    let mut host = Host::with(&[16, 16, 16]);
    let job = |workers| {
        let spec = FunctionSpec::new(Work::Training { workers, share: GpuShare::WHOLE }, gib(4));
        spec.with_found(true)
    };
    let bounds = |function| PlatformEvent::BoundsChanged {
        function: FunctionId::new(function),
        min_instances: 1,
        max_instances: 1,
    };
    let (quota, sm) = (Quota::WHOLE, SmShare::WHOLE);
    let found = |function, gpu| PlatformEvent::InstanceFound {
        function: FunctionId::new(function),
        gpu: GpuId::new(gpu),
        quota,
        sm,
    };
    for (function, workers) in [(0, 1), (1, 1), (2, 2)] {
        host.deploy(function, job(workers));
    }
    host.run(Duration::from_secs(60));
    assert!(host.instances.is_empty(), "none is told yet");
    host.tell(found(0, 1)).unwrap();
    assert_eq!(devices_of(&host, 0), [1]);
    assert!(host.tell(found(0, 2)).unwrap_err().to_string().contains("need a job that does not run"));
    assert!(host.tell(found(2, 0)).unwrap_err().to_string().contains("need a job of one worker"));
    for function in [0, 1] {
        host.tell(bounds(function)).unwrap();
    }
    host.run(Duration::from_secs(60));
    assert_eq!((devices_of(&host, 0).len(), devices_of(&host, 1).len()), (1, 1));
    assert!(devices_of(&host, 2).is_empty());
}

#[test]
fn a_lost_device_ends_its_instances_and_their_requests_go_elsewhere() {
    let mut host = Host::with(&[16, 16]);
    host.deploy(0, inference(2).with_instances(1, 2));
    host.load(0, MS(50), 200);
    host.run(MS(4_500));
    let on = host.instances.values().next().unwrap().parts[0].gpu;
    host.lose(on.number());
    host.run(Duration::from_secs(20));
    assert_eq!(host.answered(0).len(), 200, "{:?}", host.rejected());
    host.find(on.number(), DeviceSpec::new(NodeId::new(0), gib(16)));
    host.run(Duration::from_secs(1));
}

#[test]
fn training_is_a_gang_that_starts_together_starts_again_together_and_completes() {
    let mut host = Host::with(&[16, 16, 16]);
    let share = GpuShare::new(
        QuotaRange::new(Quota::from_percent(40).unwrap(), Quota::WHOLE).unwrap(),
        SmShare::WHOLE,
        SmShare::WHOLE,
        Some(gib(8)),
    )
    .unwrap();
    host.deploy(
        7,
        FunctionSpec::new(Work::Training { workers: 3, share }, gib(8)).with_loads(MS(2_000), MS(900)),
    );
    host.run(MS(3_000));
    let (&first, of) = host.instances.first_key_value().unwrap();
    let devices: BTreeSet<GpuId> = of.parts.iter().map(|part| part.gpu).collect();
    assert_eq!((of.life, devices.len(), of.parts[0].share), (Life::Ready, 3, share));
    host.lose(2);
    host.run(MS(3_000));
    assert!(host.instances.is_empty(), "two of three workers are no gang");
    host.find(2, DeviceSpec::new(NodeId::new(1), gib(16)));
    host.run(MS(4_000));
    let (&second, of) = host.instances.first_key_value().unwrap();
    assert!(second > first && of.life == Life::Ready);
    host.after(MS(10), Later::Report(second, InstanceReport::Completed));
    host.run(Duration::from_secs(60));
    assert!(host.instances.is_empty(), "it was done");
    let error = host.tell(PlatformEvent::RequestArrived {
        request: RequestId::new(9),
        function: FunctionId::new(7),
        deadline: None,
    });
    assert_eq!(error.unwrap_err().to_string(), "fn7 trains and answers no requests");
}

#[test]
fn a_function_without_a_profile_is_profiled_first_and_its_requests_wait() {
    let mut host = Host::with(&[16]);
    let function = FunctionId::new(0);
    let mut spec = inference(2);
    spec.work = Work::Inference { profile: None };
    host.deploy(0, spec);
    assert_eq!(host.orders, [PlatformAction::Profile { function }]);
    let early = host.arrive(function, None);
    let late = host.arrive(function, Some(host.now + MS(700)));
    host.run(MS(1_000));
    assert_eq!(host.ends[&late].1, End::Rejected(Rejection::DeadlineMissed));
    host.tell(PlatformEvent::ProfileLearned { function, profile: profile(), memory: None }).unwrap();
    host.run(MS(4_000));
    assert_eq!(host.ends[&early].1, End::Answered(MS(4_010)));
    let again = host.tell(PlatformEvent::ProfileLearned { function, profile: profile(), memory: None });
    assert_eq!(again, Err(PlatformError::NotProfiling { function }));
}

#[test]
fn a_tenant_has_as_many_requests_at_work_and_as_much_gpu_time_as_it_may() {
    let mut host = Host::with(&[16]);
    let tenant = TenantId::new(3);
    host.deploy(0, inference(2).with_tenant(tenant).with_instances(1, 1));
    host.run(MS(4_000));
    let mut limits = TenantLimits::default();
    (limits.max_requests, limits.max_waiting) = (2, 3);
    host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
    let requests: Vec<RequestId> = (0..5).map(|_| host.arrive(FunctionId::new(0), None)).collect();
    assert_eq!(host.count(|order| matches!(order, PlatformAction::Dispatch { .. })), 1);
    assert_eq!(host.platform.waiting(FunctionId::new(0)), 3);
    assert_eq!(host.ends[&requests[4]].1, End::Rejected(Rejection::TenantQueueFull));
    host.run(MS(1_000));
    assert_eq!(host.answered(0).len(), 4);
    assert_eq!(host.platform.waiting(FunctionId::new(0)), 0);

    // 1 % of 60 s is 600 ms of the device; each request takes 10 ms of a quarter of it.
    let mut limits = TenantLimits::default();
    limits.gpu_time = BasisPoints::from_percent(1).unwrap();
    host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
    host.load(0, MS(21), 1_000);
    host.run(MS(21_500));
    let answered = host.answered(0).len();
    assert!((236..=245).contains(&answered), "{answered} of 1,000 were let in in this window");
}

/// The third instance of the tenant's functions is refused until one of the first two is gone.
#[test]
fn a_tenant_has_as_many_processes_as_it_may() {
    let mut host = Host::with(&[16, 16]);
    let (tenant, mut limits) = (TenantId::new(3), TenantLimits::default());
    limits.max_processes = 2;
    host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
    for function in 0..3 {
        host.deploy(function, inference(2).with_tenant(tenant).with_instances(1, 1));
    }
    host.run(MS(20_000));
    let starts = |host: &Host| host.count(|order| matches!(order, PlatformAction::Start { .. }));
    assert_eq!(starts(&host), 2);
    host.deploy(3, inference(2).with_instances(1, 1));
    host.run(MS(1_000));
    assert_eq!(starts(&host), 3, "another tenant's is not bounded");
    host.tell(PlatformEvent::FunctionRemoved { function: FunctionId::new(0) }).unwrap();
    host.run(MS(20_000));
    assert_eq!(starts(&host), 4);
    limits.max_processes = 0;
    let refused = host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap_err().to_string();
    assert!(refused.contains("max_processes") && refused.contains("need more than 0"), "{refused}");
}

/// Four requests at once are enough for the load. Requests held until the function has instances are late, and are no reason for the others
/// to be late, nor for fewer instances.
#[test]
fn a_tenants_limit_hides_no_load_and_lets_in_first_what_can_be_in_time() {
    let in_time = |limited: bool| {
        let mut host = Host::with(&[16, 16]);
        let (tenant, mut limits) = (TenantId::new(3), TenantLimits::default());
        limits.max_requests = if limited { 4 } else { u32::MAX };
        host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
        host.deploy(0, inference(2).with_tenant(tenant));
        host.takes = MS(18);
        host.load(0, MS(8), 2_500);
        host.run(MS(40_000));
        assert_eq!(host.answered(0).len(), 2_500, "{:?}", host.rejected());
        host.platform.function(FunctionId::new(0)).unwrap().stats.within_slo
    };
    let (limited, free) = (in_time(true), in_time(false));
    assert!(free > 1_000 && limited * 10 > free * 9, "{limited} in time, {free} without a limit");
}

/// More load than four requests at once can be: each waits for its tenant's limit, and none for an instance.
#[test]
fn load_that_waits_for_its_tenant_keeps_the_instances_that_serve_it() {
    let mut host = Host::with(&[16, 16]);
    let (tenant, mut limits) = (TenantId::new(3), TenantLimits::default());
    limits.max_requests = 4;
    host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
    host.deploy(0, inference(2).with_tenant(tenant));
    host.takes = MS(18);
    host.load(0, MS(3), 5_000);
    host.run(MS(15_000));
    assert_eq!(host.count(|order| matches!(order, PlatformAction::Start { .. })), 4);
    assert_eq!(host.count(|order| matches!(order, PlatformAction::Drain { .. })), 0);
}

/// Requests that are at work count before they end: a burst is let in as far as the window's time goes, no further.
#[test]
fn a_burst_of_a_tenant_uses_no_more_gpu_time_than_it_may() {
    let mut host = Host::with(&[16]);
    let tenant = TenantId::new(3);
    let mut limits = TenantLimits::default();
    limits.gpu_time = BasisPoints::from_percent(1).unwrap();
    host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
    host.deploy(0, inference(2).with_tenant(tenant).with_instances(1, 1));
    host.run(MS(4_000));
    // 600 ms of the device for requests that take 10 ms of a quarter of it.
    for _ in 0..1_000 {
        host.arrive(FunctionId::new(0), None);
    }
    host.run(MS(50_000));
    let answered = host.answered(0).len();
    assert!((236..=245).contains(&answered), "{answered} of 1,000 were let in in this window");
}

#[test]
fn a_removed_function_answers_what_it_has_and_its_name_is_free_when_all_of_it_is_gone() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(2));
    host.load(0, MS(1), 5);
    host.run(MS(3_005));
    let function = FunctionId::new(0);
    host.tell(PlatformEvent::FunctionRemoved { function }).unwrap();
    let spec = Box::new(inference(2));
    let error = host.tell(PlatformEvent::FunctionDeployed { function, spec: spec.clone() });
    assert_eq!(error, Err(PlatformError::FunctionExists { function }));
    host.run(MS(1_000));
    assert_eq!(host.answered(0).len() + host.rejected().len(), 5);
    assert!(host.instances.is_empty());
    host.tell(PlatformEvent::FunctionDeployed { function, spec }).unwrap();
}

/// Three functions of 9 GiB on two devices of 16 GiB, each called twice a second for 60 s, with parkings of 300 ms: the number of
/// parkings, and the longest wait after the first starts.
fn taking_turns(load: u64, slower: u64, slo: u64) -> (usize, Duration) {
    let mut host = Host::with(&[16, 16]);
    host.slower = slower;
    for function in 0..3 {
        let spec = inference(9).with_instances(0, 1).with_slo(MS(slo));
        host.deploy(function, spec.with_loads(MS(load), MS(load)));
        host.load(function, MS(500), 120);
    }
    host.run(MS(100_000));
    let answered = [0, 1, 2].map(|function| host.answered(function).len());
    assert_eq!(answered, [120; 3], "{:?}", host.rejected());
    let waits = |function| host.answered(function).into_iter().skip(24).max().unwrap();
    let longest = [0, 1, 2].map(waits).into_iter().max().unwrap();
    (host.count(|order| matches!(order, PlatformAction::Park { .. })), longest)
}

#[test]
fn functions_that_share_too_little_memory_do_not_spend_their_time_on_loads() {
    let (parked, longest) = taking_turns(300, 1, 100);
    assert!((20..=52).contains(&parked) && longest < MS(5_000), "{parked} times, {longest}");
    // A stay follows from the load as it is, not as it was declared.
    let (parked, longest) = taking_turns(300, 10, 100);
    assert!((4..=9).contains(&parked) && longest < MS(20_000), "{parked} times, {longest}");
}

#[test]
fn an_slo_that_can_be_kept_ends_a_stay_early() {
    let (parked, longest) = taking_turns(2_000, 1, 100);
    assert!((6..=12).contains(&parked) && longest > MS(6_000), "{parked} times, {longest}");
    let (parked, longest) = taking_turns(2_000, 1, 6_000);
    assert!((12..=30).contains(&parked) && longest <= MS(6_000), "{parked} times, {longest}");
}

#[test]
fn an_instance_may_use_twice_the_time_of_its_point_unless_its_function_has_a_limit_of_its_own() {
    let quota = |percent| Quota::from_percent(percent).unwrap();
    let point = |time| ProfilePoint::measured(SmShare::WHOLE, quota(time), 1, 50.0, MS(8), MS(9)).unwrap();
    let time = |request, limit: Option<u16>| {
        let profile = Some(ProfileTable::sparse(vec![point(request)]).unwrap());
        let mut spec = FunctionSpec::new(Work::Inference { profile }, gib(2)).with_instances(1, 1);
        spec.time_limit = limit.map(quota);
        let mut host = Host::with(&[16]);
        host.deploy(0, spec);
        host.run(MS(4_000));
        let started = host.instances.values().next().expect("the minimum was started");
        started.parts[0].share.time().to_string()
    };
    assert_eq!([time(20, None), time(60, None)], ["20%:40%", "60%:100%"]);
    assert_eq!([time(20, Some(30)), time(20, Some(10))], ["20%:30%", "20%:20%"]);
}

/// A report of its load is due at the time of its removal: the instances then wanted by the scaler are not started.
#[test]
fn nothing_is_started_for_a_function_that_is_removed_at_a_deadline() {
    let mut host = Host::with(&[16, 16]);
    host.deploy(0, inference(2).with_instances(1, 4));
    host.run(MS(4_000));
    for _ in 0..500 {
        host.arrive(FunctionId::new(0), None);
    }
    host.now = host.platform.next_deadline().unwrap() + MS(2_000);
    let before = host.orders.len();
    host.tell(PlatformEvent::FunctionRemoved { function: FunctionId::new(0) }).unwrap();
    let started = |order: &&PlatformAction| matches!(order, PlatformAction::Start { .. });
    assert_eq!(host.orders[before..].iter().find(started), None);
}

#[test]
fn bad_input_is_refused_by_field_and_bound_and_changes_nothing() {
    let mut host = Host::with(&[16]);
    let text = |host: &mut Host, event| host.tell(event).unwrap_err().to_string();
    let deploy = |function, spec| PlatformEvent::FunctionDeployed { function, spec: Box::new(spec) };
    let spec = inference(2).with_instances(3, 2);
    assert_eq!(
        text(&mut host, deploy(FunctionId::new(0), spec)),
        "fn0: max_instances is 2, need at least min_instances (3) and 1"
    );
    let fast = inference(2).with_slo(MS(4));
    assert!(
        text(&mut host, deploy(FunctionId::new(0), fast)).contains("the best is 9"),
        "the least that was measured"
    );
    let sliced = inference(2).with_regime(Regime::Sliced);
    assert!(text(&mut host, deploy(FunctionId::new(0), sliced)).contains("no pool of sliced devices"));
    let layout = MigLayout::new(GpuModel::find("A100-80").unwrap(), Vec::new()).unwrap();
    let spec = DeviceSpec::new(NodeId::new(0), gib(80)).with_mig(layout);
    assert!(text(&mut host, PlatformEvent::DeviceFound { gpu: GpuId::new(8), spec }).contains("sliced"));
    let spec = DeviceSpec::new(NodeId::new(0), Bytes::ZERO);
    assert!(text(&mut host, PlatformEvent::DeviceFound { gpu: GpuId::new(8), spec }).contains("memory is 0"));
    let lost = PlatformEvent::DeviceLost { gpu: GpuId::new(9) };
    assert_eq!(text(&mut host, lost), "unknown gpu9");
    let report = InstanceReport::Ready;
    let unknown = PlatformEvent::Instance { instance: InstanceId::new(0), report };
    assert_eq!(text(&mut host, unknown), "unknown instance0");
    let mut limits = TenantLimits::default();
    limits.max_requests = 0;
    let limited = PlatformEvent::TenantLimited { tenant: TenantId::new(1), limits };
    assert_eq!(text(&mut host, limited), "max_requests of tenant1 is 0: need more than 0");
    host.now = Timestamp::from_millis(5);
    host.tell(PlatformEvent::DeadlineReached).unwrap();
    host.now = Timestamp::from_millis(4);
    assert!(text(&mut host, PlatformEvent::DeadlineReached).starts_with("time went back"));
    assert!(host.orders.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn requests_end_once_and_devices_are_never_oversold(bytes in prop::collection::vec(any::<u8>(), 3..240)) {
        support::run_bytes(&bytes);
    }
}

#[test]
fn new_instances_go_to_the_nodes_of_their_function_and_no_room_is_made_elsewhere() {
    let nodes = |all: &[u32]| Some(all.iter().map(|node| NodeId::new(*node)).collect::<BTreeSet<_>>());
    let changed = |host: &mut Host, function, all: Option<BTreeSet<NodeId>>| {
        let function = FunctionId::new(function);
        host.tell(PlatformEvent::NodesChanged { function, nodes: all }).unwrap();
        host.run(MS(60_000));
    };
    // Devices 0 and 1 are of node 0, 2 and 3 of node 1.
    let mut host = Host::with(&[16, 16, 16, 16]);
    host.deploy(0, inference(9).with_nodes(nodes(&[1])).with_instances(2, 3));
    host.deploy(1, inference(9).with_instances(2, 2));
    let job = FunctionSpec::new(Work::Training { workers: 1, share: GpuShare::WHOLE }, gib(4));
    host.deploy(2, job.with_nodes(nodes(&[1])));
    host.run(MS(60_000));
    assert_eq!((devices_of(&host, 0), devices_of(&host, 1)), (vec![2, 3], vec![0, 1]));
    assert_eq!(devices_of(&host, 2), [0; 0], "its node is full, and the others are not asked");
    assert_eq!(host.count(|order| matches!(order, PlatformAction::Park { .. })), 0);
    // What runs stays; what starts from now on goes elsewhere.
    changed(&mut host, 0, nodes(&[0]));
    assert_eq!(devices_of(&host, 0), [2, 3]);
    host.tell(PlatformEvent::FunctionRemoved { function: FunctionId::new(1) }).unwrap();
    host.run(MS(60_000));
    host.lose(3);
    host.run(MS(60_000));
    assert!(matches!(devices_of(&host, 0)[..], [2, 0 | 1]), "{:?}", devices_of(&host, 0));
    // Without a node it fits nothing, until it is allowed one.
    host.deploy(3, inference(2).with_nodes(nodes(&[])));
    host.load(3, MS(10), 1);
    host.run(MS(5_000));
    assert_eq!(host.rejected(), [Rejection::NeverFits]);
    changed(&mut host, 3, None);
    host.load(3, MS(10), 1);
    host.run(MS(60_000));
    assert_eq!(host.answered(3).len(), 1);
    let whole = inference(2).with_regime(Regime::Whole).with_nodes(nodes(&[0]));
    let deployed = PlatformEvent::FunctionDeployed { function: FunctionId::new(9), spec: Box::new(whole) };
    assert!(host.tell(deployed).is_err(), "on fractional devices only");
}

#[test]
fn an_instance_serves_on_where_no_other_may_start_and_a_job_starts_when_its_nodes_widen() {
    let nodes = |all: &[u32]| Some(all.iter().map(|node| NodeId::new(*node)).collect::<BTreeSet<_>>());
    let changed = |host: &mut Host, function, nodes| {
        let function = FunctionId::new(function);
        host.tell(PlatformEvent::NodesChanged { function, nodes }).unwrap();
    };
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(9).with_instances(1, 1));
    host.run(MS(60_000));
    // More requests than the instance takes at once: some wait while the node is taken away.
    host.load(0, MS(1), 8);
    host.run(MS(4));
    changed(&mut host, 0, nodes(&[]));
    host.load(0, MS(1), 8);
    host.run(MS(60_000));
    assert_eq!((host.rejected().len(), host.answered(0).len()), (0, 16));
    host.lose(0);
    host.load(0, MS(1), 1);
    host.run(MS(60_000));
    assert_eq!(host.rejected(), [Rejection::NeverFits], "its instance is gone");

    let mut host = Host::with(&[16]);
    let job = FunctionSpec::new(Work::Training { workers: 1, share: GpuShare::WHOLE }, gib(4));
    host.deploy(0, job.with_nodes(nodes(&[7])));
    host.run(MS(60_000));
    assert_eq!(devices_of(&host, 0), [0; 0]);
    changed(&mut host, 0, None);
    assert_eq!(devices_of(&host, 0), [0], "at once");
}
