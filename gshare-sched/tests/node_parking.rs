//! Parking as the node sees it: who may, how much, and no token before the memory is back.

use crate::support::{Bench, spec};
use gshare_core::reason::Obstacle;
use gshare_core::wire::{Residence, ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, ConnId, Duration, UseState};
use gshare_sched::node::{NodeConfig, NodeEvent, Note, ParkRefusal};
use proptest::prelude::*;

type Client = (ConnId, ClientId);

const GIB: u64 = 1 << 30;

fn says(
    bench: &mut Bench,
    (conn, client): Client,
    residence: Residence,
    gib: u64,
    obstacle: Option<Obstacle>,
) {
    bench.say(conn, ToDaemon::Parking { client, residence, bytes: Bytes(gib * GIB), obstacle });
}

fn asks(bench: &mut Bench, name: &str, uid: u32, on: bool) -> Result<usize, ParkRefusal> {
    let answer = bench.node.can_park(name, uid, on).map(|clients| clients.len());
    bench.tell(NodeEvent::ParkAsked { name: name.to_owned(), uid, on, holds: false });
    answer
}

/// The orders to a client so far.
fn orders(bench: &Bench, (_, id): Client) -> Vec<u8> {
    let order = |(_, frame): &(ConnId, ToClient)| match *frame {
        ToClient::Park { client, on } if client == id => Some(on),
        _ => None,
    };
    bench.sent.iter().filter_map(order).collect()
}

fn tokens(bench: &Bench, (_, id): Client) -> usize {
    let now = bench.now;
    let allows = |(_, frame): &&(ConnId, ToClient)| matches!(frame, ToClient::Allow { client, until, .. } if *client == id && *until > now);
    bench.sent.iter().filter(allows).count()
}

fn parking_of(bench: &Bench, (_, id): Client) -> gshare_sched::node::Parking {
    bench.node.client(bench.now, id).unwrap().parking.unwrap()
}

#[test]
fn a_parked_client_gets_its_token_when_its_memory_is_back_and_others_get_theirs_meanwhile() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0.4:1", 100));
    let b = bench.start(1, "b", spec("0.4:1", 100));
    says(&mut bench, a, Residence::Resident, 4, None);
    assert_eq!(asks(&mut bench, "a", 1000, true), Ok(1));
    assert_eq!(orders(&bench, a), [1]);
    bench.ask(a.0, a.1);
    bench.ask(b.0, b.1);
    assert_eq!((tokens(&bench, a), tokens(&bench, b)), (0, 1), "its memory is about to leave");
    says(&mut bench, a, Residence::Parking, 4, None);
    says(&mut bench, a, Residence::Missed, 4, None);
    assert_eq!(orders(&bench, a), [1, 0], "a launch asks for the memory");
    bench.say(b.0, ToDaemon::use_of_time(b.1, 1, Duration::from_millis(1), UseState::Idle));
    says(&mut bench, a, Residence::Returning, 4, None);
    bench.pass(Duration::from_millis(500));
    assert_eq!(tokens(&bench, a), 0);
    says(&mut bench, a, Residence::Resident, 4, None);
    assert_eq!(tokens(&bench, a), 1, "it has waited all the time");
}

#[test]
fn a_held_client_stays_in_host_memory_until_it_is_asked_back() {
    let mut bench = Bench::new(NodeConfig::default());
    let [a, b] = [0, 1].map(|slot| bench.start(slot, ["a", "b"][slot as usize], spec("0.4:1", 100)));
    let hold = |bench: &mut Bench, name: &str| {
        bench.tell(NodeEvent::ParkAsked { name: name.to_owned(), uid: 1000, on: true, holds: true });
    };
    says(&mut bench, a, Residence::Resident, 4, None);
    says(&mut bench, b, Residence::Resident, 4, None);
    hold(&mut bench, "a");
    says(&mut bench, a, Residence::Missed, 4, None);
    bench.pass(Duration::from_millis(10_000));
    assert_eq!(orders(&bench, a), [1], "missed, and held");
    assert_eq!(asks(&mut bench, "a", 1000, false), Ok(1));
    assert_eq!(orders(&bench, a), [1, 0]);
    // The memory of the other client has left by another order before.
    assert_eq!(asks(&mut bench, "b", 1000, true), Ok(1));
    says(&mut bench, b, Residence::Parked, 4, None);
    hold(&mut bench, "b");
    says(&mut bench, b, Residence::Missed, 4, None);
    assert_eq!(orders(&bench, b), [1]);
    // A later order without a hold changes nothing; the next return ends the hold.
    assert_eq!(asks(&mut bench, "b", 1000, false), Ok(1));
    says(&mut bench, b, Residence::Resident, 4, None);
    assert_eq!(asks(&mut bench, "b", 1000, true), Ok(1));
    says(&mut bench, b, Residence::Missed, 4, None);
    assert_eq!(orders(&bench, b), [1, 0, 1, 0]);
}

