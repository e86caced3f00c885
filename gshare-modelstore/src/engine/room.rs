//! Room: the arenas to evict, the arenas that get memory, and the invariants.

use super::Store;
use super::books::{Arena, Model, Origin, Wants};
use crate::store::{ArenaState, MemoryTier, ModelStore as _, RefuseReason, StoreAction};
use core::cmp::Ordering;
use gshare_core::{ArenaId, Bytes, TenantId, Timestamp};
use std::collections::BTreeSet;

/// Bounds the sum over an arena's models, so that its product with a size fits.
const MAX_WORTH: u128 = 1 << 79;

/// The worth of keeping an arena, compared exactly as a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Value {
    worth: u128,
    bytes: u64,
    last_used: Timestamp,
    arena: ArenaId,
}

impl Ord for Value {
    fn cmp(&self, other: &Self) -> Ordering {
        let (mine, its) = (self.worth * u128::from(other.bytes), other.worth * u128::from(self.bytes));
        mine.cmp(&its).then(self.last_used.cmp(&other.last_used)).then(self.arena.cmp(&other.arena))
    }
}

impl PartialOrd for Value {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Store {
    fn share(&self, tier: MemoryTier, of: gshare_core::BasisPoints) -> u64 {
        let share = u128::from(self.capacity(tier).0) * u128::from(of.get()) / 10_000;
        u64::try_from(share).unwrap_or(u64::MAX)
    }

    /// Milliseconds to have the model in the tier again; `None` if that is impossible.
    fn reload_ms(&self, model: &Model, tier: MemoryTier) -> Option<u64> {
        let in_host = |arena: ArenaId| {
            self.state.arenas.get(arena).is_some_and(|arena| arena.state == ArenaState::Committed)
        };
        if tier == MemoryTier::Gpu && model.arenas[MemoryTier::Host as usize].is_some_and(in_host) {
            let per_ms = self.config.host_to_gpu.0 / 1_000;
            return Some(model.bytes.0.div_ceil(per_ms.max(1)).min(u64::from(u32::MAX)));
        }
        let from_disk = model.source?.as_nanos().div_ceil(1_000_000);
        Some(from_disk.clamp(1, u64::from(u32::MAX)))
    }

    /// The value of an evictable arena.
    fn value(&self, now: Timestamp, name: ArenaId, arena: &Arena) -> Option<Value> {
        if arena.state != ArenaState::Committed || arena.is_held() {
            return None;
        }
        let (mut worth, mut last_used) = (0u128, Timestamp::ZERO);
        for model in &arena.names {
            let model = self.state.models.get(model)?;
            if model.pinned {
                return None;
            }
            let rate = model.rate(now, self.config.half_life);
            worth += u128::from(rate) * u128::from(self.reload_ms(model, arena.tier)?);
            last_used = last_used.max(model.last_used);
        }
        Some(Value { worth: worth.min(MAX_WORTH), bytes: arena.bytes, last_used, arena: name })
    }

    /// Evictable arenas, the least valuable first.
    fn victims(&self, now: Timestamp, keep: Option<ArenaId>) -> Vec<(ArenaId, &Arena)> {
        let mut values: Vec<(Value, &Arena)> = (self.state.arenas.iter())
            .filter(|&(name, _)| Some(name) != keep)
            .filter_map(|(name, arena)| Some((self.value(now, name, arena)?, arena)))
            .collect();
        values.sort_unstable_by_key(|&(value, _)| value);
        values.into_iter().map(|(value, arena)| (value.arena, arena)).collect()
    }

