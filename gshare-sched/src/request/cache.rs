//! The cache manager: the models in a GPU's memory, and the victims of a load (GPU-enabled FaaS, section III-D).
//!
//! # Algorithm
//! To make room for a model, copies that no request uses and that are not pinned are taken in the order of the policy, the
//! least worth keeping first, until they suffice. Then every victim that is superfluous is put back, the most worth keeping
//! first: an early small victim is not lost when a later large one makes the room alone. If all of them together do not
//! suffice, nothing is evicted.
//!
//! ## Example
//! 1 GB is free, 4 GB are needed. Least recently used first: A 1 GB, B 3 GB, C 2 GB. A and B suffice. Without B 1 GB is
//! missing, without A nothing is: A is put back, B goes.
//!
//! # Differences from the paper
//! The paper evicts in the order of the LRU list and does not put back.

use gshare_core::ModelId;

/// The state of a copy. A model without a copy is in the fourth state, Empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyState {
    /// Room is being made, or the load runs.
    Loading,
    /// The copy can serve.
    Resident,
    /// The eviction was ordered but not yet reported.
    Evicting,
}

/// A model in the memory of one GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelCopy {
    pub(super) model: u32,
    pub(super) bytes: u64,
    pub(super) state: CopyState,
    /// Requests that run on the copy or wait for it here. It is not evicted while this is above 0.
    pub(super) users: u32,
    /// Serial number of its last use.
    pub(super) used: u64,
    /// Uses since it was loaded.
    pub(super) uses: u64,
    /// Greedy-dual priority: larger is kept longer.
    pub(super) priority: u64,
    /// The tenant it was loaded for.
    pub(super) owner: u32,
}

impl ModelCopy {
    /// Whether it counts as cached: from the decision to load it until the decision to evict it.
    pub(super) fn is_cached(&self) -> bool {
        self.state != CopyState::Evicting
    }
}

/// The victims that make `missing` bytes of room, by the order of `worth`: `None` when there are not enough.
pub(super) fn victims<W: Ord>(
    copies: &[ModelCopy],
    pins: &[u32],
    missing: u64,
    worth: impl Fn(&ModelCopy) -> W,
) -> Option<Vec<ModelId>> {
    if missing == 0 {
        return Some(Vec::new());
    }
    let mut order: Vec<(W, u32, u64)> = copies
        .iter()
        .filter(|copy| copy.state == CopyState::Resident && copy.users == 0 && !pins.contains(&copy.model))
        .map(|copy| (worth(copy), copy.model, copy.bytes))
        .collect();
    order.sort_unstable();
    let mut freed = 0;
    let mut taken = 0;
    while freed < missing {
        freed += order.get(taken)?.2;
        taken += 1;
    }
    order.truncate(taken);
    for index in (0..order.len()).rev() {
        let bytes = order[index].2;
        if freed - bytes >= missing {
            freed -= bytes;
            order.remove(index);
        }
    }
    Some(order.into_iter().map(|(_, model, _)| ModelId::new(model)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn copies(sizes: &[u64]) -> Vec<ModelCopy> {
        (0..)
            .zip(sizes)
            .map(|(model, &bytes)| ModelCopy {
                model,
                bytes,
                state: CopyState::Resident,
                users: 0,
                used: u64::from(model),
                uses: 1,
                priority: 0,
                owner: 0,
            })
            .collect()
    }

    #[test]
    fn hole_13_superfluous_victims_are_put_back() {
        assert_eq!(victims(&copies(&[1, 3, 2]), &[], 3, |copy| copy.used), Some(vec![ModelId::new(1)]));
        assert_eq!(
            victims(&copies(&[1, 3, 2]), &[1], 3, |copy| copy.used),
            Some(vec![ModelId::new(0), ModelId::new(2)])
        );
    }

    proptest! {
        /// Victims suffice, none is superfluous, none is in use or pinned; and there are none only if nothing helps.
        #[test]
        fn victims_suffice_and_none_is_superfluous(
            sizes in prop::collection::vec(1u64..9, 0..8), users in any::<u8>(), pin in 0u32..9, missing in 0u64..40,
        ) {
            let mut copies = copies(&sizes);
            for copy in &mut copies {
                copy.users = u32::from(users >> copy.model & 1);
            }
            let free = |copy: &&ModelCopy| copy.users == 0 && copy.model != pin;
            match victims(&copies, &[pin], missing, |copy| copy.used) {
                None => prop_assert!(copies.iter().filter(free).map(|copy| copy.bytes).sum::<u64>() < missing),
                Some(victims) => {
                    let bytes = |model: &ModelId| copies[model.index()].bytes;
                    let freed: u64 = victims.iter().map(bytes).sum();
                    prop_assert!(freed >= missing);
                    for victim in &victims {
                        prop_assert!(free(&&copies[victim.index()]));
                        prop_assert!(freed - bytes(victim) < missing);
                    }
                }
            }
        }
    }
}
