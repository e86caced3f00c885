//! Time of one decision of the token engine, beside a bare `BTreeMap` insert and remove of the same size.
//!
//! The events come from a busy GPU: clients that always want more ask, report when half of their budget is used, ask ahead of its
//! end, return it and ask again; deadlines come between. They are recorded once from a closed loop around the engine and replayed;
//! making the engine and letting the clients in is not measured. The clients share one GPU, with SM partitions of 10 to 50 per
//! cent, so several hold at once and room is kept for the wide clients.
//!
//! Aims: at most 1 us per event with 64 clients, 5 us with 1,024.

use gshare_core::{
    ClientId, Duration, Engine, GpuId, Quota, QuotaRange, Share, SmShare, Timestamp, TokenAction, TokenEvent,
    UseState,
};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::{EventQueue, Rng};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

fn events() -> usize {
    if gshare_bench::runs_as_test() { 500 } else { 20_000 }
}

type Log = Vec<(Timestamp, TokenEvent)>;

fn share(rng: &mut Rng, clients: u32) -> Share {
    // Together at most the whole.
    let most = (10_000 / u64::from(clients)).clamp(1, 9_000);
    let quota = |points: u64| u16::try_from(points).ok().and_then(Quota::new).expect("at most 10000");
    let request = rng.between(1, most);
    let sm = u16::try_from(rng.between(1_000, 5_000)).ok().and_then(SmShare::new).expect("at most 10000");
    Share {
        quota: QuotaRange::new(quota(request), quota(rng.between(request, 10_000))).expect("ordered"),
        sm,
    }
}

/// An engine with its clients, which all ask.
fn engine(clients: u32) -> (MultiToken, Vec<TokenAction>) {
    let mut engine = MultiToken::new(MultiTokenConfig::default()).expect("the default is sound");
    let (mut rng, mut actions) = (Rng::new(1), Vec::new());
    for slot in 0..clients {
        let client = ClientId::new(slot, 0);
        let share = share(&mut rng, clients);
        for event in [
            TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share },
            TokenEvent::Used { client, used: Duration::ZERO, state: UseState::Wants },
        ] {
            engine.handle(Timestamp::ZERO, event, &mut actions).expect("a sound event");
        }
    }
    (engine, actions)
}

/// The next step of a client with a token; void when it has more by then.
#[derive(Clone, Copy)]
enum Step {
    Report,
    Ask,
    Return,
}

fn record(clients: u32) -> Log {
    let (mut engine, mut actions) = engine(clients);
    let mut log = Log::new();
    let mut queue: EventQueue<(ClientId, Duration, Step)> = EventQueue::new();
    let mut now = Timestamp::ZERO;
    let mut allowed: BTreeMap<ClientId, Duration> = BTreeMap::new();
    let mut said: BTreeMap<ClientId, Duration> = BTreeMap::new();
    while log.len() < events() {
        for action in actions.drain(..) {
            let (client, upto) = match action {
                TokenAction::Allow { client, allowed, .. } => (client, allowed),
                TokenAction::Recall { client, allowed } => (client, allowed),
                _ => continue,
            };
            let used = said.get(&client).copied().unwrap_or_default();
            allowed.insert(client, upto);
            let left = upto.saturating_sub(used).as_nanos();
            let part = |tenths| now.saturating_add(Duration::from_nanos(left * tenths / 10));
            for (at, step) in [(part(5), Step::Report), (part(8), Step::Ask), (part(10), Step::Return)] {
                queue.schedule(at, (client, upto, step));
            }
        }
        let deadline = engine.next_deadline().unwrap_or(Timestamp::MAX);
        let event = match queue.next_at() {
            Some(at) if at <= deadline => {
                let Some((at, (client, upto, step))) = queue.pop() else { break };
                now = at;
                if allowed.get(&client) != Some(&upto) {
                    continue;
                }
                let before = said.entry(client).or_default();
                let left = upto.saturating_sub(*before).as_nanos();
                let (used, state) = match step {
                    Step::Report => (before.saturating_add(Duration::from_nanos(left / 2)), UseState::Holds),
                    Step::Ask => (before.saturating_add(Duration::from_nanos(left / 2)), UseState::Extends),
                    Step::Return => {
                        allowed.remove(&client);
                        (upto.max(*before), UseState::Wants)
                    }
                };
                *before = used;
                TokenEvent::Used { client, used, state }
            }
            _ => {
                now = deadline;
                TokenEvent::DeadlineReached
            }
        };
        engine.handle(now, event, &mut actions).expect("a sound event");
        log.push((now, event));
    }
    log
}

fn replay(engine: &mut MultiToken, log: &Log, actions: &mut Vec<TokenAction>) {
    for &(now, event) in log {
        actions.clear();
        let _ = black_box(engine.handle(now, event, actions));
        black_box(engine.next_deadline());
    }
}

/// A map of as many entries as there are clients.
fn map(clients: u32) -> BTreeMap<(u64, u32), u32> {
    let mut rng = Rng::new(2);
    (0..clients).map(|slot| ((rng.below(10_000_000), slot), slot)).collect()
}

/// As many times: the first entry leaves and comes back elsewhere.
fn floor(map: &mut BTreeMap<(u64, u32), u32>, rng: &mut Rng) {
    for _ in 0..events() {
        if let Some(((_, slot), value)) = map.pop_first() {
            map.insert(black_box((rng.below(10_000_000), slot)), value);
        }
    }
}

/// Prints both and their ratio: medians of passes that alternate, so that a noisy machine disturbs both alike.
fn ratio(clients: u32, log: &Log) {
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..15 {
        let (mut engine, mut actions) = engine(clients);
        let start = Instant::now();
        replay(&mut engine, log, &mut actions);
        ours.push(start.elapsed().as_nanos() / log.len() as u128);
        let (mut map, mut rng) = (map(clients), Rng::new(3));
        let start = Instant::now();
        floor(&mut map, &mut rng);
        floors.push(start.elapsed().as_nanos() / events() as u128);
    }
    ours.sort_unstable();
    floors.sort_unstable();
    let (ours, floor) = (ours[7], floors[7].max(1));
    println!(
        "token: {clients} clients, {ours} ns per event, BTreeMap insert+remove {floor} ns, ratio {}.{}",
        ours / floor,
        ours * 10 / floor % 10
    );
}

fn main() {
    for clients in [64, 1_024] {
        ratio(clients, &record(clients));
    }
}
