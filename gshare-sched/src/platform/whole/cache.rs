//! The models that leave a device for another model (GPU-enabled FaaS, section III-D).
//!
//! # Algorithm
//! To make room for a model, copies that no request uses and that are not kept are taken in the order of the policy, the
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

use super::devices::ModelCopy;
use gshare_core::FunctionId;

/// The victims that make `missing` bytes of room, in `order`: `None` when there are not enough.
pub(super) fn victims(
    copies: &[ModelCopy],
    missing: u64,
    order: &dyn Fn(&ModelCopy) -> (u64, u64),
) -> Option<Vec<FunctionId>> {
    if missing == 0 {
        return Some(Vec::new());
    }
    let free = copies.iter().filter(|copy| copy.may_leave());
    let mut sorted: Vec<((u64, u64), FunctionId, u64)> =
        free.map(|copy| (order(copy), copy.function, copy.bytes)).collect();
    sorted.sort_unstable();
    let mut freed = 0;
    let mut taken = 0;
    while freed < missing {
        freed += sorted.get(taken)?.2;
        taken += 1;
    }
    sorted.truncate(taken);
    for index in (0..sorted.len()).rev() {
        let bytes = sorted[index].2;
        if freed - bytes >= missing {
            freed -= bytes;
            sorted.remove(index);
        }
    }
    Some(sorted.into_iter().map(|(_, function, _)| function).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::whole::devices::CopyState;
    use proptest::prelude::*;

    fn copies(sizes: &[u64]) -> Vec<ModelCopy> {
        (0..)
            .zip(sizes)
            .map(|(number, &bytes)| ModelCopy {
                function: FunctionId::new(number),
                bytes,
                state: CopyState::Resident,
                instance: None,
                users: 0,
                used: u64::from(number),
                kept: false,
            })
            .collect()
    }

    fn oldest(copies: &[ModelCopy], missing: u64) -> Option<Vec<u32>> {
        let victims = victims(copies, missing, &|copy| (copy.used, 0))?;
        Some(victims.into_iter().map(FunctionId::number).collect())
    }

    #[test]
    fn hole_13_superfluous_victims_are_put_back() {
        let mut copies = copies(&[1, 3, 2]);
        assert_eq!(oldest(&copies, 3), Some(vec![1]));
        copies[1].kept = true;
        assert_eq!(oldest(&copies, 3), Some(vec![0, 2]));
    }

    proptest! {
        /// Victims suffice, none is superfluous, none is in use or kept; and there are none only if nothing helps.
        #[test]
        fn victims_suffice_and_none_is_superfluous(
            sizes in prop::collection::vec(1u64..9, 0..8), users in any::<u8>(), kept in 0u32..9, missing in 0u64..40,
        ) {
            let mut copies = copies(&sizes);
            for copy in &mut copies {
                copy.users = u32::from(users >> copy.function.number() & 1);
                copy.kept = copy.function.number() == kept;
            }
            let free = |copy: &&ModelCopy| copy.users == 0 && !copy.kept;
            match oldest(&copies, missing) {
                None => prop_assert!(copies.iter().filter(free).map(|copy| copy.bytes).sum::<u64>() < missing),
                Some(victims) => {
                    let bytes = |number: &u32| copies[*number as usize].bytes;
                    let freed: u64 = victims.iter().map(bytes).sum();
                    prop_assert!(freed >= missing);
                    for victim in &victims {
                        prop_assert!(free(&&copies[*victim as usize]));
                        prop_assert!(freed - bytes(victim) < missing);
                    }
                }
            }
        }
    }
}
