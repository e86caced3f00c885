//! Tests of the pool's answers one by one, against a host with scripted answers.

mod node;

use super::*;
use crate::Tier;
use crate::mig::GpuModel;
use crate::pipeline::Late;
use crate::platform::testing::{self, dispatch, park, reject};
use crate::platform::{
    FunctionSpec, MigLayout, PlatformAction, PlatformEvent, Rejection, StopCause, TenantLimits, Work,
};
use gshare_core::dag::Component;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Engine, Quota, SmShare, TenantId};

type Host = testing::Host<SlicedPool>;

impl Host {
    fn new(devices: &[(u32, u32, &[&str])]) -> Self {
        let mut host = Self::around(SlicedPool::with_config(SlicedConfig::default()).unwrap());
        for &(gpu, node, slices) in devices {
            host.join(gpu, node, slices);
        }
        host
    }

    fn join(&mut self, gpu: u32, node: u32, slices: &[&str]) -> Vec<PlatformAction> {
        self.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec: mig(node, "A100-80", slices) })
    }

    fn add(&mut self, function: u32, spec: FunctionSpec) {
        let event =
            PlatformEvent::FunctionDeployed { function: FunctionId::new(function), spec: Box::new(spec) };
        assert_eq!(self.tell(event), []);
    }

    fn lives(&self) -> Vec<(u64, Life, usize)> {
        let mut lives = Vec::new();
        self.platform
            .instances(&mut |view| lives.push((view.instance.number(), view.life, view.parts.len())));
        lives
    }
}

fn mig(node: u32, model: &str, slices: &[&str]) -> DeviceSpec {
    let layout = MigLayout::named(model, slices).unwrap();
    DeviceSpec::new(NodeId::new(node), Bytes::from_gib(80)).with_mig(layout)
}

/// Components of 20 ms on any slice, with `gib` GiB each; the run-time takes one more.
fn chain(components: usize, gib: u64) -> FunctionSpec {
    let mut dag = Dag::builder("chain");
    for index in 0..components {
        let mut component = Component::new(format!("c{index}"));
        for slice in ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb"] {
            component = component.with_profile(slice, 1, Duration::from_millis(20), Bytes::from_gib(gib));
        }
        dag = dag.component(component);
    }
    for index in 1..components {
        dag = dag.edge(format!("c{}", index - 1), format!("c{index}"), Bytes::from_mib(1));
    }
    let (dag, goal) = (Box::new(dag.build().unwrap()), Box::new(Goal::default()));
    let spec = FunctionSpec::new(Work::Pipeline { dag, goal }, Bytes::from_gib(gib));
    spec.with_slo(Duration::from_secs(60)).with_instances(0, 8)
}

/// An inference function of 5 GiB with one measured point.
fn measured(sm: u16, batch: u32, ms: u64) -> FunctionSpec {
    let (sm, time) = (SmShare::from_percent(sm).unwrap(), Duration::from_millis(ms));
    let point = ProfilePoint::measured(sm, Quota::WHOLE, batch, 10.0, time, time).unwrap();
    let work = Work::Inference { profile: Some(ProfileTable::sparse(vec![point]).unwrap()) };
    FunctionSpec::new(work, Bytes::from_gib(5))
}

/// A point at 25 % of the SMs is no measurement of a slice with a seventh of them.
#[test]
fn an_inference_function_is_served_on_a_slice_as_large_as_its_point() {
    let mut host = Host::new(&[(0, 0, &["1g.10gb", "2g.20gb"])]);
    host.add(0, measured(25, 1, 20).with_slo(Duration::from_secs(1)));
    let start = host.arrive(0, 0, None);
    let [PlatformAction::Start { parts, .. }] = &start[..] else { panic!("{start:?}") };
    let slice = parts[0].slice.unwrap();
    let model = GpuModel::find("A100-80").unwrap();
    assert_eq!((parts.len(), &*model.get(slice.profile).unwrap().name), (1, "2g.20gb"));
    assert_eq!(parts[0].share.memory(), Some(Bytes::from_gib(5)));
    host.report(0, InstanceReport::Ready);
    assert_eq!(host.report(0, InstanceReport::Unparked), [dispatch(0, 0)]);
    host.done(0);
    // A slice that is too slow for the latency is none at all.
    host.add(1, measured(14, 1, 20).with_slo(Duration::from_millis(10)));
    assert_eq!(host.arrive(1, 1, None), [reject(1, Rejection::NeverFits)]);
}