#[test]
fn a_held_instance_leaves_its_time_to_others_and_comes_back_where_it_can_be_met() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0.8", 100));
    says(&mut bench, a, Residence::Resident, 4, None);
    let hold = |bench: &mut Bench| {
        bench.tell(NodeEvent::ParkAsked { name: "a".to_owned(), uid: 1000, on: true, holds: true });
    };
    let request = |bench: &Bench, name: &str| {
        bench
            .node
            .tenants()
            .find(|tenant| tenant.name == name)
            .map(|tenant| tenant.status.share.quota.request().get())
    };
    hold(&mut bench);
    assert_eq!(request(&bench, "a"), Some(8_000), "its memory is on its way");
    says(&mut bench, a, Residence::Parked, 4, None);
    assert_eq!(request(&bench, "a"), Some(0));
    let b = bench.start(1, "b", spec("0.4", 100));
    let error = asks(&mut bench, "a", 1000, false).unwrap_err().to_string();
    assert!(error.contains("`a` does not come back: request 80% does not fit: 40% taken"), "{error}");
    assert_eq!(orders(&bench, a), [1]);
    bench.tell(NodeEvent::Closed { conn: b.0 });
    assert_eq!(asks(&mut bench, "a", 1000, false), Ok(1));
    assert_eq!((request(&bench, "a"), orders(&bench, a)), (Some(8_000), vec![1, 0]));
    // It misses its memory, which is back without a further order.
    says(&mut bench, a, Residence::Missed, 4, None);
    says(&mut bench, a, Residence::Resident, 4, None);
    assert_eq!(request(&bench, "a"), Some(8_000));
}

#[test]
fn a_client_on_its_way_back_is_held_by_another_order() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0.8", 100));
    says(&mut bench, a, Residence::Resident, 4, None);
    assert_eq!(asks(&mut bench, "a", 1000, true), Ok(1));
    says(&mut bench, a, Residence::Missed, 4, None);
    assert_eq!(orders(&bench, a), [1, 0], "it may come back");
    bench.tell(NodeEvent::ParkAsked { name: "a".to_owned(), uid: 1000, on: true, holds: true });
    assert_eq!(orders(&bench, a), [1, 0, 1]);
    says(&mut bench, a, Residence::Missed, 4, None);
    assert_eq!(orders(&bench, a), [1, 0, 1], "and now it may not");
    assert!(parking_of(&bench, a).held);
}

#[test]
fn a_new_process_of_a_held_instance_takes_its_time_back_where_that_can_be_met() {
    for taken in [false, true] {
        let mut bench = Bench::new(NodeConfig::default());
        let a = bench.start(0, "a", spec("0.4:1", 100));
        says(&mut bench, a, Residence::Resident, 4, None);
        bench.tell(NodeEvent::ParkAsked { name: "a".to_owned(), uid: 1000, on: true, holds: true });
        says(&mut bench, a, Residence::Parked, 4, None);
        let others = bench.start(1, "b", spec(if taken { "0.7" } else { "0.6" }, 100));
        let conn = ConnId::new(2, 0);
        bench.say(conn, hello_of("a", 1));
        let second = (conn, bench.attach(conn).unwrap().0);
        let request = |bench: &Bench| {
            let mut tenants = bench.node.tenants();
            tenants.find(|tenant| tenant.name == "a").unwrap().status.share.quota.request().get()
        };
        assert_eq!(request(&bench), if taken { 0 } else { 4_000 });
        says(&mut bench, second, Residence::Resident, 1, None);
        assert_eq!(request(&bench), if taken { 0 } else { 4_000 });
        bench.tell(NodeEvent::Closed { conn: others.0 });
        // The first process goes too: the second one has the instance's time.
        bench.tell(NodeEvent::Closed { conn: a.0 });
        assert_eq!(request(&bench), 4_000);
    }
}

