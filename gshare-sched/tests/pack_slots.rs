//! A packing as a schedule: each placement's slot lies where its rectangle does, and the SMs suffice at each instant.

use gshare_core::{BasisPoints, Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer, Placement, Slot, SlotTable};

fn percent(quota: u16, sm: u16) -> Demand {
    Demand::new(Quota::from_percent(quota).unwrap(), SmShare::from_percent(sm).unwrap())
}

/// The placements of these offers on one GPU, one by one, until it is full.
fn pack(demands: impl Iterator<Item = Demand>) -> Vec<Placement> {
    let mut pool = MaxRects::new(MaxRectsConfig::default());
    pool.add_gpu(GpuId::new(0), GpuSpec::new(Bytes::ZERO)).unwrap();
    demands.for_each(|demand| drop(pool.place(&demand)));
    let mut placements = Vec::new();
    pool.placements(&mut |placement| placements.push(*placement));
    placements
}

fn slot(placement: &Placement) -> Slot<PlacementId> {
    let at = placement.rectangle;
    Slot { owner: placement.id, offset: at.time_offset, length: at.quota, sm: at.sm }
}

/// Each owner runs for its quota of the hundred quanta, and the SMs suffice in each.
fn keeps_every_quota(table: &SlotTable<PlacementId>, clients: &[Placement]) {
    let mut used = vec![0u16; clients.len()];
    for quantum in 0..100 {
        let at = BasisPoints::from_percent(quantum).unwrap();
        let sm: u32 = table.running(at).map(|slot| u32::from(slot.sm.get())).sum();
        assert!(sm <= 10_000, "the SMs are never oversold");
        for (client, used) in clients.iter().zip(&mut used) {
            *used += u16::from(table.running(at).any(|slot| slot.owner == client.id));
        }
    }
    for (client, used) in clients.iter().zip(used) {
        assert_eq!(used * 100, client.demand.quota.get(), "{client:?}");
    }
}

/// 100 full GPUs for each of three mixes of demands.
#[test]
fn slots_keep_every_quota_of_gpus_packed_to_the_brim() {
    let mut random = 0x5EED_u64;
    let mut next = move |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((random >> 33) % bound).unwrap()
    };
    for mix in ["profile", "light", "fine"] {
        for _ in 0..100 {
            let clients = pack((0..60).map(|_| match mix {
                "profile" => percent([20, 40, 60, 80, 100][next(5)], [6, 12, 24, 50, 60, 80, 100][next(7)]),
                "light" => {
                    percent([20, 40, 60][next(3)], [6, 6, 6, 6, 12, 12, 12, 12, 24, 24, 24, 50][next(12)])
                }
                _ => percent(u16::try_from(next(100)).unwrap() + 1, u16::try_from(next(100)).unwrap() + 1),
            }));
            let mut table = SlotTable::default();
            assert!(clients.iter().all(|client| table.add(slot(client))), "{mix}: {clients:?}");
            keeps_every_quota(&table, &clients);
        }
    }
}

/// The counterexample to a dispatch by missing quota: the table is found without the packing, too.
#[test]
fn the_counterexample_is_arranged() {
    let clients = pack([percent(60, 100), percent(20, 80), percent(40, 6), percent(20, 24)].into_iter());
    assert_eq!(clients.len(), 4);
    let wants: Vec<_> =
        clients.iter().map(|client| (client.id, client.demand.quota, client.demand.sm)).collect();
    keeps_every_quota(&SlotTable::arrange(&wants).unwrap(), &clients);
}

/// A slot that would oversell the SMs is refused, and an owner has one slot.
#[test]
fn a_table_that_oversells_is_refused() {
    let clients = pack([percent(50, 60), percent(50, 60)].into_iter());
    let (first, second) = (slot(&clients[0]), slot(&clients[1]));
    let mut table = SlotTable::default();
    assert!(table.add(first) && !table.add(first));
    assert!(!table.add(Slot { offset: first.offset, ..second }));
    // Past the end of the window a slot wraps round to its begin.
    let late = Quota::from_percent(70).unwrap();
    assert!(!table.add(Slot { offset: late, ..second }), "it wraps into the first slot");
    assert!(table.add(second));
    assert!(table.remove(first.owner) && !table.remove(first.owner));
}