fn is_unpark(actions: &[PlatformAction], instance: u64) -> bool {
    matches!(actions, [PlatformAction::Unpark { instance: one, parts, .. }] if one.number() == instance && parts.len() == 1)
}

/// The example of the module: an arriving instance waits until the leaving one has left, and its request waits for the arrival.
#[test]
fn instances_take_turns_on_a_slice_and_none_comes_before_another_has_left() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    host.add(0, chain(2, 6));
    host.add(1, chain(1, 12));
    let start = host.arrive(0, 0, None);
    let [PlatformAction::Start { instance, parts, from: Tier::Disk, parked: true, .. }] = &start[..] else {
        panic!("{start:?}")
    };
    assert_eq!((instance.number(), parts.len(), parts[0].share.memory()), (0, 1, Some(Bytes::from_gib(13))));
    let ready = host.report(0, InstanceReport::Ready);
    assert!(is_unpark(&ready, 0), "{ready:?}");
    assert_eq!(host.lives(), [(0, Life::Parked, 1)], "on its way");
    assert_eq!(host.report(0, InstanceReport::Unparked), [dispatch(0, 0)]);
    assert_eq!(host.done(0), []);
    host.arrive(1, 1, None);
    assert_eq!(host.report(1, InstanceReport::Ready), [park(0)], "and no unpark yet");
    assert_eq!(host.report(1, InstanceReport::Unparked), [], "a report of what was not ordered");
    let come = host.report(0, InstanceReport::Parked);
    assert!(is_unpark(&come, 1), "{come:?}");
    assert_eq!(host.lives(), [(0, Life::Parked, 0), (1, Life::Parked, 1)]);
    assert_eq!(host.report(1, InstanceReport::Unparked), [dispatch(1, 1)]);
    assert_eq!(host.lives()[1].1, Life::Ready);
}

/// An instance that dies during its parking has left too.
#[test]
fn an_instance_that_dies_while_it_leaves_its_slice_has_left_it() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    host.add(0, chain(2, 6));
    host.add(1, chain(1, 12));
    host.arrive(0, 0, None);
    host.report(0, InstanceReport::Ready);
    host.report(0, InstanceReport::Unparked);
    host.done(0);
    host.arrive(1, 1, None);
    assert_eq!(host.report(1, InstanceReport::Ready), [park(0)]);
    let come = host.report(0, InstanceReport::Gone);
    assert!(is_unpark(&come, 1), "{come:?}");
}

#[test]
fn a_request_that_misses_its_slo_and_has_no_deadline_is_rejected_as_late() {
    let router = RouterConfig::default().with_late(Late::Reject);
    let pool = SlicedPool::with_config(SlicedConfig::default().with_router(router)).unwrap();
    let mut host = Host::around(pool);
    host.join(0, 0, &["2g.20gb"]);
    host.add(0, chain(2, 6).with_slo(Duration::from_millis(500)));
    host.arrive(0, 0, None);
    host.now = 500;
    assert_eq!(host.tell(PlatformEvent::DeadlineReached), [reject(0, Rejection::WouldBeLate)]);
}

#[test]
fn a_request_that_is_withdrawn_while_an_instance_comes_for_it_is_forgotten() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    host.add(0, chain(2, 6));
    host.arrive(0, 0, Some(500));
    host.arrive(1, 0, None);
    host.now = 400;
    assert!(is_unpark(&host.report(0, InstanceReport::Ready), 0));
    host.now = 500;
    assert_eq!(host.tell(PlatformEvent::DeadlineReached), [reject(0, Rejection::DeadlineMissed)]);
    assert_eq!(host.platform.waiting(FunctionId::new(0)), 1);
    assert_eq!(host.arrive(2, 0, None), []);
    host.now = 600;
    assert_eq!(host.report(0, InstanceReport::Unparked), [dispatch(1, 0)]);
    assert_eq!(host.done(1), [dispatch(2, 0)]);
}

