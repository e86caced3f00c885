//! The rules of a node: the claims of FluidFaaS, section 5.3.

use super::*;
use crate::platform::sliced::node::Node;
use core::any::Any;

fn host(config: KeeperConfig, slices: &[&str]) -> Host {
    let mut host =
        Host::around(SlicedPool::with_config(SlicedConfig::default().with_keeper(config)).unwrap());
    host.join(0, 0, slices);
    host
}

impl Host {
    fn pool(&mut self) -> (&mut SlicedPool, &mut Cluster) {
        let pool: &mut dyn Any = &mut *self.platform.pools[0];
        (pool.downcast_mut().unwrap(), &mut self.platform.cluster)
    }

    /// Lets the node decide at this time, and returns the orders.
    fn decide(&mut self, act: impl FnOnce(&mut Node, &mut Cluster)) -> Vec<PlatformAction> {
        let now = Timestamp::from_millis(self.now);
        let (pool, cluster) = self.pool();
        cluster.now = now;
        pool.decide(NodeId::new(0), cluster, act);
        pool.settle(cluster);
        core::mem::take(&mut cluster.orders)
    }

    fn served(&mut self, instance: u64, busy: u64) {
        let busy = Duration::from_millis(busy);
        self.decide(|node, _| node.served(InstanceId::new(instance), busy));
    }

    fn short(&mut self, function: u32) -> Vec<PlatformAction> {
        self.decide(|node, cluster| node.told_short(FunctionId::new(function), cluster))
    }

    fn requested(&mut self, function: u32) -> Vec<PlatformAction> {
        self.decide(|node, cluster| node.requested(FunctionId::new(function), cluster))
    }

    /// Time passes.
    fn at(&mut self, millis: u64) -> Vec<PlatformAction> {
        self.now = millis;
        self.tell(PlatformEvent::DeadlineReached)
    }

    fn is_shared(&mut self, instance: u64) -> bool {
        self.pool().0.one(InstanceId::new(instance)).unwrap().is_shared()
    }

    fn warm(&mut self) -> usize {
        let node = &self.pool().0.nodes[&NodeId::new(0)];
        node.functions.values().filter(|function| function.warm).count()
    }
}

impl Host {
    /// No order of an event takes an instance from a function short of them; returns how many drain.
    fn keeps(&self, orders: &[PlatformAction], seed: u64) -> usize {
        let replaced = |id: &u64| {
            let (instance, cause) = (InstanceId::new(*id), StopCause::Replaced);
            orders.contains(&PlatformAction::Stop { instance, cause })
        };
        for id in drained(orders).into_iter().filter(|id| !replaced(id)) {
            let function = self.platform.instance(InstanceId::new(id)).unwrap().function;
            let missing = self.platform.cluster.missing(function);
            assert_eq!(missing, 0, "seed {seed}, {} ms, {function}: {orders:?}", self.now);
        }
        drained(orders).len()
    }
}

/// Number of parts of each started instance, and whether it shares its slice.
fn started(actions: &[PlatformAction]) -> Vec<(u64, bool, usize)> {
    let start = |action: &PlatformAction| match action {
        PlatformAction::Start { instance, parts, parked, .. } => {
            Some((instance.number(), *parked, parts.len()))
        }
        _ => None,
    };
    actions.iter().filter_map(start).collect()
}

fn drained(actions: &[PlatformAction]) -> Vec<u64> {
    let drain = |action: &PlatformAction| match action {
        PlatformAction::Drain { instance } => Some(instance.number()),
        _ => None,
    };
    actions.iter().filter_map(drain).collect()
}

/// The instance is ready and in its slice's memory, for the function's waiting request, which is answered.
fn serves(host: &mut Host, instance: u64, request: u64, function: u32) {
    host.arrive(request, function, None);
    host.report(instance, InstanceReport::Ready);
    host.report(instance, InstanceReport::Unparked);
    host.done(request);
}