#[test]
fn a_process_of_an_instance_is_parked_without_its_siblings() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0.4:1", 100));
    let conn = ConnId::new(1, 0);
    bench.say(conn, hello_of("a", 1));
    let b = (conn, bench.attach(conn).unwrap().0);
    says(&mut bench, a, Residence::Resident, 1, None);
    asks(&mut bench, "a", 1000, true).unwrap();
    bench.ask(a.0, a.1);
    assert_eq!(tokens(&bench, a), 0);
    bench.ask(b.0, b.1);
    assert_eq!((tokens(&bench, a), tokens(&bench, b)), (0, 1));
    // Its extension does not wait for the parked process either.
    bench.say(b.0, ToDaemon::use_of_time(b.1, 0, Duration::from_millis(5), UseState::Extends));
    assert_eq!(tokens(&bench, b), 2);
}

/// The first frame of another process of the run in slot 0.
fn hello_of(name: &str, pid: u32) -> ToDaemon {
    ToDaemon::Hello {
        pid_start: 0,
        pid,
        run: gshare_core::RunId::new(1),
        name: name.to_owned(),
        program: "test".to_owned(),
        spec: spec("0.4:1", 100),
        on_loss: gshare_core::wire::OnDaemonLoss::Open,
    }
}

#[test]
fn a_refusal_names_what_is_wrong_and_changes_nothing() {
    let mut bench = Bench::new(NodeConfig::default().with_park_memory(Bytes(5 * GIB)));
    let names = ["a", "b", "c", "d"];
    let [a, b, c, d] = [0, 1, 2, 3].map(|slot| bench.start(slot, names[slot as usize], spec("0:1", 100)));
    says(&mut bench, a, Residence::Resident, 3, None);
    says(&mut bench, b, Residence::Resident, 0, Some(Obstacle::Pools));
    says(&mut bench, c, Residence::Resident, 3, None);
    let refused = |bench: &mut Bench, name: &str, uid| {
        bench.notes.clear();
        let refusal = asks(bench, name, uid, true).unwrap_err();
        assert_eq!(bench.notes, [Note::NoEffect]);
        refusal.to_string()
    };
    assert_eq!(refused(&mut bench, "x", 1000), "no client is named `x` (gshare status lists them)");
    assert_eq!(refused(&mut bench, "a", 7), "`a` belongs to user 1000, not 7: ask that user or root");
    assert_eq!(refused(&mut bench, "d", 1000), "`d` cannot be parked: start it with `gshare run --park`");
    assert_eq!(
        refused(&mut bench, "b", 1000),
        "`b` has no memory that can move: it lies in memory pools or in graphs"
    );
    assert_eq!(asks(&mut bench, "a", 0, true), Ok(1), "root may");
    assert_eq!(
        refused(&mut bench, "c", 1000),
        "`c` needs 3 GiB of host memory, and 3 GiB of 5 GiB are taken for user 1000 (park_memory)"
    );
    assert_eq!(asks(&mut bench, "a", 1000, true), Ok(1), "it is on its way");
    says(&mut bench, a, Residence::Parked, 3, None);
    assert_eq!(asks(&mut bench, "a", 1000, false), Ok(1));
    says(&mut bench, a, Residence::Resident, 3, None);
    assert_eq!(asks(&mut bench, "c", 1000, true), Ok(1), "the budget is free again");
    assert_eq!((orders(&bench, a), orders(&bench, c)), (vec![1, 0], vec![1]));
    assert!(orders(&bench, b).is_empty() && orders(&bench, d).is_empty());
}

#[test]
fn a_move_that_fails_leaves_the_client_as_it_was_and_a_report_that_crosses_the_order_does_not() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0:1", 100));
    says(&mut bench, a, Residence::Resident, 1, None);
    asks(&mut bench, "a", 1000, true).unwrap();
    says(&mut bench, a, Residence::Resident, 2, None);
    assert!(parking_of(&bench, a).ordered);
    bench.ask(a.0, a.1);
    assert_eq!(tokens(&bench, a), 0);
    says(&mut bench, a, Residence::Resident, 2, Some(Obstacle::Capture));
    assert!(!parking_of(&bench, a).ordered);
    assert_eq!(tokens(&bench, a), 1);
}

/// A client parked under an earlier daemon.
/// A process repeats an older failure for as long as it has not read the order.
#[test]
fn a_client_that_obeys_after_it_told_an_older_failure_comes_back() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0.4:1", 100));
    says(&mut bench, a, Residence::Resident, 4, None);
    asks(&mut bench, "a", 1000, true).unwrap();
    says(&mut bench, a, Residence::Resident, 4, Some(Obstacle::HostMemory));
    says(&mut bench, a, Residence::Parking, 4, None);
    says(&mut bench, a, Residence::Missed, 4, None);
    assert_eq!(orders(&bench, a), [1, 0]);
}

