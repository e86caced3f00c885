//! The plain queue of each function, against a book of the rules that it states.

use gshare_bench::first_come::FirstCome;
use gshare_core::{Duration, Engine, FunctionId, InstanceId, RequestId, SharedSlice, Timestamp};
use gshare_sched::pipeline::{
    InstanceKeeper, Keeper, KeeperConfig, Node, PartitionConfig, Partitioner, RouteAction, RouteEvent,
    Router, Service,
};
use gshare_sim::Rng;
use gshare_sim::conformance::router_and_keeper;
use std::collections::BTreeMap;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[derive(Debug, Clone)]
struct Up {
    function: FunctionId,
    service: Service,
    has: Vec<RequestId>,
    draining: bool,
}

/// Requests in the order of their names, equal to the order of arrival, and instances.
#[derive(Debug, Default)]
struct Book {
    waiting: BTreeMap<RequestId, FunctionId>,
    running: BTreeMap<RequestId, FunctionId>,
    ups: BTreeMap<InstanceId, Up>,
}

impl Book {
    fn on_slice(&self, at: SharedSlice) -> impl Iterator<Item = &Up> {
        let shares = move |up: &&Up| matches!(up.service, Service::Shared { slice, .. } if slice == at);
        self.ups.values().filter(shares)
    }

    fn has_room(&self, up: &Up) -> bool {
        match up.service {
            Service::Exclusive { capacity, .. } => !up.draining && up.has.len() < capacity as usize,
            Service::Shared { slice, .. } => {
                !up.draining && self.on_slice(slice).all(|other| other.has.is_empty())
            }
            _ => false,
        }
    }

    fn first(&self, functions: &[FunctionId]) -> Option<RequestId> {
        self.waiting.iter().find(|(_, function)| functions.contains(function)).map(|(id, _)| *id)
    }

    fn dispatched(&mut self, request: RequestId, instance: InstanceId) {
        let up = &self.ups[&instance];
        assert!(self.has_room(up), "{request} to {instance}, which has no room");
        let functions: Vec<FunctionId> = match up.service {
            Service::Shared { slice, .. } => {
                self.on_slice(slice).filter(|up| !up.draining).map(|up| up.function).collect()
            }
            _ => vec![up.function],
        };
        assert_eq!(self.first(&functions), Some(request), "another came first");
        if let Service::Exclusive { latency, .. } = up.service {
            let better = self.ups.iter().find(|(_, other)| match other.service {
                Service::Exclusive { latency: its, .. } if other.function == up.function => {
                    self.has_room(other) && (other.has.len(), its) < (up.has.len(), latency)
                }
                _ => false,
            });
            assert!(better.is_none(), "{request} to {instance}: {better:?} has fewer");
        }
        let function = self.waiting.remove(&request).unwrap();
        self.running.insert(request, function);
        self.ups.get_mut(&instance).unwrap().has.push(request);
    }

    fn event(&mut self, event: RouteEvent) {
        match event {
            RouteEvent::InstanceUp { instance, function, service } => {
                self.ups.insert(instance, Up { function, service, has: Vec::new(), draining: false });
            }
            RouteEvent::ServiceChanged { instance, service } => {
                self.ups.get_mut(&instance).unwrap().service = service;
            }
            RouteEvent::InstanceDraining { instance } => self.ups.get_mut(&instance).unwrap().draining = true,
            RouteEvent::InstanceDown { instance } => {
                for request in self.ups.remove(&instance).unwrap().has {
                    let state = self.running.remove(&request).unwrap();
                    self.waiting.insert(request, state);
                }
            }
            RouteEvent::Arrived { request, function, .. } => {
                self.waiting.insert(request, function);
            }
            RouteEvent::Completed { request, instance } => {
                self.running.remove(&request);
                self.ups.get_mut(&instance).unwrap().has.retain(|one| *one != request);
            }
            RouteEvent::Cancelled { request } => {
                self.waiting.remove(&request);
            }
            _ => {}
        }
    }
}