/// Figure 8: ① a first request makes a time-sharing instance, ② use above the threshold an exclusive one, ③ less use turns
/// it back, ④ another evicts it, ⑤ ten minutes without requests end it.
#[test]
fn states_change_as_in_figure_8() {
    let mut host = host(KeeperConfig::paper(), &["2g.20gb"]);
    host.add(0, chain(2, 7));
    host.add(1, chain(2, 7));
    assert_eq!(started(&host.arrive(0, 0, None)), [(0, true, 1)]);
    host.report(0, InstanceReport::Ready);
    host.report(0, InstanceReport::Unparked);
    host.done(0);
    host.served(0, 3_100);
    host.at(10_000);
    assert!(!host.is_shared(0));
    assert_eq!(host.arrive(1, 1, None), [], "exempt");
    host.cancel(1);
    host.now = 11_000;
    host.served(0, 2_900);
    host.at(20_000);
    assert!(host.is_shared(0));
    // Nothing was freed, but the slice is shared now.
    host.now = 20_100;
    assert_eq!(started(&host.arrive(2, 1, None)), [(1, true, 1)]);
    assert_eq!(host.report(1, InstanceReport::Ready), [park(0)]);
    assert_eq!(host.warm(), 2, "evicted is warm, not cold");
    host.report(0, InstanceReport::Parked);
    host.report(1, InstanceReport::Unparked);
    host.done(2);
    let forget =
        |function| PlatformAction::Forget { node: NodeId::new(0), function: FunctionId::new(function) };
    let over = host.at(600_000);
    assert!(over.contains(&forget(0)) && !over.contains(&forget(1)), "{over:?}");
    assert_eq!(host.warm(), 1);
}

/// FluidFaaS, section 5.2: what fits no slice as a whole runs as a pipeline; and as none when pipelines are off.
#[test]
fn a_function_too_large_for_a_slice_becomes_a_pipeline() {
    let free = ["1g.10gb", "2g.20gb"];
    let mut with = host(KeeperConfig::paper(), &free);
    with.add(0, chain(3, 8));
    assert_eq!(started(&with.arrive(0, 0, None)), [(0, false, 2)]);
    let mut without = host(KeeperConfig::monolithic(), &free);
    without.add(0, chain(3, 8));
    assert_eq!(without.arrive(0, 0, None), [reject(0, Rejection::NeverFits)]);
}

/// FluidFaaS, section 5.3, "Pipeline migration": the new instance is up before the old one drains.
#[test]
fn a_pipeline_moves_to_one_slice_when_one_is_free() {
    let mut host = host(KeeperConfig::paper(), &["4g.40gb", "1g.10gb", "2g.20gb"]);
    host.add(0, chain(1, 36));
    host.add(1, chain(3, 8));
    serves(&mut host, 0, 0, 0);
    host.served(0, 3_100);
    host.at(10_000);
    assert!(!host.is_shared(0), "the slice for the whole is taken");
    assert_eq!(started(&host.arrive(1, 1, None)), [(1, false, 2)]);
    host.report(1, InstanceReport::Ready);
    host.done(1);
    host.report(0, InstanceReport::Gone);
    assert_eq!(started(&host.at(20_000)), [], "in this window a function wanted slices");
    assert_eq!(started(&host.at(30_000)), [(2, false, 1)]);
    host.now = 31_000;
    assert_eq!(drained(&host.report(2, InstanceReport::Ready)), [1]);
}

/// Function 0 has a shared instance and two exclusive ones, each used for 30 % of the last windows; function 1 shares.
fn one_that_has_and_one_that_wants() -> Host {
    let mut host = host(KeeperConfig::default(), &["2g.20gb"; 3]);
    host.add(0, chain(2, 7));
    host.add(1, chain(2, 7));
    assert_eq!(started(&host.requested(0)), [(0, true, 1)]);
    for instance in [1, 2] {
        host.now = instance * 100;
        assert_eq!(started(&host.short(0)), [(instance, false, 1)]);
    }
    assert_eq!(started(&host.requested(1)), [(3, true, 1)]);
    for instance in 0..4 {
        host.report(instance, InstanceReport::Ready);
    }
    for millis in [9_000, 19_000] {
        host.now = millis;
        host.served(1, 3_000);
        host.served(2, 3_000);
    }
    host.at(20_000);
    host
}

