//! The public suites of `gshare-sim` over the engines of this crate, and over one engine of each kind that is broken on
//! purpose: the suite names the claim.

use gshare_core::dag::Dag;
use gshare_core::{
    Bytes, ClientId, FunctionId, GpuId, InstanceId, PlacementId, QuotaRange, RequestId, ServiceClass,
    Timestamp,
};
use gshare_sched::pack::{
    Demand, GpuSpec, GpuStatus, MaxRects, MaxRectsConfig, PackError, Packer, Placed, Placement,
};
use gshare_sched::pipeline::{
    AssignedSlice, Change, Goal, Home, KeeperConfig, Node, NodeGpu, Offers, Partitioner, Place, Route,
    RouterConfig, SlackRouter,
};
use gshare_sched::place::{DiluConfig, DiluPacker};
use gshare_sched::platform::{Choice, Locality, WholeConfig, WholeDevices, WholePolicy};
use gshare_sched::scale::{
    ClientScale, DiluVertical, Fleet, GpuScale, HeuristicHorizontal, HeuristicHorizontalConfig,
    HorizontalOrder, HorizontalScaler, Iteration, LazyHorizontal, LazyHorizontalConfig, LoadReport,
    VerticalError, VerticalScaler,
};
use gshare_sim::Story;
use gshare_sim::conformance::{Shares, horizontal_scaler, packer, slices, vertical_scaler, whole_policy};
use gshare_sim::scenario::LoadBalance;
use std::sync::Arc;

/// The claim that the suite found broken.
fn broken(result: Result<(), Story>) -> &'static str {
    let story = result.expect_err("an engine that is broken on purpose passed");
    assert!(!story.events.is_empty() && !story.at.is_empty(), "a story has events and a time: {story}");
    story.claim
}

#[test]
fn packers_conform() {
    let area_fit = MaxRectsConfig::default();
    for config in [area_fit, area_fit.with_rearrange_gpus(0)] {
        packer(&|| Box::new(MaxRects::new(config)), Shares::Rectangles, 0..20).unwrap();
    }
    let dilu = || DiluPacker::new(DiluConfig::default()).expect("the defaults are valid");
    packer(&|| Box::new(dilu()), Shares::Sums, 0..40).unwrap();
}

/// Passes everything on except the filtered actions.
struct IgnoresTheFilter(MaxRects);

impl Packer for IgnoresTheFilter {
    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError> {
        self.0.add_gpu(gpu, spec)
    }
    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        self.0.remove_gpu(gpu)
    }
    fn place_where(&mut self, demand: &Demand, _: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        self.0.place(demand)
    }
    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        self.0.release(id)
    }
    fn set_aside(&mut self, gpu: GpuId, memory: Bytes) -> Result<(), PackError> {
        self.0.set_aside(gpu, memory)
    }
    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        self.0.placements(visit);
    }
    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        self.0.gpus(visit);
    }
}

#[test]
fn a_packer_that_ignores_the_filter_is_found_out() {
    let make = || IgnoresTheFilter(MaxRects::new(MaxRectsConfig::default()));
    let claim = broken(packer(&|| Box::new(make()), Shares::Rectangles, 0..20));
    let claims = [
        "a demand goes to a GPU that the filter accepts",
        // A filter places a gang, too.
        "members of a gang are on GPUs of their own",
    ];
    assert!(claims.contains(&claim), "{claim}");
}

/// The same rules for sums do not hold for rectangles.
#[test]
fn a_packer_of_sums_does_not_pass_for_one_of_rectangles() {
    let dilu = || DiluPacker::new(DiluConfig::default()).expect("the defaults are valid");
    let claim = broken(packer(&|| Box::new(dilu()), Shares::Rectangles, 0..20));
    assert_eq!(claim, "by rectangles: no two rectangles of a GPU overlap");
}

fn lazy() -> Box<dyn HorizontalScaler> {
    Box::new(LazyHorizontal::new(LazyHorizontalConfig::default()).expect("the defaults are valid"))
}

#[test]
fn scalers_of_instances_conform() {
    horizontal_scaler(&lazy, 0..20).unwrap();
    let heuristic = || HeuristicHorizontal::new(HeuristicHorizontalConfig::default());
    horizontal_scaler(&|| Box::new(heuristic().expect("the defaults are valid")), 0..20).unwrap();
}

/// A lazy scaler whose orders are tampered with.
struct Tampered<F>(LazyHorizontal, F);

impl<F: FnMut(&Fleet, &mut Vec<HorizontalOrder>) + Send> HorizontalScaler for Tampered<F> {
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>) {
        self.0.decide(report, orders);
        (self.1)(report.fleet, orders);
    }

    fn forget(&mut self, function: FunctionId) {
        self.0.forget(function);
    }
}

