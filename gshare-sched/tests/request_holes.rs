//! Gaps and mistakes of Algorithms 1 and 2 of GPU-enabled FaaS, one test for each, named for its claim.
//! Numbers 3 and 13 are tested beside the code (`queue`, `cache`).

use RequestAction::{Dispatch, Evict, Load, Reject};
use gshare_core::{
    BasisPoints, Bytes, Duration, Engine, GpuId, GpuKind, ModelId, NodeId, RequestId, TenantId, TimeWentBack,
    Timestamp,
};
use gshare_sched::request::{
    CachePolicy, LocalityScheduler, ModelProfile, Policy, RejectReason, RequestAction, RequestError,
    RequestEvent, RequestPlace, RequestScheduler, SchedulerConfig, Tier,
};

const A: u32 = 0;
const B: u32 = 1;
const C: u32 = 2;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn o3(skip_limit: u32) -> SchedulerConfig {
    let mut config = SchedulerConfig::paper(Policy::LalbO3 { skip_limit });
    config.learn = false;
    config
}

fn load(gpu: u32, model: u32) -> RequestAction {
    Load { gpu: GpuId::new(gpu), model: ModelId::new(model), from: Tier::Disk, keep_on_host: false }
}

fn run(gpu: u32, request: u64, model: u32) -> RequestAction {
    Dispatch {
        gpu: GpuId::new(gpu),
        request: RequestId::new(request),
        model: ModelId::new(model),
        batch_more: 0,
    }
}

fn evict(gpu: u32, model: u32) -> RequestAction {
    Evict { gpu: GpuId::new(gpu), model: ModelId::new(model) }
}

fn reject(request: u64, reason: RejectReason) -> RequestAction {
    Reject { request: RequestId::new(request), reason }
}

/// A scheduler driven step by step. Models A, B, C need 4 of a GPU's 8 GiB, load in 3 s and run in 1 s.
struct Rig {
    engine: LocalityScheduler,
    now: Timestamp,
}

impl Rig {
    fn new(config: SchedulerConfig, gpus: u32) -> Self {
        let mut rig = Self { engine: LocalityScheduler::new(config).unwrap(), now: Timestamp::ZERO };
        for model in [A, B, C] {
            rig.model(model, 4, 0, 3_000, 1_000);
        }
        (0..gpus).for_each(|gpu| rig.join(gpu, 0, 8));
        rig
    }

    fn send(&mut self, event: RequestEvent) -> Vec<RequestAction> {
        self.engine.orders(self.now, event).unwrap_or_else(|error| panic!("{event:?}: {error}"))
    }

    fn at(&mut self, millis: u64) -> &mut Self {
        self.now = Timestamp::from_millis(millis);
        self
    }

    fn model(&mut self, model: u32, gib: u64, kind: u8, load: u64, infer: u64) {
        let model = ModelId::new(model);
        self.send(RequestEvent::ModelAdded { model, memory: Bytes::from_gib(gib) });
        let profile = ModelProfile { load_disk: ms(load), load_host: ms(load / 10), infer: ms(infer) };
        self.send(RequestEvent::ModelProfiled { model, kind: GpuKind::new(kind), profile });
    }

    fn join(&mut self, gpu: u32, kind: u8, gib: u64) {
        let memory = Bytes::from_gib(gib);
        self.send(RequestEvent::GpuJoined {
            gpu: GpuId::new(gpu),
            kind: GpuKind::new(kind),
            node: NodeId::new(0),
            memory,
        });
    }

    fn ask(&mut self, request: u64, model: u32) -> Vec<RequestAction> {
        self.ask_as(0, request, model)
    }

    fn ask_as(&mut self, tenant: u32, request: u64, model: u32) -> Vec<RequestAction> {
        let (request, model, tenant) = (RequestId::new(request), ModelId::new(model), TenantId::new(tenant));
        self.send(RequestEvent::Arrived { request, model, tenant, deadline: None })
    }

    fn loaded(&mut self, gpu: u32, model: u32) -> Vec<RequestAction> {
        self.send(RequestEvent::Loaded { gpu: GpuId::new(gpu), model: ModelId::new(model), took: ms(3_000) })
    }

    fn evicted(&mut self, gpu: u32, model: u32) -> Vec<RequestAction> {
        self.send(RequestEvent::Evicted { gpu: GpuId::new(gpu), model: ModelId::new(model) })
    }

    fn done(&mut self, gpu: u32, request: u64) -> Vec<RequestAction> {
        self.send(RequestEvent::Completed {
            gpu: GpuId::new(gpu),
            request: RequestId::new(request),
            took: ms(1_000),
        })
    }

