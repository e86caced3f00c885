//! The plain queue of each function, under the platform's pool of slices.

use gshare_bench::first_come::FirstCome;
use gshare_core::{Bytes, Duration, FunctionId, GpuId, InstanceId, NodeId, RequestId, Timestamp};
use gshare_sched::pipeline::{
    AssignedSlice, Change, KeeperConfig, Offer, Offers, Partitioner, Place, Route, Service,
};
use gshare_sched::platform::{DeviceSpec, MigLayout};
use gshare_sim::conformance::slices;
use std::sync::Arc;

const NOW: Timestamp = Timestamp::ZERO;

fn slice() -> AssignedSlice {
    let layout = MigLayout::named("A100-80", &["2g.20gb"]).unwrap();
    let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(80)).with_mig(layout);
    let slice = spec.mig.unwrap().slices()[0];
    AssignedSlice { gpu: GpuId::new(0), slice }
}

/// Function 0 has an instance of its own, functions 1 and 2 share a slice.
fn offers() -> Offers {
    let (ms, mut offers) = (Duration::from_millis, Offers::default());
    let alone = Service::Exclusive { latency: ms(10), interval: ms(10), capacity: 2 };
    let shared = Service::Shared { slice: slice(), latency: ms(10), load: Duration::ZERO };
    for (number, service) in [(0, alone), (1, shared), (2, shared)] {
        let function = FunctionId::new(number);
        offers.offer(InstanceId::new(number.into()), Offer { function, service });
    }
    offers
}

fn waits(router: &mut FirstCome, offers: &Offers, request: u64, function: u32, due: Option<u64>) {
    let (request, function) = (RequestId::new(request), FunctionId::new(function));
    let due = due.map(Timestamp::from_millis);
    router.note(NOW, offers, Change::Waits { request, function, due });
}

#[test]
fn the_request_that_came_first_goes_first_whatever_its_deadline() {
    let (mut router, offers) = (FirstCome::default(), offers());
    for (request, function, due) in [(5, 2, 100), (6, 1, 20), (7, 0, 90), (8, 0, 30)] {
        waits(&mut router, &offers, request, function, Some(due));
    }
    assert_eq!(router.next(NOW, &offers, InstanceId::new(0)), Some(RequestId::new(7)));
    assert_eq!(router.next_on(NOW, &offers, slice()), Some((InstanceId::new(2), RequestId::new(5))));
    // It waits again after its instance was lost, in its old place.
    waits(&mut router, &offers, 3, 1, None);
    assert_eq!(router.next_on(NOW, &offers, slice()), Some((InstanceId::new(1), RequestId::new(3))));
    let (request, function) = (RequestId::new(7), FunctionId::new(0));
    router.note(NOW, &offers, Change::Left { request, function, due: None, to: None });
    assert_eq!(router.next(NOW, &offers, InstanceId::new(0)), Some(RequestId::new(8)));
}

#[test]
fn a_function_is_short_if_its_last_request_would_be_late() {
    let (mut router, offers) = (FirstCome::default(), offers());
    let short = |router: &FirstCome, function| router.is_short(NOW, &offers, FunctionId::new(function));
    waits(&mut router, &offers, 1, 0, Some(20));
    assert!(!short(&router, 0), "10 ms for the request before it, and 10 for its own");
    waits(&mut router, &offers, 2, 0, Some(20));
    assert!(short(&router, 0));
    waits(&mut router, &offers, 3, 0, None);
    assert!(!short(&router, 0), "the last request has no deadline");
    waits(&mut router, &offers, 4, 9, None);
    assert!(short(&router, 9) && !short(&router, 1), "no instance, and no request");
}

#[test]
fn it_conforms() {
    let place: Arc<dyn Place> = Arc::new(Partitioner);
    let router = || -> Box<dyn Route> { Box::new(FirstCome::default()) };
    slices(router, &place, &KeeperConfig::default(), 0..6).unwrap();
}