#[test]
fn a_pipeline_that_loses_a_part_is_gone_and_its_request_is_served_elsewhere() {
    let mut host = Host::new(&[(0, 0, &["1g.10gb"]), (1, 0, &["1g.10gb"])]);
    host.add(0, chain(2, 8));
    let start = host.arrive(0, 0, None);
    let [PlatformAction::Start { parts, parked: false, .. }] = &start[..] else { panic!("{start:?}") };
    let places: Vec<_> =
        parts.iter().map(|part| (part.gpu.number(), part.stage, part.components.len())).collect();
    assert_eq!((places.len(), places[0].1, places[1].1), (2, 0, 1));
    assert_eq!(host.report(0, InstanceReport::Ready), [dispatch(0, 0)]);
    host.join(2, 1, &["4g.40gb"]);
    let lost = host.tell(PlatformEvent::DeviceLost { gpu: GpuId::new(1) });
    let stops = |one: &PlatformAction| matches!(one, PlatformAction::Stop { .. });
    assert!(!lost.iter().any(stops), "the host ends the other part by itself: {lost:?}");
    let starts = |actions: &[PlatformAction]| {
        actions
            .iter()
            .any(|one| matches!(one, PlatformAction::Start { parts, .. } if parts[0].gpu == GpuId::new(2)))
    };
    let mut all = lost;
    while !starts(&all) {
        host.now += 100;
        all.extend(host.tell(PlatformEvent::DeadlineReached));
        assert!(host.now < 2_000, "it is never started elsewhere: {all:?}");
    }
    for report in [InstanceReport::Gone, InstanceReport::Ready, InstanceReport::Parked] {
        assert_eq!(host.report(0, report), [], "an old report");
    }
    assert!(is_unpark(&host.report(1, InstanceReport::Ready), 1));
    assert_eq!(host.report(1, InstanceReport::Unparked), [dispatch(0, 1)]);
    assert_eq!(host.done(0), []);
}

#[test]
fn no_more_instances_are_started_than_the_function_may_have() {
    let starts = |max: u32| {
        let mut host = Host::new(&[(0, 0, &["2g.20gb", "2g.20gb", "2g.20gb"])]);
        host.add(0, chain(1, 6).with_slo(Duration::from_millis(50)).with_instances(0, max));
        for request in 0..50 {
            host.arrive(request, 0, None);
        }
        for _ in 0..20 {
            host.now += 100;
            host.tell(PlatformEvent::DeadlineReached);
        }
        host.lives().len()
    };
    assert_eq!([starts(1), starts(2), starts(9)], [1, 2, 3]);
}

/// Instances by node, without ending ones.
fn on_nodes(host: &Host, function: u32) -> Vec<(u32, usize)> {
    let cluster = &host.platform.cluster;
    let mut on: BTreeMap<u32, usize> = BTreeMap::new();
    for gpu in (0..4).map(GpuId::new) {
        let here = cluster.instances.on(gpu).filter_map(|id| cluster.instances.get(id));
        let here = here.filter(|one| one.stays() && one.function == FunctionId::new(function)).count();
        if here > 0 {
            *on.entry(cluster.devices.get(gpu).unwrap().node.number()).or_default() += here;
        }
    }
    on.into_iter().collect()
}

fn bounds(min_instances: u32) -> PlatformEvent {
    PlatformEvent::BoundsChanged { function: FunctionId::new(0), min_instances, max_instances: 8 }
}

/// On two nodes: a minimum exists from the deployment on, spread; lost instances come back, and impossible ones wait.
#[test]
fn a_minimum_is_kept_by_all_nodes_together() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    let function = FunctionId::new(0);
    let spec = Box::new(chain(1, 12).with_instances(3, 8));
    assert_eq!(host.unmet(0, PlatformEvent::FunctionDeployed { function, spec }), 1, "one slice, told once");
    assert_eq!(on_nodes(&host, 0), [(0, 1)]);
    assert_eq!(host.unmet(0, PlatformEvent::DeadlineReached), 0);
    host.join(1, 1, &["2g.20gb"; 3]);
    assert_eq!(on_nodes(&host, 0), [(0, 1), (1, 2)], "as soon as there are slices");
    for instance in 0..3 {
        host.report(instance, InstanceReport::Ready);
    }
    host.now = 86_400_000;
    host.tell(PlatformEvent::DeadlineReached);
    assert_eq!(on_nodes(&host, 0), [(0, 1), (1, 2)], "after a day without a request");
    host.report(0, InstanceReport::Gone);
    assert_eq!(host.lives().len(), 3, "one that died is replaced");
    host.tell(PlatformEvent::DeviceLost { gpu: GpuId::new(1) });
    assert_eq!(on_nodes(&host, 0), [(0, 1)]);
    host.join(2, 2, &["2g.20gb"; 3]);
    assert_eq!(on_nodes(&host, 0), [(0, 1), (2, 2)], "on another device");
    host.tell(bounds(4));
    assert_eq!(on_nodes(&host, 0), [(0, 1), (2, 3)]);
    for instance in 0..7 {
        host.report(instance, InstanceReport::Ready);
    }
    host.tell(bounds(1));
    assert_eq!(on_nodes(&host, 0).iter().map(|(_, count)| count).sum::<usize>(), 1, "and no more are kept");
    host.tell(bounds(0));
    assert_eq!(on_nodes(&host, 0), []);
    host.tell(bounds(2));
    host.tell(PlatformEvent::FunctionRemoved { function });
    assert!(host.lives().iter().all(|(_, life, _)| matches!(life, Life::Stopped | Life::Draining)));
}

