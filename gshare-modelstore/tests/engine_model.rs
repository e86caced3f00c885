//! The store against its literal model and a book of references, charges and memory, on random histories; and a client
//! that dies at every step of a put.

#[path = "support/ops.rs"]
mod ops;

use gshare_core::{Bytes, ClientId, Engine, GroupId, ModelId, TenantId, TicketId, Timestamp};
use gshare_modelstore::engine::{Store, StoreConfig};
use gshare_modelstore::store::{
    Access, ArenaState, ContentHash, MemoryTier, ModelStore, RefuseReason, StoreAction, StoreEvent,
};
use ops::store_history::StoreOp;
use proptest::prelude::*;

fn op() -> impl Strategy<Value = StoreOp> {
    let b = any::<u8>;
    prop_oneof![
        3 => (0u16..1_500).prop_map(|millis| StoreOp::Wait { millis }),
        2 => Just(StoreOp::Deadline),
        4 => (b(), b(), b()).prop_map(|(slot, tenant, group)| StoreOp::Join { slot, tenant, group }),
        1 => b().prop_map(|slot| StoreOp::Leave { slot }),
        1 => (b(), 0u8..60, 0u8..8, prop_oneof![Just(0), 0u8..250])
            .prop_map(|(tenant, units, models, interval_ms)| StoreOp::Limit { tenant, units, models, interval_ms }),
        4 => (b(), b(), b(), b(), 0u16..9_000)
            .prop_map(|(model, owner, access, units, reload_ms)| StoreOp::Add { model, owner, access, units, reload_ms }),
        12 => (b(), b(), any::<bool>(), 0u16..4_000)
            .prop_map(|(slot, model, gpu, patience_ms)| StoreOp::Ask { slot, model, gpu, patience_ms }),
        3 => (b(), b(), any::<bool>(), b(), b())
            .prop_map(|(slot, model, gpu, units, access)| StoreOp::Put { slot, model, gpu, units, access }),
        3 => (b(), prop::bool::weighted(0.2)).prop_map(|(which, abort)| StoreOp::Written { which, abort }),
        14 => (b(), b(), prop::bool::weighted(0.1))
            .prop_map(|(which, content, fails)| StoreOp::Answer { which, content, fails }),
        7 => (b(), b()).prop_map(|(slot, which)| StoreOp::Release { slot, which }),
        1 => (b(), b(), any::<bool>()).prop_map(|(slot, model, pinned)| StoreOp::Pin { slot, model, pinned }),
        1 => (b(), b(), any::<bool>()).prop_map(|(slot, model, forget)| StoreOp::Evict { slot, model, forget }),
        1 => (b(), b()).prop_map(|(slot, kind)| StoreOp::Nonsense { slot, kind }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// References are exact, nothing referenced is evicted, no quota and no tier is passed, nothing half-written is served, and every
    /// decision agrees with the literal rules.
    #[test]
    fn the_store_decides_as_its_rules_say(shape in any::<u8>(), history in prop::collection::vec(op(), 1..250)) {
        ops::play(shape, history).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn what_was_found_once_stays_found() {
    let found = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/regressions/store");
    let mut played = 0;
    for entry in std::fs::read_dir(found).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let (shape, ops): (u8, Vec<StoreOp>) = serde_json::from_str(&text).unwrap();
        ops::play(shape, ops).unwrap_or_else(|wrong| panic!("{}: {wrong}", path.display()));
        played += 1;
    }
    assert!(played > 0);
}

#[test]
fn random_histories_see_every_order_and_every_refusal() {
    use proptest::strategy::ValueTree as _;
    let mut seen = std::collections::BTreeMap::new();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let history = prop::collection::vec(op(), 100..250);
    for shape in 0..250 {
        let ops = history.new_tree(&mut runner).unwrap().current();
        for (kind, count) in ops::play(shape, ops).unwrap() {
            *seen.entry(kind).or_insert(0) += count;
        }
    }
    let all = [
        "Load",
        "LoadFromHost",
        "LoadFromGpu",
        "Write",
        "Seal",
        "Serve",
        "Stored",
        "Done",
        "Evict",
        "Forgotten",
        "UnknownModel",
        "NotAllowed",
        "NameTaken",
        "ModelTooLarge",
        "StoreFull",
        "TenantBytes",
        "TenantModels",
        "TenantLoads",
        "NotResident",
        "LoadFailed",
        "TimedOut",
        "InUse",
        "TooManyModels",
    ];
    for kind in all {
        assert!(seen.get(kind).is_some_and(|&count| count >= 10), "{kind} is not tested: {seen:?}");
    }
}

const WRITER: ClientId = ClientId::new(0, 0);
const READER: ClientId = ClientId::new(1, 0);
const MODEL: ModelId = ModelId::new(0);

struct Put {
    store: Store,
    seen: Vec<StoreAction>,
}

impl Put {
    fn new() -> Self {
        let mut config = StoreConfig::default();
        config.host = Bytes(1_000);
        let mut put = Self { store: Store::new(config).unwrap(), seen: Vec::new() };
        for client in [WRITER, READER] {
            put.tell(StoreEvent::ClientJoined {
                client,
                tenant: TenantId::new(1),
                group: GroupId::new(1),
                admin: false,
            });
        }
        put
    }

    fn tell(&mut self, event: StoreEvent) -> Vec<StoreAction> {
        let actions = self.store.orders(Timestamp::ZERO, event).unwrap();
        self.seen.extend(&actions);
        actions
    }

    fn ask(&mut self, ticket: u64) {
        let (ticket, tier, deadline) =
            (TicketId::new(ticket), MemoryTier::Host, Timestamp::from_millis(1_000));
        self.tell(StoreEvent::Asked { client: READER, ticket, model: MODEL, tier, deadline });
    }

    /// A put that a reader waits for, up to `steps` of its steps.
    fn run(&mut self, steps: usize) {
        let tier = MemoryTier::Host;
        let (client, model, bytes, access) = (WRITER, MODEL, Bytes(900), Access::Private);
        let mut arena = None;
        for step in 0..steps {
            match step {
                0 => {
                    self.tell(StoreEvent::PutBegun {
                        client,
                        ticket: TicketId::new(0),
                        model,
                        tier,
                        bytes,
                        access,
                    });
                    arena = self.store.arena_of(MODEL, tier);
                }
                1 => self.ask(1),
                2 => drop(self.tell(StoreEvent::PutCommitted {
                    client,
                    ticket: TicketId::new(2),
                    arena: arena.unwrap(),
                })),
                3 => drop(
                    self.tell(StoreEvent::Loaded { arena: arena.unwrap(), content: ContentHash([7; 32]) }),
                ),
                _ => unreachable!(),
            }
        }
    }
}

#[test]
fn a_writer_that_dies_at_any_step_leaves_all_of_the_model_or_nothing_of_it() {
    for steps in 0..=4 {
        let mut put = Put::new();
        put.run(steps);
        put.tell(StoreEvent::ClientLeft { client: WRITER });
        let served = |put: &Put| put.seen.iter().any(|action| matches!(action, StoreAction::Serve { .. }));
        let arena = put.store.arena_of(MODEL, MemoryTier::Host);
        if steps < 3 {
            assert!(!served(&put), "{steps} steps: half a model was served");
            assert_eq!(arena, None, "{steps} steps: half a model is there");
            let refused = |action: &StoreAction| {
                matches!(action, StoreAction::Refuse { client: READER, reason: RefuseReason::LoadFailed, .. })
            };
            assert_eq!(put.seen.iter().any(refused), steps == 2, "{steps} steps: who waits is told");
            for gone in put.store.arenas() {
                assert_eq!(gone.state, ArenaState::Evicting);
                put.tell(StoreEvent::Evicted { arena: gone.arena });
            }
            assert_eq!(put.store.promised(MemoryTier::Host), Bytes::ZERO);
            // The name is free and so is the memory.
            put.tell(StoreEvent::ClientJoined {
                client: WRITER,
                tenant: TenantId::new(1),
                group: GroupId::new(1),
                admin: false,
            });
            put.seen.clear();
            put.run(4);
            assert!(served(&put));
        } else {
            // A committed model stands after the death of its writer.
            if steps == 3 {
                put.tell(StoreEvent::Loaded { arena: arena.unwrap(), content: ContentHash([7; 32]) });
            }
            assert!(served(&put), "{steps} steps: the reader that waited has it");
            assert_eq!(put.store.arena(arena.unwrap()).unwrap().state, ArenaState::Committed);
        }
    }
}

#[test]
fn a_hundred_requests_for_one_model_are_one_load() {
    let mut config = StoreConfig::default();
    config.host = Bytes(1_000);
    let mut store = Store::new(config).unwrap();
    let mut actions = Vec::new();
    let mut tell = |event| store.handle(Timestamp::ZERO, event, &mut actions).unwrap();
    let reload = gshare_core::Duration::from_secs(1);
    let (owner, group, access, bytes) = (TenantId::new(0), GroupId::new(0), Access::Public, Bytes(10));
    tell(StoreEvent::ModelAdded { model: MODEL, owner, group, access, bytes, reload });
    for name in 0..100 {
        let client = ClientId::new(name, 0);
        tell(StoreEvent::ClientJoined {
            client,
            tenant: TenantId::new(name),
            group: GroupId::new(name),
            admin: false,
        });
        let (ticket, tier, deadline) =
            (TicketId::new(u64::from(name)), MemoryTier::Host, Timestamp::from_millis(9));
        tell(StoreEvent::Asked { client, ticket, model: MODEL, tier, deadline });
    }
    let loads = actions.iter().filter(|action| matches!(action, StoreAction::Load { .. }));
    assert_eq!(loads.count(), 1);
    let StoreAction::Load { arena, .. } = actions[0] else { panic!("{actions:?}") };
    store
        .handle(Timestamp::ZERO, StoreEvent::Loaded { arena, content: ContentHash([1; 32]) }, &mut actions)
        .unwrap();
    assert_eq!(store.arena(arena).unwrap().references, 100);
}