    fn pin(&mut self, gpu: u32, model: u32, pinned: bool) -> Vec<RequestAction> {
        self.send(RequestEvent::ModelPinned { model: ModelId::new(model), gpu: GpuId::new(gpu), pinned })
    }

    /// Loads a model by a request that is done at once.
    fn warm(&mut self, gpu: u32, request: u64, model: u32) {
        assert_eq!(self.ask(request, model), [load(gpu, model)]);
        assert_eq!(self.loaded(gpu, model), [run(gpu, request, model)]);
        assert_eq!(self.done(gpu, request), []);
    }

    /// Loads a model by a request which does not end.
    fn busy(&mut self, gpu: u32, request: u64, model: u32) {
        assert_eq!(self.ask(request, model), [load(gpu, model)]);
        assert_eq!(self.loaded(gpu, model), [run(gpu, request, model)]);
    }

    fn place(&self, request: u64) -> Option<RequestPlace> {
        self.engine.place(RequestId::new(request))
    }

    fn is_local(&self, request: u64, gpu: u32) -> bool {
        self.place(request) == Some(RequestPlace::Local { gpu: GpuId::new(gpu) })
    }
}

/// One GPU runs B; A and then B wait: the test asks for the next decision.
fn overtaken(config: SchedulerConfig) -> Vec<RequestAction> {
    let mut rig = Rig::new(config, 1);
    rig.busy(0, 1, B);
    assert_eq!(rig.ask(2, A), []);
    assert_eq!(rig.ask(3, B), []);
    rig.done(0, 1)
}

#[test]
fn hole_01_limit_zero_is_in_order() {
    assert_eq!(overtaken(o3(0)), [load(0, A)], "no request is skipped");
    assert_eq!(overtaken(SchedulerConfig::paper(Policy::Lalb)), [load(0, A)]);
    assert_eq!(overtaken(o3(1)), [run(0, 3, B)], "A is skipped once");
}

#[test]
fn hole_01_a_request_is_skipped_as_often_as_the_limit_and_no_more() {
    let mut rig = Rig::new(o3(2), 1);
    rig.busy(0, 1, B);
    rig.ask(2, A);
    (3..7).for_each(|request| assert_eq!(rig.ask(request, B), []));
    assert_eq!(rig.done(0, 1), [run(0, 3, B)]);
    assert_eq!(rig.done(0, 3), [run(0, 4, B)]);
    assert_eq!(rig.done(0, 4), [load(0, A)], "skipped twice");
}

#[test]
fn hole_02_a_scan_that_passes_by_is_no_skip() {
    let mut rig = Rig::new(o3(1), 1);
    // GPU 0 is idle but full of pinned models, so a request for another one is scanned at every event and stays.
    rig.model(C, 8, 0, 1_000, 1_000);
    rig.pin(0, C, true);
    rig.warm(0, 1, C);
    for request in 20..30 {
        // GPU 1 shall have the turn before GPU 0.
        rig.ask(request, C);
        rig.done(0, request);
    }
    rig.join(1, 0, 8);
    rig.model(B, 4, 0, 1_000, 10_000);
    rig.busy(1, 2, B);
    assert_eq!(rig.ask(3, A), []);
    (0..10).for_each(|_| assert_eq!(rig.pin(0, C, true), []));
    assert_eq!(rig.ask(4, B), []);
    assert_eq!(rig.ask(5, B), []);
    assert_eq!(rig.done(1, 2), [run(1, 4, B)], "A was scanned often, and skipped by none");
    assert_eq!(rig.done(1, 4), [load(1, A)], "now it was skipped once");
}

#[test]
fn hole_04_a_gpu_that_was_given_a_request_is_busy_in_the_same_round() {
    let mut rig = Rig::new(o3(25), 1);
    rig.busy(0, 1, A);
    rig.join(1, 0, 8);
    rig.ask(2, A);
    assert!(rig.is_local(2, 0), "to wait is sooner than to load");
    rig.join(2, 0, 8);
    // Both requests are without a GPU in one round. The first goes to GPU 1; for the second GPU 1 is busy, and GPU 2 is sooner.
    let lost = RequestEvent::GpuLost { gpu: GpuId::new(0) };
    assert_eq!(rig.send(lost), [load(1, A), load(2, A)]);
}