fn service(rng: &mut Rng) -> Service {
    let latency = ms(rng.between(1, 50));
    if rng.percent(50) {
        let capacity = u32::try_from(rng.between(1, 3)).unwrap();
        return Service::Exclusive { latency, interval: latency, capacity };
    }
    Service::Shared {
        slice: SharedSlice::new(u32::try_from(rng.below(3)).unwrap()),
        latency,
        load: ms(rng.below(20)),
    }
}

fn event(rng: &mut Rng, book: &Book, now: Timestamp, next: u64) -> Option<RouteEvent> {
    let ups: Vec<InstanceId> = book.ups.iter().filter(|(_, up)| !up.draining).map(|(id, _)| *id).collect();
    let function = FunctionId::new(u32::try_from(rng.below(3)).unwrap());
    Some(match rng.below(20) {
        0 | 1 => RouteEvent::InstanceUp { instance: InstanceId::new(next), function, service: service(rng) },
        2 => RouteEvent::InstanceDown { instance: *rng.pick(&book.ups.keys().copied().collect::<Vec<_>>())? },
        3 => RouteEvent::InstanceDraining { instance: *rng.pick(&ups)? },
        4 => RouteEvent::ServiceChanged { instance: *rng.pick(&ups)?, service: service(rng) },
        5 => RouteEvent::Cancelled { request: *rng.pick(&book.waiting.keys().copied().collect::<Vec<_>>())? },
        6 => RouteEvent::DeadlineReached,
        7..13 => {
            let deadline = rng.percent(70).then(|| now + ms(rng.below(200)));
            RouteEvent::Arrived { request: RequestId::new(next), function, deadline }
        }
        _ => {
            let pairs: Vec<_> = book
                .ups
                .iter()
                .flat_map(|(&instance, up)| up.has.iter().map(move |&request| (request, instance)))
                .collect();
            let &(request, instance) = rng.pick(&pairs)?;
            RouteEvent::Completed { request, instance }
        }
    })
}

#[test]
fn the_request_that_came_first_goes_first_and_none_waits_beside_room() {
    let (mut dispatched, mut short) = (0, 0);
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let mut router = FirstCome::default();
        let (mut book, mut now, mut actions) = (Book::default(), Timestamp::ZERO, Vec::new());
        for next in 0..300 {
            now = now + ms(rng.below(15));
            let Some(event) = event(&mut rng, &book, now, next) else { continue };
            let was_empty = |id| book.ups[&id].has.is_empty();
            let drained = match event {
                RouteEvent::InstanceDraining { instance } => was_empty(instance).then_some(instance),
                RouteEvent::Completed { instance, .. } => {
                    let up = &book.ups[&instance];
                    (up.draining && up.has.len() == 1).then_some(instance)
                }
                _ => None,
            };
            actions.clear();
            router.handle(now, event, &mut actions).unwrap_or_else(|error| panic!("{event:?}: {error}"));
            book.event(event);
            let mut told_drained = None;
            for &action in &actions {
                match action {
                    RouteAction::Dispatch { request, instance } => {
                        book.dispatched(request, instance);
                        dispatched += 1;
                    }
                    RouteAction::Reject { request, .. } => panic!("{request} was given up"),
                    RouteAction::Short { function, waiting, .. } => {
                        assert!(waiting > 0, "{function} is short of nothing");
                        short += 1;
                    }
                    RouteAction::Drained { instance } => told_drained = Some(instance),
                }
            }
            assert_eq!(told_drained, drained, "seed {seed}, {event:?}");
            for up in book.ups.values().filter(|up| book.has_room(up)) {
                assert_eq!(book.first(&[up.function]), None, "seed {seed}, {event:?}: waits beside {up:?}");
            }
            for (id, up) in &book.ups {
                assert_eq!(router.outstanding(*id), up.has.len());
            }
        }
    }
    assert!(dispatched > 5_000 && short > 100, "{dispatched}, {short}");
}

#[test]
fn it_conforms() {
    let ours = |node: &Node| -> Box<dyn InstanceKeeper> {
        let partitioner = Partitioner::new(PartitionConfig::default()).unwrap();
        let keeper = Keeper::new(KeeperConfig::default(), node, partitioner);
        Box::new(keeper.unwrap())
    };
    router_and_keeper(|| -> Box<dyn Router> { Box::new(FirstCome::default()) }, ours, 0..6).unwrap();
}