    /// The arenas to evict so that `bytes` more can be promised. `owner` is charged for them, and `tenant` causes the load.
    pub(super) fn room(
        &self,
        now: Timestamp,
        tier: MemoryTier,
        bytes: Bytes,
        owner: TenantId,
        tenant: TenantId,
        keep: Option<ArenaId>,
    ) -> Result<Vec<ArenaId>, RefuseReason> {
        let (bytes, capacity) = (bytes.0, self.capacity(tier).0);
        if bytes > capacity {
            return Err(RefuseReason::ModelTooLarge);
        }
        if let Some(causing) = self.state.tenants.get(&tenant) {
            let limits = causing.limits;
            let ahead = limits.load_interval.as_nanos().saturating_mul(u64::from(limits.load_burst - 1));
            if causing.next_load.as_nanos() > now.as_nanos().saturating_add(ahead) {
                return Err(RefuseReason::TenantLoads);
            }
        }
        let victims = self.victims(now, keep);
        let mut going = Vec::new();
        if let Some(charged) = self.state.tenants.get(&owner) {
            let (mut held, mut count) = (charged.bytes, charged.arenas);
            let limits = charged.limits;
            let bytes_fit = |held: u64| held.checked_add(bytes).is_some_and(|sum| sum <= limits.bytes.0);
            let count_fits = |count: u32| count < limits.models;
            for (name, arena) in victims.iter().filter(|(_, arena)| arena.charged == owner) {
                if bytes_fit(held) && count_fits(count) {
                    break;
                }
                going.push(*name);
                (held, count) = (held - arena.bytes, count - 1);
            }
            if !bytes_fit(held) {
                return Err(RefuseReason::TenantBytes);
            }
            if !count_fits(count) {
                return Err(RefuseReason::TenantModels);
            }
        }
        let gone: u64 = (victims.iter())
            .filter(|(name, arena)| arena.tier == tier && going.contains(name))
            .map(|(_, arena)| arena.bytes)
            .sum();
        let mut promised = self.state.tiers[tier as usize].promised - gone + bytes;
        if promised > self.share(tier, self.config.high) {
            let low = self.share(tier, self.config.low);
            for (name, arena) in victims.iter().filter(|(_, arena)| arena.tier == tier) {
                if promised <= low {
                    break;
                }
                if !going.contains(name) {
                    going.push(*name);
                    promised -= arena.bytes;
                }
            }
        }
        if promised > capacity { Err(RefuseReason::StoreFull) } else { Ok(going) }
    }

    /// Whether an arena that leaves the GPU can be copied to host memory, while `coming` is to be charged for the GPU.
    fn can_demote(&self, name: ArenaId, coming: Option<(TenantId, Bytes)>) -> bool {
        let Some(arena) = self.state.arenas.get(name) else { return false };
        let host = MemoryTier::Host as usize;
        let more = coming.filter(|&(tenant, _)| tenant == arena.charged);
        let within_limits = self.state.tenants.get(&arena.charged).is_none_or(|charged| {
            let bytes = charged.bytes.checked_add(more.map_or(0, |(_, bytes)| bytes.0));
            bytes.is_some_and(|bytes| bytes <= charged.limits.bytes.0)
                && charged.arenas.saturating_add(u32::from(more.is_some())) <= charged.limits.models
        });
        let mut models = arena.names.iter().filter_map(|model| self.state.models.get(model));
        let promised = self.state.tiers[host].promised.checked_add(arena.bytes);
        self.config.demote
            && arena.tier == MemoryTier::Gpu
            && models.all(|model| model.arenas[host].is_none())
            && promised.is_some_and(|sum| sum <= self.share(MemoryTier::Host, self.config.high))
            && within_limits
    }

    /// Evicts an arena for room in `tier`, where an arena will be charged as `coming` says.
    pub(super) fn make_go(
        &mut self,
        arena: ArenaId,
        tier: MemoryTier,
        coming: Option<(TenantId, Bytes)>,
        actions: &mut Vec<StoreAction>,
    ) {
        if tier == MemoryTier::Gpu && self.can_demote(arena, coming) {
            self.state.demote(arena, actions);
            self.start(MemoryTier::Host, actions);
        } else {
            self.state.retire(arena, actions);
        }
    }

    /// Evicts down to the low watermark if the tier is above the high watermark.
    pub(super) fn trim(&mut self, tier: MemoryTier, actions: &mut Vec<StoreAction>) {
        let mut promised = self.state.tiers[tier as usize].promised;
        if promised <= self.share(tier, self.config.high) {
            return;
        }
        let low = self.share(tier, self.config.low);
        let mut going = Vec::new();
        for (name, arena) in self.victims(self.state.now, None) {
            if promised <= low {
                break;
            }
            if arena.tier == tier {
                going.push(name);
                promised -= arena.bytes;
            }
        }
        going.into_iter().for_each(|victim| self.make_go(victim, tier, None, actions));
    }