/// A request in wait there is late already; an instance given away, or still starting, would make timely requests late.
#[test]
fn slices_at_work_stay_where_they_are() {
    let mut host = one_that_has_and_one_that_wants();
    host.now = 21_100;
    assert_eq!(drained(&host.short(1)), [0; 0]);
    // Idle instances are still taken.
    for millis in [29_000, 39_000] {
        host.now = millis;
        host.served(1, 3_000);
    }
    host.now = 41_000;
    assert_eq!(drained(&host.short(1)), [2]);
    let stops = host.lives().into_iter().filter(|(_, life, _)| *life == Life::Stopped);
    assert_eq!(stops.map(|(instance, ..)| instance).collect::<Vec<_>>(), [2], "it has no request");
}

#[test]
fn a_minimum_outlives_every_keep_alive_until_it_is_lowered() {
    let mut host = host(KeeperConfig::default(), &["2g.20gb"; 3]);
    let function = FunctionId::new(0);
    let spec = Box::new(chain(2, 7).with_instances(3, 8));
    let three = host.tell(PlatformEvent::FunctionDeployed { function, spec });
    assert_eq!(started(&three), [(0, true, 1), (1, true, 1), (2, false, 1)], "two may share");
    host.tell(bounds(2));
    for instance in 0..3 {
        host.report(instance, InstanceReport::Ready);
    }
    host.requested(0);
    // Not used for an hour: the keep-alive removes the surplus, and no more.
    let hour = drained(&host.at(3_600_000));
    assert_eq!(hour.len(), 1);
    assert_eq!(drained(&host.at(86_400_000)), [0; 0]);
    assert_eq!(host.warm(), 1);
    host.report(hour[0], InstanceReport::Gone);
    // A lost instance is started again.
    let left = (0..3).find(|one| *one != hour[0]).unwrap();
    let again = started(&host.report(left, InstanceReport::Gone));
    assert!(matches!(again[..], [(3, ..)]), "{again:?}");
    host.report(3, InstanceReport::Ready);
    assert_eq!(drained(&host.tell(bounds(0))).len(), 2);
}

/// With random minimums and deaths, under each kind of settings: no order takes an instance from a function short of them.
#[test]
fn no_order_takes_an_instance_that_is_kept() {
    let (mut kept, mut drains) = (0, 0);
    for seed in 0..60u64 {
        let config = [KeeperConfig::default(), KeeperConfig::paper()];
        let slices = ["4g.40gb", "2g.20gb", "1g.10gb"];
        let mut host = host(config[(seed % 2) as usize].clone(), &slices);
        host.join(1, 0, &["2g.20gb", "2g.20gb"]);
        let mut rng = Rng(seed);
        for (function, gib) in [(0, 3), (1, 8), (2, 16)] {
            host.add(function, chain(2, gib));
        }
        let mut least = [0u32; 3];
        for _ in 0..400 {
            let pause = if rng.below(100) < 3 { 900_000 } else { 4_000 };
            let at = host.now + rng.below(pause);
            let orders = host.at(at);
            drains += host.keeps(&orders, seed);
            let function = rng.below(3) as u32;
            let lives = host.lives();
            let one = (!lives.is_empty()).then(|| lives[rng.below(lives.len() as u64) as usize]);
            let orders = match (rng.below(10), one) {
                (0, _) => {
                    least[function as usize] = rng.below(3) as u32;
                    let (function, min_instances) = (FunctionId::new(function), least[function as usize]);
                    host.tell(PlatformEvent::BoundsChanged { function, min_instances, max_instances: 8 })
                }
                (1, _) => host.short(function),
                (2, _) => host.requested(function),
                (3 | 4, Some((id, Life::Ready | Life::Parked, _))) => {
                    host.served(id, rng.below(6_000));
                    Vec::new()
                }
                (5, Some((id, ..))) => host.report(id, InstanceReport::Gone),
                (_, Some((id, Life::Starting, _))) => host.report(id, InstanceReport::Ready),
                (_, Some((id, Life::Stopped, _))) => host.report(id, InstanceReport::Gone),
                _ => Vec::new(),
            };
            drains += host.keeps(&orders, seed);
            let has = |of: u32| host.platform.cluster.missing(FunctionId::new(of)) == 0;
            kept += (0..3).filter(|of| least[*of as usize] > 0 && has(*of)).count();
        }
    }
    assert!(kept > 5_000 && drains > 100, "{kept} {drains}");
}

