//! What the store says of itself: figures, status and the list of models.

use super::Shared;
use crate::bounds::{Bound, Resource};
use crate::server::conn::Conn;
use crate::status::{self, ArenaStatus, ModelStatus, Status, TierStatus, Use};
use crate::store::{ArenaState, MemoryTier};
use gshare_core::ClientId;
use serde_json::json;

impl Shared {
    /// Figures of the whole store.
    pub(in crate::server) fn stat(&self) -> serde_json::Value {
        let core = self.lock();
        let arenas = core.engine.arenas();
        let tier = |tier: MemoryTier| {
            let here = || arenas.iter().filter(|arena| arena.tier == tier);
            let sum = |of: &dyn Fn(ArenaState) -> bool| -> u64 {
                here().filter(|arena| of(arena.state)).map(|arena| arena.bytes.0).sum()
            };
            json!({
                "capacity_bytes": core.engine.capacity(tier).0,
                "promised_bytes": core.engine.promised(tier).0,
                "committed_bytes": sum(&|state| state == ArenaState::Committed),
                "arenas": here().count(),
                "references": here().map(|arena| arena.references).sum::<u64>(),
            })
        };
        let mut host = tier(MemoryTier::Host);
        let pinned = core.arenas.values().filter_map(|held| held.memory.pinned());
        host["pinned_bytes"] = json!(pinned.map(<[u8]>::len).sum::<usize>());
        let counts = &core.counts;
        json!({
            "clients": core.conns.len(),
            "models": core.models.len(),
            "gpu": tier(MemoryTier::Gpu),
            "host": host,
            "gets": counts.gets, "loads": counts.loads, "demotions": counts.demotions, "load_failures": counts.load_failures,
            "evictions": counts.evictions, "refusals": counts.refusals,
            "pid": std::process::id(),
        })
    }

    /// Arenas, models and clients, as far as the client may see them.
    pub(in crate::server) fn status(&self, conn: &Conn) -> Status {
        let core = self.lock();
        let arenas = core.engine.arenas();
        let tiers = MemoryTier::ALL.map(|tier| {
            let here =
                || arenas.iter().filter(|arena| arena.tier == tier && arena.state != ArenaState::Empty);
            let leaving = here().filter(|arena| arena.state == ArenaState::Evicting);
            let complete = here().filter_map(|arena| core.arenas.get(&arena.arena)?.complete.as_ref());
            TierStatus {
                tier,
                capacity_bytes: core.engine.capacity(tier).0,
                arena_bytes: core.engine.physical(tier).0,
                leaving_bytes: leaving.map(|arena| arena.bytes.0).sum(),
                manifest_bytes: complete.map(|served| served.manifest_bytes).sum(),
                arenas: here().count() as u64,
            }
        });
        let arena = |model, tier| {
            let view = core.engine.arena(core.engine.arena_of(model, tier)?)?;
            let bytes = if view.state == ArenaState::Empty { 0 } else { view.bytes.0 };
            Some(ArenaStatus { tier, arena: view.arena, bytes, references: view.references })
        };
        let mut readable = core.names.iter().filter(|&(.., model)| core.engine.may_read(conn.client, model));
        let models = (readable.by_ref().take(status::MAX_MODELS))
            .map(|(name, owner_uid, model)| ModelStatus {
                name: name.to_owned(),
                owner_uid,
                access: core.models.get(&model).map(|known| known.access).unwrap_or_default(),
                arenas: MemoryTier::ALL.into_iter().filter_map(|tier| arena(model, tier)).collect(),
            })
            .collect();
        let models_left_out = readable.count() as u64;
        let uses = core.ledger.read(|bounds| {
            let seen = bounds.uids().filter(|&uid| uid == conn.uid || bounds.is_operator(conn.uid));
            let of = |uid, resource: Resource| {
                let (held, Bound { total, per_uid }) =
                    (bounds.held(uid, resource), bounds.limits().of(resource));
                Use { uid, resource: resource.name().to_owned(), held, per_uid, total }
            };
            let each = seen.flat_map(|uid| Resource::ALL.map(|resource| of(uid, resource)));
            each.take(status::MAX_USES).collect()
        });
        Status { clients: core.conns.len() as u64, tiers: tiers.to_vec(), models, models_left_out, uses }
    }

    /// The models that a client may read.
    pub(in crate::server) fn list(&self, client: ClientId) -> serde_json::Value {
        let core = self.lock();
        let mut models = Vec::new();
        for (name, _, model) in core.names.iter().filter(|&(.., model)| core.engine.may_read(client, model)) {
            let Some(known) = core.models.get(&model) else { continue };
            let mut tiers = serde_json::Map::new();
            let mut layout =
                known.source.as_ref().map(|source| (source.layout.arena_bytes, source.layout.places.len()));
            for (tier, label) in [(MemoryTier::Gpu, "gpu"), (MemoryTier::Host, "host")] {
                let Some(arena) = core.engine.arena_of(model, tier) else { continue };
                let Some(view) = core.engine.arena(arena) else { continue };
                if let Some(held) = core.arenas.get(&arena) {
                    layout = Some((held.layout.arena_bytes, held.layout.places.len()));
                }
                let (state, references, names) = (view.state, view.references, view.names);
                tiers.insert(label.into(), json!({"state": state, "references": references, "names": names}));
            }
            models.push(json!({
                "name": name,
                "owner_uid": known.owner,
                "access": known.access,
                "bytes": layout.map(|(bytes, _)| bytes),
                "tensors": layout.map(|(_, tensors)| tensors),
                "content": core.engine.content_of(model).map(|content| content.to_string()),
                "source": known.source.is_some(),
                "tiers": tiers,
            }));
        }
        json!({ "models": models })
    }
}
