//! The bounds of several uids: no history of takes gives one uid the resources needed by others.

use gshare_core::{Bytes, Timestamp};
use gshare_modelstore::bounds::{Bound, Bounds, Exceeded, LEAST_WORK, Limits, Resource, Whose, Work};
use gshare_modelstore::engine::StoreConfig;
use proptest::prelude::*;

const OPERATOR: u32 = 9;
/// Root, the store's own uid, and tenants.
const UIDS: [u32; 6] = [0, OPERATOR, 1_000, 1_001, 1_002, 1_003];

fn table(bound: Bound) -> Bounds {
    let limits = Limits::of_process(1_024, &StoreConfig::default());
    let limits =
        Resource::ALL.into_iter().fold(limits, |limits, resource| limits.with_bound(resource, bound));
    Bounds::new(limits, OPERATOR).unwrap()
}

#[derive(Debug, Clone)]
enum Op {
    Take {
        uid: usize,
        resource: usize,
        amount: u64,
    },
    /// Releases a take, the oldest left or a later one.
    Give {
        at: prop::sample::Index,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let amount = prop_oneof![4 => 0u64..8, 1 => any::<u64>()];
    prop_oneof![
        3 => (0..UIDS.len(), 0..Resource::ALL.len(), amount)
            .prop_map(|(uid, resource, amount)| Op::Take { uid, resource, amount }),
        1 => any::<prop::sample::Index>().prop_map(|at| Op::Give { at }),
    ]
}

/// How many units a uid can still take, one by one.
fn room(table: &mut Bounds, uid: u32, resource: Resource) -> u64 {
    let mut taken = 0;
    while table.take(uid, resource, 1).is_ok() {
        taken += 1;
    }
    table.give(uid, resource, taken);
    taken
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The table against a list of the takes; and at every step the promise that the bounds make.
    #[test]
    fn others_always_have_room(per_uid in 1u64..20, spare in 0u64..20, history in prop::collection::vec(op(), 1..80)) {
        let bound = Bound { total: 3 * per_uid + spare, per_uid };
        let mut table = table(bound);
        let mut taken: Vec<(u32, Resource, u64)> = Vec::new();
        for op in history {
            match op {
                Op::Take { uid, resource, amount } => {
                    let (uid, resource) = (UIDS[uid], Resource::ALL[resource]);
                    match table.take(uid, resource, amount) {
                        Ok(()) => taken.push((uid, resource, amount)),
                        Err(Exceeded::Held { held, asked, bound, .. }) => {
                            prop_assert!(held.checked_add(asked).is_none_or(|sum| sum > bound));
                        }
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                Op::Give { at } if !taken.is_empty() => {
                    let (uid, resource, amount) = taken.remove(at.index(taken.len()));
                    table.give(uid, resource, amount);
                }
                Op::Give { .. } => {}
            }
            for resource in Resource::ALL {
                let sum = |of: &dyn Fn(u32) -> bool| -> u64 {
                    taken.iter().filter(|&&(uid, which, _)| which == resource && of(uid)).map(|take| take.2).sum()
                };
                let tenant = |uid: u32| uid >= 1_000;
                for uid in UIDS {
                    prop_assert_eq!(table.held(uid, resource), sum(&|other| other == uid));
                    prop_assert!(!tenant(uid) || table.held(uid, resource) <= per_uid);
                }
                prop_assert_eq!(table.total(resource), sum(&|_| true));
                prop_assert!(table.total(resource) <= bound.total);
                // However much all tenants have, the operator can have a uid's part.
                let operators = sum(&|uid| !tenant(uid));
                prop_assert!(operators + room(&mut table, OPERATOR, resource) >= per_uid);
                // However much one uid has, every other can have its part, if no third has anything.
                let users: Vec<u32> = UIDS.into_iter().filter(|&uid| table.held(uid, resource) > 0).collect();
                if let &[attacker] = &users[..] {
                    // Root and the store's uid are one.
                    let others = [0, 1_000, 1_001].into_iter().filter(|&other| other != attacker);
                    for other in others.filter(|&other| tenant(other) || tenant(attacker)) {
                        let room = room(&mut table, other, resource);
                        prop_assert!(room >= per_uid, "{room} for {other} beside {attacker}");
                    }
                }
            }
        }
        for (uid, resource, amount) in taken {
            table.give(uid, resource, amount);
        }
        prop_assert_eq!(table.uids().count(), 0);
    }

    /// Each uid gets at most the burst and the rate in every stretch of time.
    #[test]
    fn header_work_of_a_uid_is_at_most_its_burst_and_rate(
        burst in LEAST_WORK..100_000, rate in 1u64..100_000,
        asks in prop::collection::vec((0..2usize, 0u64..500_000_000, 0u64..60_000), 1..60),
    ) {
        let limits = Limits::of_process(1_024, &StoreConfig::default());
        let limits = limits.with_work(Work { burst: Bytes(burst), rate: Bytes(rate) });
        let mut table = Bounds::new(limits, OPERATOR).unwrap();
        let mut now = 0;
        let mut done: [Vec<(u64, u64)>; 2] = Default::default();
        for (uid, wait, bytes) in asks {
            now += wait;
            let cost = bytes.max(LEAST_WORK);
            let fresh = done[uid].is_empty();
            match table.work(Timestamp::from_nanos(now), UIDS[uid + 2], bytes) {
                Ok(()) => done[uid].push((now, cost)),
                Err(Exceeded::Work { .. }) => prop_assert!(!fresh || cost > burst, "the first that fits is taken"),
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
        for done in done {
            for (from, &(begin, _)) in done.iter().enumerate() {
                let mut sum = 0;
                for &(end, cost) in &done[from..] {
                    sum += cost;
                    let allowed = u128::from(burst) + u128::from(rate) * u128::from(end - begin) / 1_000_000_000;
                    // A nanosecond of rounding for each.
                    let rounding = 1 + u128::from(rate) * done.len() as u128 / 1_000_000_000;
                    prop_assert!(u128::from(sum) <= allowed + rounding, "{sum} of {allowed} from {begin} to {end}");
                }
            }
        }
    }
}

#[test]
fn a_refusal_says_whose_bound_it_is() {
    let mut table = table(Bound { total: 8, per_uid: 2 });
    let mut take =
        |uid, amount| table.take(uid, Resource::Descriptors, amount).map_err(|error| error.to_string());
    for uid in [1_000, 1_001, 1_002] {
        take(uid, 2).unwrap();
    }
    assert_eq!(
        take(1_000, 1).unwrap_err(),
        "1 more for uid 1000 would pass the bound on descriptors: it may have 2, and 2 are taken"
    );
    assert_eq!(
        take(1_003, 1).unwrap_err(),
        "1 more for uid 1003 would pass the bound on descriptors: all uids but the operator's may have 6, and 6 are taken"
    );
    take(0, 2).unwrap();
    let all = table.take(OPERATOR, Resource::Descriptors, 1).unwrap_err();
    assert!(matches!(all, Exceeded::Held { whose: Whose::All, held: 8, bound: 8, .. }), "{all}");
}

#[test]
fn a_bound_that_leaves_nothing_to_others_is_refused_by_name() {
    let limits = Limits::of_process(1_024, &StoreConfig::default());
    for (total, per_uid) in [(8, 0), (8, 3), (0, 1), (2, 1)] {
        let limits = limits.with_bound(Resource::Unread, Bound { total, per_uid });
        assert_eq!(Bounds::new(limits, 0).unwrap_err().field, "unread_descriptors");
    }
    let none = limits.with_work(Work { burst: Bytes(1), rate: Bytes(1) });
    assert_eq!(Bounds::new(none, 0).unwrap_err().field, "header_work");
    // Even a process that may hardly open anything has bounds that can be.
    for open in [0, 64, 100, u64::MAX] {
        Bounds::new(Limits::of_process(open, &StoreConfig::default()), 0).unwrap();
    }
}