#[test]
fn hole_05_an_idle_gpu_has_no_local_queue() {
    let mut rig = Rig::new(o3(0), 2);
    rig.busy(0, 1, A);
    rig.ask(2, A);
    assert!(rig.is_local(2, 0), "1 s to wait is less than 3 s to load on GPU 1");
    rig.busy(1, 3, B);
    rig.ask(4, C);
    assert_eq!(rig.done(0, 1), [run(0, 2, A)], "the local queue first, although C waits and is due");
    assert_eq!(rig.done(0, 2), [load(0, C)]);
}

#[test]
fn hole_06_local_queues_are_no_longer_than_a_load_is_worth() {
    let mut rig = Rig::new(o3(25), 2);
    rig.model(A, 4, 0, 3_200, 1_300);
    rig.busy(0, 1, A);
    let mut loads = Vec::new();
    for request in 2..40 {
        loads.extend(rig.ask(request, A));
    }
    let local = (2..40).filter(|request| rig.is_local(*request, 0)).count();
    assert_eq!(local, 2, "waits of 1.3 and 2.6 s are below 3.2 s, one of 3.9 s is not");
    assert_eq!(loads, [load(1, A)]);
}

#[test]
fn hole_07_of_the_busy_gpus_the_best_is_taken() {
    let mut rig = Rig::new(o3(25), 3);
    rig.busy(0, 1, A);
    rig.at(0).ask(2, A);
    assert!(rig.is_local(2, 0), "GPU 0 is free at 2 s");
    rig.at(0).ask(3, A);
    assert!(rig.is_local(3, 0), "GPU 0 is free at 3 s");
    assert_eq!(rig.ask(4, A), [load(1, A)]);
    rig.at(600).loaded(1, A);
    // GPU 1 is free at 1.6 s. Both waits are below the 3 s of a load on GPU 2; GPU 0 comes first in any list.
    rig.ask(5, A);
    assert!(rig.is_local(5, 1));
}

#[test]
fn hole_08_whole_finish_times_are_compared() {
    let slow_copy = |slow_infer: u64| {
        let mut rig = Rig::new(o3(25), 0);
        rig.model(A, 4, 0, 3_000, slow_infer);
        rig.model(A, 4, 1, 3_000, 1_000);
        rig.join(0, 0, 8);
        assert_eq!(rig.ask(1, A), [load(0, A)]);
        rig.at(3_000 + slow_infer - 2_000).join(1, 1, 8);
        rig.ask(2, A)
    };
    // In both cases the wait of 2 s is below the load of 3 s, which is all that the paper's test looks at.
    assert_eq!(slow_copy(1_900), [], "2 s + 1.9 s < 3 s + 1 s: to the local queue");
    assert_eq!(slow_copy(9_000), [load(1, A)], "2 s + 9 s > 3 s + 1 s");
}

#[test]
fn hole_09_a_model_that_is_loading_is_cached() {
    let mut rig = Rig::new(o3(25), 2);
    assert_eq!(rig.ask(1, A), [load(0, A)]);
    assert_eq!(rig.at(2_000).ask(2, A), [], "1 s of loading, 1 s of running: less than a second load");
    assert!(rig.is_local(2, 0));
    assert_eq!(rig.engine.copies(ModelId::new(A)), 1);
}

#[test]
fn hole_10_the_estimate_is_the_rest_and_the_local_queue() {
    let mut rig = Rig::new(o3(25), 1);
    rig.model(B, 4, 0, 3_000, 2_000);
    rig.warm(0, 1, B);
    rig.at(1_000).busy(0, 2, A);
    rig.join(1, 0, 8);
    rig.at(1_400).ask(3, B);
    assert!(rig.is_local(3, 0));
    let free_at = rig.engine.gpu(GpuId::new(0)).unwrap().free_at;
    assert_eq!(free_at, Timestamp::from_millis(4_000), "until 2 s the running one, then 2 s of B");
}

#[test]
fn hole_10_a_model_that_is_waited_for_is_not_evicted() {
    let mut rig = Rig::new(o3(25), 1);
    rig.warm(0, 1, B);
    rig.busy(0, 2, A);
    rig.join(1, 0, 8);
    rig.ask(3, B);
    assert!(rig.is_local(3, 0));
    // GPU 0 is full of A (running) and B (waited for). Even its own node saying that B is gone does not evict it.
    assert_eq!(rig.send(RequestEvent::Dropped { gpu: GpuId::new(0), model: ModelId::new(B) }), []);
    assert_eq!(rig.done(0, 2), [run(0, 3, B)]);
}