#[test]
fn a_start_that_failed_is_tried_again_later() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    let spec = Box::new(chain(1, 12).with_instances(1, 8));
    host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec });
    host.report(0, InstanceReport::Refused);
    assert_eq!(
        (host.lives().len(), host.platform.next_deadline()),
        (0, Some(Timestamp::from_millis(10_000)))
    );
    assert!(host.platform.cluster.lacking.is_empty(), "events of others pass it by");
    host.now = 10_000;
    host.tell(PlatformEvent::DeadlineReached);
    assert_eq!(host.lives().len(), 1);
}

#[test]
fn an_instance_that_a_request_starts_after_a_failed_start_is_kept() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    let spec = Box::new(chain(1, 12).with_instances(1, 8));
    host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec });
    host.report(0, InstanceReport::Refused);
    host.now = 1_000;
    host.arrive(0, 0, None);
    assert_eq!(on_nodes(&host, 0), [(0, 1)]);
    let pool: &dyn core::any::Any = &*host.platform.pools[0];
    let pool: &SlicedPool = pool.downcast_ref().unwrap();
    assert_eq!(pool.functions[&FunctionId::new(0)].kept, [(NodeId::new(0), 1)].into());
}

#[test]
fn a_request_that_waits_for_its_tenant_counts_as_load_once() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    host.add(0, chain(2, 6));
    let limits = TenantLimits { max_requests: 1, ..TenantLimits::default() };
    host.tell(PlatformEvent::TenantLimited { tenant: TenantId::new(0), limits });
    let heard = |host: &mut Host| {
        let pool: &mut dyn core::any::Any = &mut *host.platform.pools[0];
        let pool: &mut SlicedPool = pool.downcast_mut().unwrap();
        // One gap less than requests.
        pool.nodes[&NodeId::new(0)].functions[&FunctionId::new(0)].gaps.total() + 1
    };
    host.arrive(0, 0, None);
    assert_eq!(heard(&mut host), 1);
    host.arrive(1, 0, None);
    assert_eq!(heard(&mut host), 2, "the second request waits for its tenant");
    host.report(0, InstanceReport::Ready);
    host.report(0, InstanceReport::Unparked);
    assert_eq!(host.done(0), [dispatch(1, 0)]);
    assert_eq!(heard(&mut host), 2);
}

#[test]
fn a_removed_function_finishes_what_runs_and_frees_its_name() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    host.add(0, chain(2, 6));
    host.arrive(0, 0, None);
    host.report(0, InstanceReport::Ready);
    host.report(0, InstanceReport::Unparked);
    assert_eq!(host.arrive(1, 0, None), []);
    let function = FunctionId::new(0);
    let removed = host.tell(PlatformEvent::FunctionRemoved { function });
    let drain = PlatformAction::Drain { instance: InstanceId::new(0) };
    assert_eq!(removed, [reject(1, Rejection::Removed), drain]);
    let stop = PlatformAction::Stop { instance: InstanceId::new(0), cause: StopCause::Removed };
    assert_eq!(host.done(0), [stop]);
    let forget = PlatformAction::Forget { node: NodeId::new(0), function };
    assert_eq!(host.report(0, InstanceReport::Gone), [forget]);
    host.add(0, chain(1, 3));
}

#[test]
fn a_device_of_another_model_than_its_nodes_is_refused() {
    let mut host = Host::new(&[(0, 0, &["2g.20gb"])]);
    let spec = mig(0, "H100-80", &["1g.10gb"]);
    let other = host.try_tell(PlatformEvent::DeviceFound { gpu: GpuId::new(1), spec }).unwrap_err();
    assert!(other.contains("mig.model is H100-80, that of the other devices of node0 is A100-80"), "{other}");
    let event =
        PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec: Box::new(measured(14, 4, 9)) };
    let text = host.try_tell(event).unwrap_err();
    assert!(text.starts_with("fn0 cannot run on sliced devices: profile: need a point of batch 1"), "{text}");
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let mut config = SlicedConfig::default();
    config.keeper.max_shared = 0;
    let error = SlicedPool::with_config(config).unwrap_err().to_string();
    assert_eq!(error, "keeper: max_shared is 0: need more than 0");
}
