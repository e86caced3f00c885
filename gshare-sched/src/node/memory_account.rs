//! Memory accounts: the reservations of every client on every GPU.
//!
//! # Problem
//! Two processes look at the free memory, both find enough, and both allocate: together they take too much. A process must therefore
//! reserve memory here **before** it allocates, and one ledger sees every reservation of the node.
//!
//! # Terms
//! - **device account**: the memory of all clients of one GPU; at most the device's, less a headroom for contexts and code.
//! - **tenant account**: the memory of one instance on one GPU, over all its processes; at most the memory of its spec.
//! - **client account**: the memory of one process on one GPU; freed as a whole when the process dies.
//!
//! # Algorithm
//! A reservation has a need (`bytes`) and a `wish`, since with more than the need a client serves small allocations without another
//! question. The ledger gives `min(wish, free)` if `free` is at least `bytes`, else nothing. `free` is the smaller remainder of the
//! tenant's and the device's limit. Example: with limit 256 MiB and 250 MiB held, reserve(bytes 4 MiB, wish 16 MiB) gives 6 MiB, and
//! reserve(8 MiB) is denied with 6 MiB free.
//!
//! Without a daemon each process of an instance may hold its **part** of the limit and no more. The parts add up to the limit at most, so
//! the limit holds without a daemon too. A part is the memory of its process and an even share of the free memory ([`parts`]). The node
//! divides the parts again when a process comes or goes, and when a grant passes the part of its process; smaller parts are sent before
//! the grant. Example: with limit 1 GiB, A holding 700 MiB and B nothing, the parts are 862 and 162 MiB.
//!
//! After a reconnect a client states its memory again. Its tenant's account takes the figure as it is, even past a limit, because the
//! memory is allocated and a refusal would not free it. The client gets nothing more until the account is below the limit again. The
//! device's account takes no more of the figure than the tenant's limit leaves: a client with an inflated statement runs short of memory
//! itself, and takes none from others.
//!
//! # Invariants
//! Each tenant's account is the sum of its clients' accounts. Each device's account is the same sum over its clients, less the memory
//! re-stated beyond a tenant's limit. No account passes its limit by a reservation.
//!
//! # Cost
//! Every operation is a few map look-ups in the number of tenants of one GPU.

use gshare_core::{Bytes, GpuId};
use std::collections::BTreeMap;

/// One instance on one GPU.
pub(super) type Tenant = (GpuId, u32);

#[derive(Debug, Clone, Copy, Default)]
struct Account {
    limit: Option<Bytes>,
    held: Bytes,
}

impl Account {
    fn free(&self) -> Bytes {
        self.limit.map_or(Bytes(u64::MAX), |limit| limit.saturating_sub(self.held))
    }
}

/// A denied reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Denied {
    /// The bytes still free.
    pub(super) free: Bytes,
}

/// The accounts of a node. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Ledger {
    devices: BTreeMap<GpuId, Account>,
    tenants: BTreeMap<Tenant, Account>,
}

/// One client's account; kept by its owner, changed by the [`Ledger`] only.
#[derive(Debug)]
pub(super) struct ClientAccount {
    tenant: Tenant,
    held: Bytes,
    /// The part of `held` in the device's account: all but the memory re-stated beyond the tenant's limit.
    counted: Bytes,
}

impl ClientAccount {
    pub(super) fn held(&self) -> Bytes {
        self.held
    }
}

impl Ledger {
    /// Sets the limit of all clients of a GPU together.
    pub(super) fn set_device(&mut self, gpu: GpuId, limit: Bytes) {
        self.devices.entry(gpu).or_default().limit = Some(limit);
    }

    /// Sets the limit of a tenant, which keeps its memory even past the limit.
    pub(super) fn set_tenant(&mut self, tenant: Tenant, limit: Option<Bytes>) {
        self.tenants.entry(tenant).or_default().limit = limit;
    }

    /// Opens the account of a client with its allocated memory, as the client states it.
    pub(super) fn open(&mut self, tenant: Tenant, allocated: Bytes) -> ClientAccount {
        let mut account = ClientAccount { tenant, held: Bytes::ZERO, counted: Bytes::ZERO };
        let within = allocated.min(self.tenant_free(tenant));
        self.add(&mut account, within);
        let beyond = allocated.saturating_sub(account.held);
        // The sums must not overflow, for claims of any size.
        let entry = self.tenants.entry(tenant).or_default();
        let beyond = beyond.min(Bytes(u64::MAX - entry.held.0));
        entry.held = entry.held + beyond;
        account.held = account.held + beyond;
        account
    }