#[test]
fn hole_11_if_everything_is_pinned_the_request_waits() {
    let mut rig = Rig::new(o3(25), 1);
    for (request, model) in [(1, A), (2, B)] {
        rig.pin(0, model, true);
        rig.warm(0, request, model);
    }
    assert_eq!(rig.ask(3, C), []);
    assert_eq!(rig.place(3), Some(RequestPlace::Queued));
    assert_eq!(rig.pin(0, A, false), [evict(0, A)], "the one that is not pinned");
    assert_eq!(rig.evicted(0, A), [load(0, C)], "not before there is room");
}

fn at_most(model: u32, copies: u32) -> RequestEvent {
    RequestEvent::ModelLimited { model: ModelId::new(model), copies }
}

/// Under every policy: under load balancing each of these would be loaded on a GPU of its own.
#[test]
fn a_model_that_has_as_many_copies_as_it_may_have_is_waited_for() {
    for config in [SchedulerConfig::paper(Policy::LoadBalance), o3(25), SchedulerConfig::evict_cost_aware()] {
        let mut rig = Rig::new(config, 3);
        rig.send(at_most(A, 2));
        assert_eq!(rig.ask(1, A), [load(0, A)]);
        rig.loaded(0, A);
        // Waiting would take longer than a load from the third request on.
        for request in 2..20 {
            rig.ask(request, A);
        }
        assert!(rig.engine.copies(ModelId::new(A)) <= 2, "{config:?}");
        assert_eq!(rig.engine.waiting(), 0, "none waits for a GPU that may never be idle: {config:?}");
        assert_eq!(rig.ask(20, B), [load(2, B)], "the third one is free for others");
    }
}

#[test]
fn copies_beyond_a_limit_go_as_soon_as_nothing_runs_on_them() {
    let mut rig = Rig::new(SchedulerConfig::paper(Policy::LoadBalance), 4);
    for gpu in 0..4 {
        assert_eq!(rig.ask(gpu.into(), A), [load(gpu, A)]);
    }
    (0..3).for_each(|gpu| assert_eq!(rig.loaded(gpu, A), [run(gpu, gpu.into(), A)]));
    rig.done(0, 0);
    assert_eq!(rig.send(at_most(A, 1)), [evict(0, A)], "the unused one");
    assert_eq!(rig.evicted(0, A), []);
    assert_eq!(rig.done(1, 1), [evict(1, A)]);
    // The process of a running request is gone: its model is not loaded again beside the last copy, which is still loading.
    let gone = RequestEvent::NotResident { gpu: GpuId::new(2), request: RequestId::new(2) };
    assert_eq!(rig.send(gone), []);
    assert!(rig.is_local(2, 3));
    assert_eq!(rig.loaded(3, A), [run(3, 3, A)]);
    assert_eq!(rig.done(3, 3), [run(3, 2, A)]);
    assert_eq!(rig.send(at_most(A, 2)), []);
    assert_eq!(rig.ask(5, A), [load(0, A)], "a limit that was raised");
}

#[test]
fn a_copy_for_which_room_is_still_being_made_is_given_up() {
    let mut rig = Rig::new(SchedulerConfig::paper(Policy::LoadBalance), 2);
    assert_eq!(rig.ask(1, A), [load(0, A)]);
    rig.loaded(0, A);
    rig.warm(1, 2, B);
    rig.warm(1, 3, C);
    assert_eq!(rig.ask(4, A), [evict(1, B)]);
    assert_eq!(rig.send(at_most(A, 1)), []);
    assert!(rig.is_local(4, 0));
    assert_eq!(rig.evicted(1, B), [], "no load is ordered");
    assert_eq!(rig.ask(5, C), [run(1, 5, C)]);
    assert_eq!(rig.done(0, 1), [run(0, 4, A)]);
}

#[test]
fn hole_12_a_model_that_fits_no_gpu_is_rejected_and_one_that_fits_some_goes_there() {
    let mut rig = Rig::new(o3(25), 1);
    rig.model(9, 9, 0, 3_000, 1_000);
    assert_eq!(rig.ask(1, 9), [reject(1, RejectReason::ModelTooLarge)]);
    rig.model(9, 9, 1, 3_000, 1_000);
    assert_eq!(rig.ask(2, 9), [], "a kind that was not seen yet may have room");
    rig.join(1, 2, 16);
    assert_eq!(rig.place(2), Some(RequestPlace::Queued), "not profiled on that kind");
    let memory = Bytes::from_gib(16);
    let event =
        RequestEvent::GpuJoined { gpu: GpuId::new(2), kind: GpuKind::new(1), node: NodeId::new(0), memory };
    assert_eq!(rig.send(event), [load(2, 9)]);
    rig.send(RequestEvent::ModelAdded { model: ModelId::new(8), memory: Bytes::from_gib(1) });
    assert_eq!(rig.ask(3, 8), [reject(3, RejectReason::NotProfiled)]);
}