#[test]
fn a_daemon_that_is_new_takes_a_parked_client_as_it_is() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0:1", 100));
    says(&mut bench, a, Residence::Parked, 2, None);
    bench.ask(a.0, a.1);
    assert_eq!((tokens(&bench, a), orders(&bench, a)), (0, vec![]));
    says(&mut bench, a, Residence::Missed, 2, None);
    assert_eq!(orders(&bench, a), [0]);
    says(&mut bench, a, Residence::Resident, 2, None);
    assert_eq!(tokens(&bench, a), 1);
}

/// A process as far as its memory goes: what it does at each step is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Model {
    client: Client,
    residence: Residence,
    wants: bool,
    turn: u32,
    /// Orders answered.
    heard: usize,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Three clients follow their orders, each at its own pace. A token goes to a resident client only, and every client that
    /// wants one has it in the end.
    #[test]
    fn tokens_go_to_resident_clients_alone_and_nobody_starves(
        steps in prop::collection::vec((0usize..3, 0u8..8, 0u64..30), 1..120),
    ) {
        let mut bench = Bench::new(NodeConfig::default());
        let mut models = [0, 1, 2].map(|slot| {
            let client = bench.start(slot, ["a", "b", "c"][slot as usize], spec("0.2:1", 100));
            Model { client, residence: Residence::Resident, wants: false, turn: 0, heard: 0 }
        });
        for model in models {
            says(&mut bench, model.client, Residence::Resident, 1, None);
        }
        let step = |bench: &mut Bench, model: &mut Model, what: u8, drawn: bool| {
            let ordered = orders(bench, model.client).last() == Some(&1);
            let next = match (model.residence, ordered) {
                (Residence::Resident, true) => Residence::Parking,
                (Residence::Parking, _) => Residence::Parked,
                (Residence::Parked, _) if model.wants => Residence::Missed,
                (Residence::Parked | Residence::Missed, false) => Residence::Returning,
                (Residence::Returning, _) => Residence::Resident,
                (same, _) => same,
            };
            match what {
                0 if drawn => { let _ = asks(bench, ["a", "b", "c"][model.client.0.slot() as usize], 1000, true); }
                1 if drawn => { let _ = asks(bench, ["a", "b", "c"][model.client.0.slot() as usize], 1000, false); }
                2 if drawn && !model.wants => {
                    model.wants = true;
                    bench.say(model.client.0, ToDaemon::use_of_time(model.client.1, model.turn, Duration::ZERO, UseState::Wants));
                }
                // It has not read the order yet, and repeats an older failure.
                3 if drawn && model.residence == Residence::Resident && model.heard < orders(bench, model.client).len() => {
                    says(bench, model.client, Residence::Resident, 1, Some(Obstacle::HostMemory));
                }
                3.. if next != model.residence || model.heard < orders(bench, model.client).len() => {
                    (model.residence, model.heard) = (next, orders(bench, model.client).len());
                    says(bench, model.client, next, 1, None);
                }
                _ => {}
            }
        };
        let mut seen = 0;
        let mut served = |bench: &mut Bench, models: &mut [Model; 3]| {
            while let Some((_, frame)) = bench.sent.get(seen).cloned() {
                seen += 1;
                let ToClient::Allow { client, until, turn, .. } = frame else { continue };
                let model = models.iter_mut().find(|model| model.client.1 == client).unwrap();
                if until <= bench.now { model.turn = turn + 1; continue }
                if turn != model.turn { continue }
                // An order may be on its way, but memory that has left gets no token.
                assert!(matches!(model.residence, Residence::Resident | Residence::Parking), "{model:?}");
                (model.turn, model.wants) = (model.turn + 1, false);
                bench.say(model.client.0, ToDaemon::use_of_time(client, model.turn, Duration::ZERO, UseState::Idle));
            }
        };
        for (which, what, ms) in steps {
            step(&mut bench, &mut models[which], what, true);
            served(&mut bench, &mut models);
            bench.pass(Duration::from_millis(ms));
            served(&mut bench, &mut models);
        }
        for _ in 0..12 {
            for model in &mut models {
                step(&mut bench, model, 3, false);
            }
            served(&mut bench, &mut models);
            bench.pass(Duration::from_millis(200));
            served(&mut bench, &mut models);
        }
        prop_assert!(models.iter().all(|model| !model.wants), "{models:?}");
    }
}