#[test]
fn a_scaler_that_breaks_a_claim_is_found_out() {
    type Tamper = fn(&Fleet, &mut Vec<HorizontalOrder>);
    let cases: [(&str, Tamper); 5] = [
        ("load that no instance can serve is reported", |_, orders| {
            orders.retain(|order| !matches!(order, HorizontalOrder::Unmet(_)));
        }),
        ("instances are never more than the maximum", |fleet, orders| {
            orders.extend(fleet.startable(Timestamp::ZERO).map(|(point, _)| HorizontalOrder::Start(point)));
        }),
        ("a decision leaves no fewer than the minimum", |fleet, orders| {
            orders.extend(fleet.youngest().map(|(instance, _)| HorizontalOrder::Remove(instance)));
        }),
        ("what is taken away is there", |_, orders| orders.extend(orders.clone())),
        (
            "an instance starts at a point that keeps the SLO, and that was not refused just now",
            |_, orders| {
                for order in orders {
                    if let HorizontalOrder::Start(point) = order {
                        *point = 1 - *point;
                    }
                }
            },
        ),
    ];
    for (claim, tamper) in cases {
        let lazy = || LazyHorizontal::new(LazyHorizontalConfig::default()).unwrap();
        assert_eq!(broken(horizontal_scaler(&|| Box::new(Tampered(lazy(), tamper)), 0..20)), claim);
    }
}

#[test]
fn the_scaler_of_tokens_conforms() {
    vertical_scaler(&|| Box::new(DiluVertical::default()), 0..30).unwrap();
}

/// Issues more tokens than a GPU has.
#[derive(Default)]
struct Generous(DiluVertical);

impl VerticalScaler for Generous {
    fn join(
        &mut self,
        now: Timestamp,
        client: ClientId,
        gpu: GpuId,
        quota: QuotaRange,
        class: ServiceClass,
    ) -> Result<(), VerticalError> {
        self.0.join(now, client, gpu, quota, class)
    }

    fn set_quota(
        &mut self,
        now: Timestamp,
        client: ClientId,
        quota: QuotaRange,
    ) -> Result<(), VerticalError> {
        self.0.set_quota(now, client, quota)
    }

    fn leave(&mut self, now: Timestamp, client: ClientId) {
        self.0.leave(now, client);
    }

    fn used(&mut self, now: Timestamp, client: ClientId, tokens: u64) {
        self.0.used(now, client, tokens);
    }

    fn iterated(
        &mut self,
        now: Timestamp,
        client: ClientId,
        iteration: Iteration,
    ) -> Result<(), VerticalError> {
        self.0.iterated(now, client, iteration)
    }

    fn catch_up(&mut self, now: Timestamp) {
        self.0.catch_up(now);
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.0.next_deadline()
    }

    fn gpu(&self, gpu: GpuId) -> Option<GpuScale> {
        let gpu = self.0.gpu(gpu)?;
        Some(GpuScale { issued_tokens: gpu.issued_tokens * 40, ..gpu })
    }

    fn client(&self, client: ClientId) -> Option<ClientScale> {
        let client = self.0.client(client)?;
        Some(ClientScale { issued_tokens: client.issued_tokens * 40, ..client })
    }
}

#[test]
fn a_scaler_that_issues_more_than_the_gpu_has_is_found_out() {
    let claim = broken(vertical_scaler(&|| Box::new(Generous::default()), 0..5));
    assert_eq!(claim, "the tokens issued on a GPU add up to at most its `MaxTokens`");
}