#[test]
fn hole_12_requests_for_a_kind_that_turns_out_too_small_are_rejected() {
    let mut rig = Rig::new(o3(25), 0);
    rig.model(9, 9, 0, 3_000, 1_000);
    assert_eq!(rig.ask(1, 9), []);
    let memory = Bytes::from_gib(8);
    let event =
        RequestEvent::GpuJoined { gpu: GpuId::new(0), kind: GpuKind::new(0), node: NodeId::new(0), memory };
    assert_eq!(rig.send(event), [reject(1, RejectReason::ModelTooLarge)]);
}

#[test]
fn hole_13_victims_are_as_few_as_suffice() {
    let mut rig = Rig::new(o3(25), 1);
    rig.model(A, 1, 0, 3_000, 1_000);
    rig.model(B, 6, 0, 3_000, 1_000);
    rig.model(C, 5, 0, 3_000, 1_000);
    rig.warm(0, 1, A);
    rig.warm(0, 2, B);
    assert_eq!(rig.ask(3, C), [evict(0, B)], "A is least recently used, but B alone suffices");
}

#[test]
fn hole_14_idle_gpus_are_taken_fewest_dispatches_first() {
    let mut rig = Rig::new(o3(25), 2);
    rig.warm(0, 1, A);
    assert_eq!(rig.ask(2, B), [load(1, B)]);
    rig.loaded(1, B);
    rig.done(1, 2);
    assert_eq!(rig.ask(3, B), [run(1, 3, B)]);
    rig.done(1, 3);
    assert_eq!(rig.ask(4, C), [load(0, C)], "GPU 0 was dispatched once, GPU 1 twice");
}

#[test]
fn hole_15_nobody_is_skipped_for_ever_even_when_nothing_is_dispatched() {
    let mut config = o3(1_000_000);
    config.skip_age = ms(5_000);
    let mut rig = Rig::new(config, 1);
    rig.busy(0, 1, B);
    rig.ask(2, A);
    rig.ask(3, B);
    rig.ask(4, B);
    assert_eq!(rig.at(4_999).done(0, 1), [run(0, 3, B)]);
    assert_eq!(rig.at(5_000).done(0, 3), [load(0, A)], "old, so not skipped any more");
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
    assert_eq!(rig.done(0, 2), [run(0, 2_000, B)]);
    assert_eq!(rig.done(0, 2_000), [run(0, 2_001, A)]);
    assert_eq!(rig.done(0, 2_001), [run(0, 2_002, B)]);
}

#[test]
fn hole_17_a_hit_that_is_none_loads_and_does_not_fail() {
    let mut rig = Rig::new(o3(25), 1);
    rig.warm(0, 1, A);
    assert_eq!(rig.ask(2, A), [run(0, 2, A)]);
    let missing = RequestEvent::NotResident { gpu: GpuId::new(0), request: RequestId::new(2) };
    assert_eq!(rig.send(missing), [load(0, A)]);
    assert_eq!(rig.loaded(0, A), [run(0, 2, A)]);
    rig.done(0, 2);
    assert_eq!(rig.engine.stats().completed, 2);
}

#[test]
fn hole_17_stale_state_is_seen_as_a_miss() {
    let mut rig = Rig::new(o3(25), 1);
    rig.warm(0, 1, A);
    rig.warm(0, 2, B);
    let dropped = RequestEvent::Dropped { gpu: GpuId::new(0), model: ModelId::new(B) };
    assert_eq!(rig.send(dropped), [evict(0, B)], "ended for certain before its memory is used again");
    assert_eq!(rig.ask(3, B), [], "a miss, which waits for the room");
    assert_eq!(rig.evicted(0, B), [load(0, B)]);
}

#[test]
fn hole_18_a_lost_gpu_returns_its_requests_in_arrival_order() {
    let mut rig = Rig::new(o3(0), 2);
    rig.busy(0, 1, A);
    rig.busy(1, 2, B);
    rig.ask(4, A);
    rig.ask(5, B);
    assert_eq!(rig.send(RequestEvent::GpuLost { gpu: GpuId::new(0) }), []);
    assert_eq!(rig.engine.copies(ModelId::new(A)), 0, "its models are gone from the index");
    // 1 is before 4 again, although it came back last.
    assert_eq!(rig.done(1, 2), [load(1, A)]);
    assert!(matches!(rig.place(1), Some(RequestPlace::Placed { gpu }) if gpu == GpuId::new(1)));
    assert_eq!(rig.place(4), Some(RequestPlace::Queued));
}