    /// Closes the account of a client and frees its memory.
    pub(super) fn close(&mut self, account: ClientAccount) {
        let mut account = account;
        let held = account.held;
        self.subtract(&mut account, held);
    }

    /// Forgets a tenant without clients.
    pub(super) fn forget(&mut self, tenant: Tenant) {
        let left = self.tenants.remove(&tenant);
        debug_assert!(left.is_none_or(|account| account.held == Bytes::ZERO));
    }

    /// Gives between `bytes` and `wish`, or nothing.
    pub(super) fn reserve(
        &mut self,
        account: &mut ClientAccount,
        bytes: Bytes,
        wish: Bytes,
    ) -> Result<Bytes, Denied> {
        let free = self.free(account.tenant).min(Bytes(u64::MAX - self.tenant_held(account.tenant).0));
        if bytes > free {
            return Err(Denied { free });
        }
        let given = wish.max(bytes).min(free);
        self.add(account, given);
        Ok(given)
    }

    /// Takes `bytes` back. `false`, and no change, when the client does not hold so much.
    #[must_use]
    pub(super) fn release(&mut self, account: &mut ClientAccount, bytes: Bytes) -> bool {
        let fits = bytes <= account.held;
        if fits {
            self.subtract(account, bytes);
        }
        fits
    }

    /// Bytes still free for a tenant.
    pub(super) fn free(&self, tenant: Tenant) -> Bytes {
        let device = self.devices.get(&tenant.0).copied().unwrap_or_default();
        let own = self.tenants.get(&tenant).copied().unwrap_or_default();
        // Accounts add up within u64, for limits of any size.
        device.free().min(own.free()).min(Bytes(u64::MAX - device.held.0))
    }

    /// Bytes below the limit of the tenant, without regard to the device.
    pub(super) fn tenant_free(&self, tenant: Tenant) -> Bytes {
        self.tenants.get(&tenant).copied().unwrap_or_default().free()
    }

    /// The limit of a tenant.
    pub(super) fn tenant_limit(&self, tenant: Tenant) -> Option<Bytes> {
        self.tenants.get(&tenant)?.limit
    }

    /// The limit of all clients of a GPU; without a bound `u64::MAX`.
    pub(super) fn device_limit(&self, gpu: GpuId) -> Bytes {
        self.devices.get(&gpu).and_then(|account| account.limit).unwrap_or(Bytes(u64::MAX))
    }

    /// Bytes of all clients of a GPU.
    pub(super) fn device_held(&self, gpu: GpuId) -> Bytes {
        self.devices.get(&gpu).map_or(Bytes::ZERO, |account| account.held)
    }

    /// Bytes of a tenant.
    pub(super) fn tenant_held(&self, tenant: Tenant) -> Bytes {
        self.tenants.get(&tenant).map_or(Bytes::ZERO, |account| account.held)
    }

    fn add(&mut self, account: &mut ClientAccount, bytes: Bytes) {
        let device = self.devices.entry(account.tenant.0).or_default();
        // Only a stated account can be so large; the ledger cuts it, so no sum overflows.
        let bytes = bytes.min(Bytes(u64::MAX - device.held.0));
        device.held = device.held + bytes;
        let tenant = self.tenants.entry(account.tenant).or_default();
        tenant.held = tenant.held + bytes;
        (account.held, account.counted) = (account.held + bytes, account.counted + bytes);
    }

    /// Takes memory back, first the memory missing from the device's account.
    fn subtract(&mut self, account: &mut ClientAccount, bytes: Bytes) {
        account.held = account.held - bytes;
        let counted = account.counted.min(account.held);
        let device = self.devices.entry(account.tenant.0).or_default();
        device.held = device.held - (account.counted - counted);
        account.counted = counted;
        let tenant = self.tenants.entry(account.tenant).or_default();
        tenant.held = tenant.held - bytes;
    }
}