/// Draws by a linear congruence.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Use that goes up and down about the threshold: two thresholds and windows in a row settle, one threshold does not.
#[test]
fn states_do_not_flap_about_the_threshold() {
    let changes = |config: KeeperConfig| {
        let mut host = host(config, &["2g.20gb"]);
        host.add(0, chain(1, 12));
        serves(&mut host, 0, 0, 0);
        let (mut before, mut changes) = (true, 0);
        for window in 1..=120u64 {
            host.now = window * 10_000 - 1_000;
            // 24 % and 36 % in turn, for 20 s each.
            let busy = if window / 2 % 2 == 0 { 2_400 } else { 3_600 };
            host.requested(0);
            host.served(0, busy);
            host.at(window * 10_000);
            let now = host.is_shared(0);
            changes += u32::from(core::mem::replace(&mut before, now) != now);
        }
        changes
    };
    let (paper, ours) = (changes(KeeperConfig::paper()), changes(KeeperConfig::default()));
    assert!(ours == 1 && paper > 40, "the paper's rule: {paper} changes, ours {ours}");
}

/// Slices of a lost GPU are never chosen, instances with a part there are gone, and the GPU's slices are free when it is back.
#[test]
fn slices_of_a_lost_gpu_are_not_there_until_it_joins_again() {
    let mut host = host(KeeperConfig::paper(), &["4g.40gb", "3g.40gb"]);
    host.join(1, 0, &["4g.40gb", "3g.40gb"]);
    host.add(0, chain(2, 8));
    let on = |actions: &[PlatformAction]| match actions {
        [PlatformAction::Start { parts, .. }] => parts[0].gpu,
        _ => panic!("{actions:?}"),
    };
    let first = on(&host.arrive(0, 0, None));
    assert_eq!(host.tell(PlatformEvent::DeviceLost { gpu: first }), []);
    let again = on(&host.requested(0));
    assert_ne!(again, first);
    let nothing = host.tell(PlatformEvent::DeviceLost { gpu: again });
    assert_eq!(nothing, [], "no device is left, and the request waits for one");
    assert_eq!(on(&host.join(first.number(), 0, &["4g.40gb", "3g.40gb"])), first);
}

#[test]
fn a_removed_function_is_drained_and_its_starting_instances_are_stopped() {
    let mut host = host(KeeperConfig::default(), &["2g.20gb", "2g.20gb"]);
    host.add(0, chain(2, 7));
    host.requested(0);
    host.report(0, InstanceReport::Ready);
    assert_eq!(started(&host.short(0)), [(1, false, 1)]);
    let function = FunctionId::new(0);
    let removed = host.tell(PlatformEvent::FunctionRemoved { function });
    let stop =
        |instance| PlatformAction::Stop { instance: InstanceId::new(instance), cause: StopCause::Removed };
    assert!(
        removed.contains(&stop(0)) && removed.contains(&stop(1)) && drained(&removed) == [0],
        "{removed:?}"
    );
    assert_eq!(host.report(1, InstanceReport::Gone), []);
    let forget = PlatformAction::Forget { node: NodeId::new(0), function };
    assert_eq!(host.report(0, InstanceReport::Gone), [forget]);
    host.add(0, chain(1, 3));
}