#[test]
fn hole_18_as_many_loads_for_a_request_fail_as_may() {
    let mut rig = Rig::new(o3(25), 1);
    assert_eq!(rig.ask(1, A), [load(0, A)]);
    let failed = RequestEvent::LoadFailed { gpu: GpuId::new(0), model: ModelId::new(A) };
    assert_eq!(rig.send(failed), [load(0, A)]);
    assert_eq!(rig.send(failed), [load(0, A)]);
    assert_eq!(rig.send(failed), [reject(1, RejectReason::LoadsFailed)]);
    assert_eq!(rig.engine.waiting(), 0);
}

#[test]
fn hole_19_observed_times_replace_profiled_ones() {
    let free_after = |learn: bool| {
        let mut config = o3(25);
        config.learn = learn;
        let mut rig = Rig::new(config, 1);
        rig.warm(0, 1, A);
        for request in 2..60 {
            rig.ask(request, A);
            let (gpu, request) = (GpuId::new(0), RequestId::new(request));
            rig.send(RequestEvent::Completed { gpu, request, took: ms(4_000) });
        }
        rig.ask(100, A);
        rig.engine.gpu(GpuId::new(0)).unwrap().free_at
    };
    assert_eq!(free_after(false), Timestamp::from_millis(1_000));
    let learned = free_after(true);
    assert!(learned > Timestamp::from_millis(3_990), "{learned}");
    assert!(learned <= Timestamp::from_millis(4_000), "{learned}");
}

#[test]
fn hole_20_requests_of_one_model_run_together() {
    let mut config = o3(25);
    config.max_batch = 3;
    config.batch_marginal = BasisPoints::from_percent(20).unwrap();
    let mut rig = Rig::new(config, 1);
    rig.busy(0, 1, B);
    for (request, model) in [(2, A), (3, A), (4, B), (5, A), (6, A)] {
        rig.ask(request, model);
    }
    assert_eq!(rig.done(0, 1), [run(0, 4, B)], "alone");
    assert_eq!(rig.done(0, 4), [load(0, A)]);
    let batch = |request, batch_more| Dispatch {
        gpu: GpuId::new(0),
        request: RequestId::new(request),
        model: ModelId::new(A),
        batch_more,
    };
    assert_eq!(rig.loaded(0, A), [batch(2, 2), batch(3, 1), batch(5, 0)]);
    assert_eq!(
        rig.engine.gpu(GpuId::new(0)).unwrap().free_at,
        Timestamp::from_millis(1_400),
        "1 s and twice 20 %"
    );
    assert_eq!([rig.done(0, 2), rig.done(0, 3)], [[], []]);
    assert_eq!(rig.done(0, 5), [batch(6, 0)]);
}

// Beyond the paper.

/// GPU 0 holds A, often asked for, and runs it; GPU 1 is idle and full of B, often asked for, too. Another A arrives.
fn wait_or_evict(config: SchedulerConfig) -> Vec<RequestAction> {
    let mut rig = Rig::new(config, 0);
    rig.model(A, 8, 0, 1_500, 1_000);
    rig.model(B, 8, 0, 1_500, 1_000);
    rig.join(0, 0, 8);
    rig.warm(0, 1, A);
    rig.join(1, 0, 8);
    rig.warm(1, 2, B);
    for request in 10..40 {
        rig.ask(request, B);
        rig.done(1, request);
    }
    rig.ask(3, A);
    rig.ask(4, A);
    rig.ask(5, A)
}

#[test]
fn evict_cost_aware_waits_rather_than_evicting_what_is_needed() {
    assert_eq!(wait_or_evict(o3(25)), [evict(1, B)], "a wait of 2 s is longer than a load of 1.5 s");
    assert_eq!(wait_or_evict(SchedulerConfig::evict_cost_aware()), [], "but B is asked for all the time");
}

