//! The memory and the time that components need on the slices of a node.

use crate::pipeline::{Goal, Misfit, Node};
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::{Bytes, ProfileId};

/// Time in ns and memory in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) expected: u64,
    /// With every branch taken.
    pub(super) full: u64,
    pub(super) memory: u64,
}

impl Need {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            expected: self.expected + other.expected,
            full: self.full + other.full,
            memory: self.memory + other.memory,
        }
    }
}

/// A profile with free slices.
#[derive(Debug, Clone)]
pub(super) struct Offer {
    pub(super) profile: ProfileId,
    pub(super) count: u32,
    /// Memory for models: the slice's less the run-time's.
    pub(super) room: Option<u64>,
    pub(super) memory: u64,
    pub(super) compute_slices: u32,
    pub(super) memory_slices: u32,
    /// The need of each component on it; `None` where it has no profile.
    pub(super) needs: Vec<Option<Need>>,
}

impl Offer {
    /// The need of a part, if it fits.
    pub(super) fn need(&self, part: ComponentSet) -> Option<Need> {
        let need = part.iter().try_fold(Need::default(), |sum, one| Some(sum.plus(self.needs[one]?)))?;
        (need.memory <= self.room?).then_some(need)
    }
}

/// The profiles of which `node` has free slices, in the order of its model.
pub(super) fn offers(dag: &Dag, goal: &Goal, node: &Node) -> Vec<Offer> {
    let counts = node.free_counts();
    let offer = |id: ProfileId| {
        let (profile, count) = (node.model().get(id)?, counts[id.index()]);
        let need = |component: &gshare_core::dag::Component| {
            component.profile(&profile.name, goal.batch).map(|on| Need {
                expected: component.expected(on.time).as_nanos(),
                full: on.time.as_nanos(),
                memory: on.memory.get(),
            })
        };
        (count > 0).then(|| Offer {
            profile: id,
            count,
            room: profile.memory.checked_sub(goal.runtime_memory).map(Bytes::get),
            memory: profile.memory.get(),
            compute_slices: u32::from(profile.compute_slices),
            memory_slices: u32::from(profile.memory_slices),
            needs: dag.components().iter().map(need).collect(),
        })
    };
    node.model().ids().filter_map(offer).collect()
}

/// Why `part` fits no offer.
pub(super) fn misfit(dag: &Dag, goal: &Goal, node: &Node, offers: &[Offer], part: ComponentSet) -> Misfit {
    let by_memory = |offer: &&Offer| (offer.memory, offer.profile);
    let Some(largest) = offers.iter().max_by_key(by_memory) else { return Misfit::NothingFree };
    let memory =
        |offer: &Offer| part.iter().try_fold(0, |sum, one| offer.needs[one].map(|need| sum + need.memory));
    let profiled = offers.iter().filter(|offer| memory(offer).is_some()).max_by_key(by_memory);
    if let Some((offer, memory)) = profiled.and_then(|offer| Some((offer, memory(offer)?))) {
        let needed = Bytes(memory.saturating_add(goal.runtime_memory.get()));
        return Misfit::Memory { needed, largest: Bytes(offer.memory) };
    }
    let missing = part.iter().find(|&one| largest.needs[one].is_none());
    let component = missing.map(|one| dag.components()[one].name.clone()).unwrap_or_default();
    let slice = node.model().get(largest.profile).map(|profile| profile.name.clone().into_owned());
    Misfit::NoProfile { component, slice: slice.unwrap_or_default(), batch: goal.batch }
}