/// The parts of processes under a limit: the memory of each, and an even share of the free memory.
pub(super) fn parts(limit: Bytes, held: &[Bytes]) -> Vec<Bytes> {
    let free = limit.saturating_sub(held.iter().copied().sum()).0;
    let n = held.len().max(1) as u64;
    let part = |(index, held): (u64, &Bytes)| Bytes(held.0 + free / n + u64::from(index < free % n));
    (0..).zip(held).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GPU: GpuId = GpuId::new(0);
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_wish_is_met_as_far_as_the_limit_goes_and_a_need_wholly_or_not_at_all() {
        let mut ledger = Ledger::default();
        ledger.set_device(GPU, Bytes::from_gib(1));
        ledger.set_tenant((GPU, 0), Some(Bytes(256 * MIB)));
        let mut client = ledger.open((GPU, 0), Bytes(250 * MIB));
        let denied = ledger.reserve(&mut client, Bytes(8 * MIB), Bytes(8 * MIB));
        assert_eq!(denied, Err(Denied { free: Bytes(6 * MIB) }));
        assert_eq!(ledger.reserve(&mut client, Bytes(4 * MIB), Bytes(16 * MIB)), Ok(Bytes(6 * MIB)));
        assert!(!ledger.release(&mut client, Bytes(257 * MIB)), "more than it holds");
        assert!(ledger.release(&mut client, Bytes(56 * MIB)));
        assert_eq!(ledger.tenant_held((GPU, 0)), Bytes(200 * MIB));
    }

    #[test]
    fn two_tenants_cannot_both_have_the_last_of_a_device() {
        let mut ledger = Ledger::default();
        ledger.set_device(GPU, Bytes(100));
        let mut one = ledger.open((GPU, 0), Bytes::ZERO);
        let mut other = ledger.open((GPU, 1), Bytes::ZERO);
        assert_eq!(ledger.reserve(&mut one, Bytes(60), Bytes(60)), Ok(Bytes(60)));
        assert_eq!(ledger.reserve(&mut other, Bytes(60), Bytes(60)), Err(Denied { free: Bytes(40) }));
        ledger.close(one);
        assert_eq!(ledger.reserve(&mut other, Bytes(60), Bytes(60)), Ok(Bytes(60)));
    }

    #[test]
    fn what_is_re_stated_past_a_limit_is_written_down_and_blocks_more() {
        let mut ledger = Ledger::default();
        ledger.set_device(GPU, Bytes(100));
        let mut client = ledger.open((GPU, 0), Bytes(130));
        assert_eq!(ledger.device_held(GPU), Bytes(130));
        assert_eq!(ledger.reserve(&mut client, Bytes(1), Bytes(1)), Err(Denied { free: Bytes::ZERO }));
        assert!(ledger.release(&mut client, Bytes(31)));
        assert_eq!(ledger.reserve(&mut client, Bytes(1), Bytes(9)), Ok(Bytes(1)));
        // Memory stated beyond the limit of a tenant burdens this tenant only.
        assert!(ledger.release(&mut client, Bytes(100)));
        ledger.set_tenant((GPU, 2), Some(Bytes(1)));
        let mut liar = ledger.open((GPU, 2), Bytes(99));
        assert_eq!((ledger.device_held(GPU), ledger.tenant_held((GPU, 2))), (Bytes(1), Bytes(99)));
        assert_eq!(
            ledger.reserve(&mut client, Bytes(99), Bytes(99)),
            Ok(Bytes(99)),
            "the other has its memory"
        );
        assert_eq!(ledger.reserve(&mut liar, Bytes(1), Bytes(1)), Err(Denied { free: Bytes::ZERO }));
        assert!(ledger.release(&mut liar, Bytes(98)));
        assert_eq!(ledger.device_held(GPU), Bytes(100), "what was never counted goes first");
        ledger.close(liar);
        assert!(ledger.release(&mut client, Bytes(1)));
        assert_eq!(ledger.reserve(&mut client, Bytes(1), Bytes(2)), Ok(Bytes(2)));
        let huge = ledger.open((GPU, 1), Bytes(u64::MAX));
        ledger.close(huge);
        assert_eq!(ledger.device_held(GPU), Bytes(100));
    }

    #[test]
    fn parts_add_up_to_the_limit_or_to_what_is_held_beyond_it() {
        let sum = |limit: u64, held: &[u64]| {
            let held: Vec<_> = held.iter().copied().map(Bytes).collect();
            let parts = parts(Bytes(limit), &held);
            assert!(parts.iter().zip(&held).all(|(part, held)| part >= held));
            parts.iter().map(|part| part.0).sum::<u64>()
        };
        assert_eq!((sum(100, &[70, 0, 7]), sum(100, &[0]), sum(100, &[100, 0])), (100, 100, 100));
        assert_eq!(sum(100, &[90, 30]), 120, "re-stated");
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Reserve { client: usize, bytes: u64, wish: u64 },
        Release { client: usize, bytes: u64 },
        Restart { client: usize, allocated: u64 },
        Limit { tenant: u32, limit: Option<u64> },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0usize..6, 0u64..40, 0u64..60)
                .prop_map(|(client, bytes, wish)| Step::Reserve { client, bytes, wish }),
            3 => (0usize..6, 0u64..60).prop_map(|(client, bytes)| Step::Release { client, bytes }),
            1 => (0usize..6, 0u64..30).prop_map(|(client, allocated)| Step::Restart { client, allocated }),
            1 => (0u32..3, prop::option::of(0u64..100)).prop_map(|(tenant, limit)| Step::Limit { tenant, limit }),
        ]
    }

    proptest! {
        /// The model keeps one number per client and adds them up again each time.
        #[test]
        fn the_ledger_agrees_with_adding_up_every_client(steps in prop::collection::vec(step(), 0..200)) {
            const DEVICE: u64 = 150;
            let mut ledger = Ledger::default();
            ledger.set_device(GPU, Bytes(DEVICE));
            let tenant_of = |client: usize| (GPU, u32::try_from(client % 3).unwrap());
            let mut accounts: Vec<_> = (0..6).map(|n| Some(ledger.open(tenant_of(n), Bytes::ZERO))).collect();
            let (mut held, mut counted, mut limits) = ([0u64; 6], [0u64; 6], [None; 3]);
            for step in steps {
                match step {
                    Step::Reserve { client, bytes, wish } => {
                        let tenant: u64 = (0..6).filter(|n| n % 3 == client % 3).map(|n| held[n]).sum();
                        let all: u64 = counted.iter().sum();
                        let own = limits[client % 3].map_or(u64::MAX, |limit: u64| limit.saturating_sub(tenant));
                        let free = DEVICE.saturating_sub(all).min(own);
                        let given = ledger.reserve(accounts[client].as_mut().unwrap(), Bytes(bytes), Bytes(wish));
                        if bytes > free {
                            prop_assert_eq!(given, Err(Denied { free: Bytes(free) }));
                        } else {
                            let expected = wish.max(bytes).min(free);
                            prop_assert_eq!(given, Ok(Bytes(expected)));
                            held[client] += expected;
                            counted[client] += expected;
                        }
                    }
                    Step::Release { client, bytes } => {
                        let fits = ledger.release(accounts[client].as_mut().unwrap(), Bytes(bytes));
                        prop_assert_eq!(fits, bytes <= held[client]);
                        held[client] -= if fits { bytes } else { 0 };
                        counted[client] = counted[client].min(held[client]);
                    }
                    Step::Restart { client, allocated } => {
                        ledger.close(accounts[client].take().unwrap());
                        accounts[client] = Some(ledger.open(tenant_of(client), Bytes(allocated)));
                        held[client] = allocated;
                        let siblings: u64 = (0..6).filter(|n| n % 3 == client % 3 && *n != client).map(|n| held[n]).sum();
                        let left = limits[client % 3].map_or(u64::MAX, |limit: u64| limit.saturating_sub(siblings));
                        counted[client] = allocated.min(left);
                    }
                    Step::Limit { tenant, limit } => {
                        ledger.set_tenant((GPU, tenant), limit.map(Bytes));
                        limits[tenant as usize] = limit;
                    }
                }
                prop_assert_eq!(ledger.device_held(GPU), Bytes(counted.iter().sum()));
                for n in 0..3 {
                    let sum = held[n] + held[n + 3];
                    prop_assert_eq!(ledger.tenant_held(tenant_of(n)), Bytes(sum));
                }
            }
        }
    }
}