#[test]
fn evict_cost_aware_loads_where_least_is_lost() {
    let victim = |config: SchedulerConfig| {
        let mut rig = Rig::new(config, 0);
        rig.model(A, 8, 0, 3_000, 1_000);
        rig.model(B, 8, 0, 3_000, 1_000);
        rig.join(0, 0, 8);
        rig.warm(0, 1, A);
        for request in 10..40 {
            rig.ask(request, A);
            rig.done(0, request);
        }
        rig.join(1, 0, 8);
        for (request, model) in [(50, B), (51, B)] {
            if rig.ask(request, model) == [load(1, B)] {
                rig.loaded(1, B);
            }
            rig.done(1, request);
        }
        // GPU 0 was dispatched more often, so GPU 1 has the turn; make it the other way round.
        for request in 60..100 {
            rig.ask(request, B);
            rig.done(1, request);
        }
        rig.at(600_000).ask(98_000, A);
        rig.done(0, 98_000);
        rig.ask(99_000, C)
    };
    assert_eq!(victim(o3(25)), [evict(0, A)], "fewest dispatches");
    assert_eq!(victim(SchedulerConfig::evict_cost_aware()), [evict(1, B)], "no request asks for B any more");
}

#[test]
fn gdsf_keeps_what_is_used_often() {
    let victim = |cache: CachePolicy| {
        let mut config = o3(25);
        config.cache = cache;
        let mut rig = Rig::new(config, 1);
        rig.warm(0, 1, A);
        for request in 10..15 {
            rig.ask(request, A);
            rig.done(0, request);
        }
        rig.warm(0, 2, B);
        rig.ask(3, C)
    };
    assert_eq!(victim(CachePolicy::Lru), [evict(0, A)]);
    assert_eq!(victim(CachePolicy::Gdsf), [evict(0, B)]);
}

#[test]
fn a_deadline_that_cannot_be_met_rejects() {
    let mut rig = Rig::new(o3(25), 1);
    rig.busy(0, 1, B);
    let ask = |request, deadline| RequestEvent::Arrived {
        request: RequestId::new(request),
        model: ModelId::new(A),
        tenant: TenantId::new(0),
        deadline: Some(Timestamp::from_millis(deadline)),
    };
    assert_eq!(rig.send(ask(2, 900)), [reject(2, RejectReason::DeadlineMissed)], "it takes 1 s");
    assert_eq!(rig.send(ask(3, 5_000)), []);
    let latest = rig.engine.next_deadline().unwrap();
    assert_eq!(latest, Timestamp::from_nanos(4_000_000_001), "at 4 s it could still be started");
    rig.now = latest;
    assert_eq!(rig.send(RequestEvent::DeadlineReached), [reject(3, RejectReason::DeadlineMissed)]);
}

#[test]
fn a_cancelled_request_is_gone_from_wherever_it_waits() {
    let mut rig = Rig::new(o3(25), 2);
    rig.busy(0, 1, A);
    rig.ask(2, A);
    assert!(rig.is_local(2, 0));
    let cancel = |request| RequestEvent::Cancelled { request: RequestId::new(request) };
    assert_eq!(rig.send(cancel(2)), [reject(2, RejectReason::Cancelled)]);
    assert_eq!(rig.done(0, 1), []);
}

#[test]
fn the_second_load_on_a_node_comes_from_its_pinned_memory() {
    let mut config = o3(25);
    config.host_memory = Bytes::from_gib(6);
    let mut rig = Rig::new(config, 2);
    let order = |gpu, model, from, keep_on_host| Load {
        gpu: GpuId::new(gpu),
        model: ModelId::new(model),
        from,
        keep_on_host,
    };
    assert_eq!(rig.ask(1, A), [order(0, A, Tier::Disk, true)]);
    rig.loaded(0, A);
    assert_eq!(
        rig.ask(2, A),
        [order(1, A, Tier::Host, false)],
        "0.3 s + 1 s is less than waiting for 1 s + 1 s"
    );
    rig.loaded(1, A);
    rig.done(0, 1);
    rig.done(1, 2);
    let drop = RequestAction::DropHost { node: NodeId::new(0), model: ModelId::new(A) };
    assert_eq!(rig.ask(3, B), [drop, order(0, B, Tier::Disk, true)], "6 GiB hold one of them");
}

#[test]
fn a_tenant_has_no_more_memory_than_its_share() {
    let mut rig = Rig::new(o3(25), 2);
    let memory = BasisPoints::from_percent(50).unwrap();
    rig.send(RequestEvent::TenantLimited { tenant: TenantId::new(7), memory });
    rig.model(9, 9, 1, 3_000, 1_000);
    assert_eq!(rig.ask_as(7, 9, 9), [reject(9, RejectReason::TenantMemory)], "9 of 8 GiB");
    for (request, model, gpu) in [(1, A, 0), (2, B, 1)] {
        assert_eq!(rig.ask_as(7, request, model), [load(gpu, model)]);
        rig.loaded(gpu, model);
        rig.done(gpu, request);
    }
    // Both GPUs have 4 GiB free, but 8 GiB are all it may take: it gives up its oldest model, on another GPU if need be.
    assert_eq!(rig.ask_as(7, 3, C), [evict(0, A), load(0, C)]);
    assert_eq!(rig.ask_as(8, 4, A), [load(1, A)], "others are not held");
}