    /// Gives free memory to the first arenas in the queue.
    pub(super) fn start(&mut self, tier: MemoryTier, actions: &mut Vec<StoreAction>) {
        let capacity = self.capacity(tier).0;
        while let Some(&arena) = self.state.tiers[tier as usize].empty.front() {
            let used = &mut self.state.tiers[tier as usize];
            let Some(found) = self.state.arenas.get_mut(arena) else { return };
            if used.physical + found.bytes > capacity {
                return;
            }
            used.physical += found.bytes;
            used.empty.pop_front();
            found.state = ArenaState::Loading;
            let Some(&model) = found.names.first() else { return };
            match found.origin {
                Origin::Loaded { from } => actions.push(StoreAction::Load { arena, model, tier, from }),
                Origin::Written { by, .. } => {
                    let tickets = &self.state.tickets;
                    let begun = found.waiting.iter().position(|ticket| {
                        tickets.get(ticket).is_some_and(|ticket| matches!(ticket.wants, Wants::Write))
                    });
                    if let (Some(client), Some(at)) = (by, begun)
                        && let Some(ticket) = found.waiting.remove(at)
                    {
                        self.state.close(ticket);
                        actions.push(StoreAction::Write { ticket, client, arena, model, tier });
                    }
                }
            }
        }
    }

    /// Checks the invariants of the module's essay.
    pub(super) fn invariants(&self) {
        let state = &self.state;
        for tier in MemoryTier::ALL {
            let used = &state.tiers[tier as usize];
            let here = || state.arenas.values().filter(|arena| arena.tier == tier);
            let sum = |of: &dyn Fn(ArenaState) -> bool| -> u64 {
                here().filter(|arena| of(arena.state)).map(|arena| arena.bytes).sum()
            };
            assert_eq!(used.promised, sum(&|state| state != ArenaState::Evicting), "promised");
            assert_eq!(used.physical, sum(&|state| state != ArenaState::Empty), "physical");
            assert!(used.promised <= self.capacity(tier).0 && used.physical <= self.capacity(tier).0);
            let empty: BTreeSet<ArenaId> = used.empty.iter().copied().collect();
            for (name, arena) in state.arenas.iter().filter(|(_, arena)| arena.tier == tier) {
                assert_eq!(empty.contains(&name), arena.state == ArenaState::Empty, "line for memory");
            }
        }
        for (&tenant, account) in &state.tenants {
            let charged = || {
                state
                    .arenas
                    .values()
                    .filter(|arena| arena.charged == tenant && arena.state != ArenaState::Evicting)
            };
            assert_eq!(account.bytes, charged().map(|arena| arena.bytes).sum::<u64>(), "charged bytes");
            assert_eq!(account.arenas as usize, charged().count(), "charged arenas");
        }
        for (name, arena) in state.arenas.iter() {
            let held = state.clients.values().filter_map(|client| client.refs.get(&name)).sum::<u64>();
            assert_eq!(arena.references, held, "references of {name}");
            let copies = state.arenas.values().filter(|other| {
                matches!(other.origin, Origin::Loaded { from: crate::store::LoadFrom::Host(from) } if from == name)
            });
            assert_eq!(arena.copies as usize, copies.count(), "copies from {name}");
            if let Origin::Loaded { from: crate::store::LoadFrom::Gpu(from) } = arena.origin {
                assert!(
                    state.arenas.get(from).is_some_and(|from| from.state == ArenaState::Evicting),
                    "{name}'s source"
                );
            }
            assert!(arena.state == ArenaState::Committed || !arena.is_held(), "{name} is held");
            assert_eq!(arena.state == ArenaState::Evicting, arena.names.is_empty(), "names of {name}");
            assert!(
                arena.state == ArenaState::Loading
                    || arena.state == ArenaState::Empty
                    || arena.waiting.is_empty()
            );
            for model in &arena.names {
                assert_eq!(state.models[model].arenas[arena.tier as usize], Some(name), "arena of {model}");
            }
        }
        for ((content, tier), name) in &state.by_content {
            let arena = state.arenas.get(*name).expect("committed content has an arena");
            assert_eq!(
                (arena.content, arena.tier, arena.state),
                (Some(*content), *tier, ArenaState::Committed)
            );
        }
        for (name, ticket) in &state.tickets {
            let arena = ticket.arena.and_then(|arena| state.arenas.get(arena));
            assert!(arena.is_some_and(|arena| arena.waiting.contains(name)), "{name} waits for nothing");
            assert!(state.clients[&ticket.client].tickets.contains(name));
        }
    }
}
