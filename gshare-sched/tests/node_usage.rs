//! The use of devices by clients, and clients under observation only.

use crate::support::{Bench, spec};
use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, ConnId, Duration, Engine as _, ResourceSpec, UseState};
use gshare_sched::node::{NodeConfig, NodeEvent, Note, Usage};

const SECOND: Duration = Duration::from_secs(1);

fn uses(bench: &mut Bench, (conn, client): (ConnId, ClientId), busy: Duration) {
    let (turn, state, launches, waited) = (0, UseState::Idle, 3, Duration::ZERO);
    let (memory, byte_seconds) = (Bytes(9), 7);
    let frame = ToDaemon::Use { client, turn, used: busy, state, launches, waited, memory, byte_seconds };
    bench.say(conn, frame);
}

fn usage(bench: &Bench, (_, client): (ConnId, ClientId)) -> Usage {
    bench.node.client(bench.now, client).unwrap().usage
}

#[test]
fn busy_time_beyond_the_time_of_the_device_is_divided_in_proportion() {
    let mut bench = Bench::new(NodeConfig::default());
    let [a, b, c] = ["a", "b", "c"].map(|name| {
        let slot = u32::from(name.as_bytes()[0] - b'a');
        bench.start(slot, name, ResourceSpec::OBSERVED)
    });
    let tenth = Duration::from_millis(100);
    for n in 1..=100 {
        bench.pass(tenth);
        // A has work all the time, B two thirds of it, and C one part in a hundred.
        uses(&mut bench, a, tenth.saturating_mul(n));
        uses(&mut bench, b, tenth.saturating_mul(n).scaled(2, 3));
        uses(&mut bench, c, tenth.saturating_mul(n).scaled(1, 100));
    }
    bench.tell(NodeEvent::UseAsked { question: 1 });
    assert_eq!(usage(&bench, a).busy, SECOND.saturating_mul(10));
    let occupied = [a, b, c].map(|client| usage(&bench, client).occupied.as_nanos());
    let sum: u64 = occupied.iter().sum();
    assert!(sum.abs_diff(10_000_000_000) <= 200_000_000, "{occupied:?}");
    assert!((occupied[0] * 2).abs_diff(occupied[1] * 3) <= 240_000_000, "{occupied:?}");
    assert!(occupied[2] < 61_000_000, "{occupied:?}");
}

/// Reports may come a tenth of a second late, so this much may be left over. An idle device saves nothing up.
#[test]
fn time_of_an_idle_device_is_not_given_to_those_who_come_later() {
    let mut bench = Bench::new(NodeConfig::default());
    let [a, b] = [0, 1].map(|slot| bench.start(slot, ["a", "b"][slot as usize], ResourceSpec::OBSERVED));
    bench.pass(SECOND.saturating_mul(60));
    bench.tell(NodeEvent::UseAsked { question: 1 });
    let tenth = Duration::from_millis(100);
    for n in 1..=20 {
        bench.pass(tenth);
        uses(&mut bench, a, tenth.saturating_mul(n));
        uses(&mut bench, b, tenth.saturating_mul(n));
    }
    bench.tell(NodeEvent::UseAsked { question: 2 });
    let sum = usage(&bench, a).occupied.saturating_add(usage(&bench, b).occupied);
    assert!(sum >= SECOND.saturating_mul(2) && sum <= Duration::from_millis(2_200), "{sum}");
}

#[test]
fn the_own_part_of_a_client_on_some_of_the_sms_is_as_much_smaller() {
    let mut bench = Bench::new(NodeConfig::default());
    let a = bench.start(0, "a", spec("0.5", 40));
    bench.pass(SECOND.saturating_mul(2));
    uses(&mut bench, a, SECOND);
    bench.tell(NodeEvent::UseAsked { question: 1 });
    let of = usage(&bench, a);
    assert_eq!((of.busy, of.occupied), (SECOND, Duration::from_millis(400)));
    assert_eq!((of.launches, of.byte_seconds), (3, 7));
    assert_eq!(bench.node.client(bench.now, a.1).unwrap().memory, Bytes(9));
    // The end of a client states its use.
    uses(&mut bench, a, SECOND.saturating_mul(2));
    bench.tell(NodeEvent::Closed { conn: a.0 });
    let left = bench.notes.iter().find_map(|note| match note {
        Note::Left { usage, .. } => Some(*usage),
        _ => None,
    });
    assert_eq!(left.unwrap().busy, SECOND.saturating_mul(2));
}

/// Whether the client's last share is the share of an observed client.
fn is_told(bench: &Bench, (conn, _): (ConnId, ClientId)) -> bool {
    let told = |(to, frame): &(ConnId, ToClient)| match frame {
        ToClient::Attached { spec, .. } | ToClient::ShareChanged { spec, .. } if *to == conn => Some(*spec),
        _ => None,
    };
    bench.sent.iter().rev().find_map(told).unwrap().is_observed()
}

#[test]
fn a_node_that_observes_gives_all_the_same_spec_and_leaves_it_with_a_reload() {
    let mut bench = Bench::new(NodeConfig::default().with_observe(true));
    let a = bench.start(0, "a", spec("0.9", 100));
    let b = bench.start(1, "b", spec("0.9", 100));
    assert!(is_told(&bench, a) && is_told(&bench, b));
    // Only one of the requests can be met, so the limits cannot begin.
    let refused = bench.node.orders(bench.now, NodeEvent::Reloaded { config: Box::default() });
    assert!(refused.unwrap_err().to_string().contains("sum of requests is 180%"));
    bench.tell(NodeEvent::Closed { conn: b.0 });
    bench.tell(NodeEvent::Reloaded { config: Box::default() });
    assert!(!is_told(&bench, a));
    bench.ask(a.0, a.1);
    assert!(bench.allowed(a.1).is_some(), "it takes tokens from then on");
    bench.tell(NodeEvent::Reloaded { config: Box::new(NodeConfig::default().with_observe(true)) });
    assert!(is_told(&bench, a));
}