// Bad input.

#[test]
fn bad_input_is_refused_with_a_typed_error_and_changes_nothing() {
    let mut rig = Rig::new(o3(25), 1);
    rig.at(1_000).busy(0, 1, A);
    rig.ask(2, B);
    let arrived = |request, model| RequestEvent::Arrived {
        request: RequestId::new(request),
        model: ModelId::new(model),
        tenant: TenantId::new(0),
        deadline: None,
    };
    let (gpu, took) = (GpuId::new(0), ms(1));
    let completed = |request| RequestEvent::Completed { gpu, request: RequestId::new(request), took };
    let profile = ModelProfile { load_disk: ms(1), load_host: ms(1), infer: Duration::ZERO };
    let (request, model, kind) = (RequestId::new, ModelId::new, GpuKind::new(0));
    let now = rig.now;
    let late = Timestamp::from_millis(999);
    let cases = [
        (now, arrived(1, A), RequestError::DuplicateRequest { request: request(1) }),
        (now, arrived(2, A), RequestError::DuplicateRequest { request: request(2) }),
        (now, arrived(3, 77), RequestError::UnknownModel { model: model(77) }),
        (now, completed(2), RequestError::NotRunning { request: request(2), gpu }),
        (now, completed(99), RequestError::UnknownRequest { request: request(99) }),
        (late, arrived(3, A), TimeWentBack { now: late, last: now }.into()),
        (now, RequestEvent::GpuLost { gpu: GpuId::new(5) }, RequestError::UnknownGpu { gpu: GpuId::new(5) }),
        (
            now,
            RequestEvent::GpuJoined { gpu, kind, node: NodeId::new(0), memory: Bytes::from_gib(8) },
            RequestError::GpuExists { gpu },
        ),
        (
            now,
            RequestEvent::GpuJoined { gpu: GpuId::new(1), kind, node: NodeId::new(0), memory: Bytes(5) },
            RequestError::KindDiffers {
                gpu: GpuId::new(1),
                kind,
                memory: Bytes(5),
                expected: Bytes::from_gib(8),
            },
        ),
        (
            now,
            RequestEvent::GpuJoined {
                gpu: GpuId::new(1),
                kind: GpuKind::new(63),
                node: NodeId::new(0),
                memory: Bytes(5),
            },
            RequestError::OutOfRange { field: "kind", value: 63, limit: 63 },
        ),
        (
            now,
            RequestEvent::ModelAdded { model: model(A), memory: Bytes(1) },
            RequestError::BadModelMemory { model: model(A), memory: Bytes(1) },
        ),
        (
            now,
            RequestEvent::ModelProfiled { model: model(A), kind, profile },
            RequestError::BadProfile { model: model(A), kind },
        ),
        (now, at_most(A, 0), RequestError::NoCopies { model: model(A) }),
        (now, at_most(77, 1), RequestError::UnknownModel { model: model(77) }),
        (
            now,
            RequestEvent::Loaded { gpu, model: model(A), took },
            RequestError::NotOrdered { gpu, what: "load", model: model(A) },
        ),
        (
            now,
            RequestEvent::Evicted { gpu, model: model(A) },
            RequestError::NotOrdered { gpu, what: "evict", model: model(A) },
        ),
        (
            now,
            RequestEvent::Cancelled { request: request(1) },
            RequestError::AlreadyPlaced { request: request(1) },
        ),
    ];
    for (now, event, expected) in cases {
        let before = format!("{:?}", rig.engine);
        let mut actions = Vec::new();
        assert_eq!(rig.engine.handle(now, event, &mut actions), Err(expected), "{event:?}");
        assert_eq!(actions, []);
        assert_eq!(format!("{:?}", rig.engine), before, "{event:?} changed something");
    }
}

#[test]
fn a_configuration_out_of_bounds_is_refused_by_name() {
    let mut config = o3(25);
    config.max_batch = 0;
    let error = LocalityScheduler::new(config).unwrap_err();
    assert_eq!(error.to_string(), "max_batch is 0: need 1 to 1024");
}
