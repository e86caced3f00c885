//! Admission by time: whether the requests on one device can be met together.
//!
//! # Rule
//! Requests with a sum of at most the whole can be met one after the other. A larger sum can be met only side by side: each request
//! then needs a slot in every window ([`SlotTable::arrange`]), and at no instant may the SMs of the slots add up to more than the whole.
//! A request of 0 asks for nothing and is always met.
//!
//! Example: 60 % and 60 % of all SMs are refused, since they add up to 120 %. With half of the SMs each, the two run at the same time
//! and are admitted.
//!
//! A request reserved for an absent name counts like a request already there. Example: `a` is listed with 30 %; unlisted requests of
//! 99 % and 71 % are refused, a request of 70 % is admitted, and after it only a request of 0.
//!
//! # Cost
//! O(n) for n requests while they add up to at most the whole; O(n^3) otherwise, for at most 64.

use super::Percent;
use crate::pack::SlotTable;
use crate::token::MOST_SLOTS;
use gshare_core::{ConfigError, DeviceUuid, Quota, Share};

/// Requests on one device that cannot be met together.
#[derive(Debug)]
pub(super) struct Excess {
    /// The sum of the requests of instances already there.
    pub(super) taken: Percent,
    /// The sum of the requests reserved for others.
    pub(super) reserved: Percent,
}

impl Excess {
    /// The error of a configuration under which the requests meet. `None`: a device without an entry.
    pub(super) fn on(&self, uuid: Option<DeviceUuid>) -> ConfigError {
        let Self { taken, reserved } = self;
        let device = uuid.map_or_else(|| "any device".to_owned(), |uuid| format!("device `{uuid}`"));
        let bound = format!(
            "{taken} taken, {reserved} reserved for listed names: need at most 100%, or SMs that fit side by side"
        );
        ConfigError::new(format!("{device}: sum of requests"), Percent(taken.0 + reserved.0), bound)
    }
}

/// Checks the requests already there together with the requests reserved for others on one device. The check runs when a configuration
/// is read or reloaded, and when an instance attaches.
pub(super) fn check(there: &[Share], reserved: &[Share]) -> Result<(), Excess> {
    if can_be_met(&[there, reserved].concat()) {
        return Ok(());
    }
    Err(Excess { taken: Percent(sum(there)), reserved: Percent(sum(reserved)) })
}

/// Whether the requests of these shares can be met together.
fn can_be_met(shares: &[Share]) -> bool {
    let mut wants: Vec<_> = shares
        .iter()
        .filter(|share| !share.quota.request().is_zero())
        .map(|share| (share.quota.request(), share.sm))
        .collect();
    if sum(shares) <= u32::from(Quota::WHOLE.get()) {
        return true;
    }
    // The answer must not depend on the order of arrival, since a restarted daemon sees its clients in another order.
    wants.sort_unstable();
    let wants: Vec<_> = wants.into_iter().zip(0u32..).map(|((quota, sm), n)| (n, quota, sm)).collect();
    wants.len() <= MOST_SLOTS && SlotTable::arrange(&wants).is_some()
}

/// The sum of the requests, in basis points.
fn sum(shares: &[Share]) -> u32 {
    shares.iter().map(|share| u32::from(share.quota.request().get())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::SmShare;

    fn shares(list: &[(&str, u16)]) -> Vec<Share> {
        let share = |&(quota, sm): &(&str, u16)| Share {
            quota: quota.parse().unwrap(),
            sm: SmShare::from_percent(sm).unwrap(),
        };
        list.iter().map(share).collect()
    }

    #[test]
    fn requests_beyond_the_whole_are_met_only_side_by_side() {
        let met = |list: &[(&str, u16)]| can_be_met(&shares(list));
        assert!(met(&[("0.6:1", 100), ("0.4", 100)]));
        assert!(!met(&[("0.6:1", 100), ("0.41", 100)]));
        assert!(met(&[("1", 50), ("1", 50), ("0:1", 100)]), "a request of 0 is in no other's way");
        assert!(met(&[("0.2", 24), ("0.2", 80), ("0.4", 6), ("0.6", 100)]), "the example of the slot table");
        assert!(!met(&[("0.7", 40), ("0.7", 40), ("0.7", 40)]), "only two of them fit side by side");
    }
}