/// Loads each model on the device at hand, and evicts any other model for it.
struct Greedy(&'static str);

impl WholePolicy for Greedy {
    fn choose(&mut self, devices: &WholeDevices, function: FunctionId, gpu: GpuId) -> Choice {
        match self.0 {
            "loads" => devices.room(function, gpu, &|_| (0, 0)).map_or(Choice::Wait, Choice::Load),
            "waits" => Choice::Wait,
            _ => Choice::Run(gpu),
        }
    }
}

#[test]
fn policies_of_whole_devices_conform() {
    for config in [WholeConfig::paper(0), WholeConfig::paper(25), WholeConfig::default()] {
        whole_policy(&|| Box::new(Locality::new(&config)), 0..15).unwrap_or_else(|story| panic!("{story}"));
    }
    whole_policy(&|| Box::new(LoadBalance), 0..15).unwrap_or_else(|story| panic!("{story}"));
    whole_policy(&|| Box::new(Greedy("loads")), 0..15).unwrap_or_else(|story| panic!("{story}"));
}

#[test]
fn a_policy_of_whole_devices_that_breaks_its_contract_is_found_out() {
    let story = whole_policy(&|| Box::new(Greedy("runs")), 0..15).unwrap_err();
    assert!(story.to_string().contains("which cannot be"), "{story}");
    let claim = broken(whole_policy(&|| Box::new(Greedy("waits")), 0..15).map(drop));
    assert_eq!(claim, "without faults no request waits for as long as it may");
}

fn slack(config: RouterConfig) -> Box<dyn Route> {
    Box::new(SlackRouter::new(config))
}

#[test]
fn policies_of_slices_conform() {
    let (ours, paper) = (KeeperConfig::default(), KeeperConfig::paper());
    let place: Arc<dyn Place> = Arc::new(Partitioner);
    let mut sum = slices(|| slack(RouterConfig::default()), &place, &ours, 0..12).unwrap();
    sum.add(&slices(|| slack(RouterConfig::paper()), &place, &paper, 0..12).unwrap());
    // The runs tried every kind of order.
    let count = |name: &str| sum.actions.get(name).copied().unwrap_or(0);
    let answered: u64 = sum.functions.iter().map(|one| one.answered).sum();
    assert!(answered > 4_000 && sum.faults.len() == 5, "{answered} {:?}", sum.faults);
    let tried = ["park", "unpark", "drain", "stop"].map(count);
    assert!(tried.iter().all(|&count| count > 30), "{tried:?}");
}

/// Gives its last answer again.
#[derive(Default)]
struct Twice(SlackRouter, Option<RequestId>);

impl Route for Twice {
    fn note(&mut self, now: Timestamp, offers: &Offers, change: Change) {
        self.0.note(now, offers, change);
    }

    fn next(&mut self, now: Timestamp, offers: &Offers, instance: InstanceId) -> Option<RequestId> {
        let next = self.0.next(now, offers, instance);
        self.1.take().or_else(|| {
            self.1 = next;
            next
        })
    }

    fn next_on(
        &mut self,
        now: Timestamp,
        offers: &Offers,
        slice: AssignedSlice,
    ) -> Option<(InstanceId, RequestId)> {
        let (instance, next) = self.0.next_on(now, offers, slice)?;
        Some((instance, self.1.replace(next).unwrap_or(next)))
    }

    fn is_short(&self, now: Timestamp, offers: &Offers, function: FunctionId) -> bool {
        self.0.is_short(now, offers, function)
    }

    fn waiting(&self, function: FunctionId) -> usize {
        self.0.waiting(function)
    }
}

/// Knows no request.
struct Silent(SlackRouter);

impl Route for Silent {
    fn note(&mut self, now: Timestamp, offers: &Offers, change: Change) {
        self.0.note(now, offers, change);
    }

    fn next(&mut self, _: Timestamp, _: &Offers, _: InstanceId) -> Option<RequestId> {
        None
    }

    fn next_on(&mut self, _: Timestamp, _: &Offers, _: AssignedSlice) -> Option<(InstanceId, RequestId)> {
        None
    }

    fn is_short(&self, now: Timestamp, offers: &Offers, function: FunctionId) -> bool {
        self.0.is_short(now, offers, function)
    }

    fn waiting(&self, function: FunctionId) -> usize {
        self.0.waiting(function)
    }
}

/// Gives the first slice of a node, whether it is free or not.
struct Anywhere(Arc<dyn Place>);

impl Place for Anywhere {
    fn find(&self, function: FunctionId, dag: &Dag, goal: &Goal, node: &Node, cut: bool) -> Option<Home> {
        let all = |gpu: &NodeGpu| gpu.free.iter().chain(&gpu.busy).copied().collect();
        let gpus = node.gpus().iter().map(|gpu| NodeGpu { gpu: gpu.gpu, free: all(gpu), busy: Vec::new() });
        self.0.find(function, dag, goal, &Node::new(node.model().clone(), gpus.collect()).ok()?, cut)
    }
}

#[test]
fn policies_of_slices_that_break_a_promise_are_found_out() {
    let promise = "every order can be carried out, no device is oversold, and each request ends once";
    let (ours, best): (_, Arc<dyn Place>) = (KeeperConfig::default(), Arc::new(Partitioner));
    let claim = broken(slices(|| Box::new(Twice::default()), &best, &ours, 0..5).map(drop));
    assert_eq!(claim, promise, "a request is given twice");
    let silent = || -> Box<dyn Route> { Box::new(Silent(SlackRouter::default())) };
    let claim = broken(slices(silent, &best, &ours, 0..20).map(drop));
    assert!([promise, "without faults no request waits for as long as it may"].contains(&claim), "{claim}");
    let anywhere: Arc<dyn Place> = Arc::new(Anywhere(best));
    let claim = broken(slices(|| slack(RouterConfig::default()), &anywhere, &ours, 0..20).map(drop));
    assert_eq!(claim, promise, "a slice is given twice");
}
