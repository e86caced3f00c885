//! Bounds on each uid's use of a store, so that no uid can starve the others.
//!
//! # Problem
//! A store serves every user of a machine from one process. Its descriptors, its connections and the memory beside its
//! arenas are finite, and a client can ask for all of them: with many small models, many connections, unread answers, or
//! headers of 100 MB. So one uid may take only a part of each resource.
//!
//! # Terms
//! - **resource**: see [`Resource`]; each has a [`Bound`] with a total and a part for one uid;
//! - **operator**: root, and the uid of the store; every other uid is a **tenant**.
//!
//! # Rules
//! With `T` the total and `p` the part of one uid, `3 p <= T`:
//! 1. a tenant has at most `p`;
//! 2. all tenants together have at most `T - p`;
//! 3. the operator has at most `T - p`;
//! 4. all together have at most `T`.
//!
//! So every uid can have `p`, whatever one other uid does. The operator can have `p` whatever all tenants do together:
//! enough to inspect the store and to evict their models.
//!
//! A user with several uids, for example in a user namespace, has the part of each; only rule 2 limits such a user.
//!
//! Header work is a rate: a uid may have `burst` bytes of headers parsed at once, and `rate` bytes per second afterwards.
//!
//! Example: of 1,024 descriptors 480 are for models, and 120 of them for each tenant. A tenant with models of 5 descriptors
//! each is refused the 25th model; 24 models of another tenant still fit, and so do the operator's.
//!
//! # Cost
//! `take` and `give` are O(log uids). Memory: one row per uid with a resource, and one per uid with unfinished header work.

#![forbid(unsafe_code)]

use crate::engine::StoreConfig;
use gshare_core::{Bytes, ConfigError, Duration, Timestamp};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A resource that is counted for each uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Connections: open ones, and ended ones with answers that their client has not yet read or dropped.
    Connections,
    /// Descriptors that the store keeps open for models: sources, arenas and manifests.
    Descriptors,
    /// Descriptors in answers that were sent but not read. The kernel limits their number for all processes of the store's
    /// user together (`RLIMIT_NOFILE`), and refuses further answers.
    Unread,
    /// Models known to the store.
    Models,
    /// Bytes of memory beside the arenas: headers during their parse, layouts and manifests of models, and unread answers.
    Memory,
}

impl Resource {
    /// All resources.
    pub const ALL: [Self; 5] =
        [Self::Connections, Self::Descriptors, Self::Unread, Self::Models, Self::Memory];

    /// Name of the bound in errors and in the status.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Descriptors => "descriptors",
            Self::Unread => "unread_descriptors",
            Self::Models => "models",
            Self::Memory => "memory_bytes",
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The total of a resource, and the part for one uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Total for all uids, in the unit of the resource.
    pub total: u64,
    /// Part of one tenant; at most a third of the total.
    pub per_uid: u64,
}

impl Bound {
    /// A quarter for each uid: three tenants can be at their bound at once, and the operator still has its part.
    pub fn quarters(total: u64) -> Self {
        let total = total.max(4);
        Self { total, per_uid: total / 4 }
    }
}

/// Rate at which headers are parsed for one uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Bytes of headers that may be parsed at once.
    pub burst: Bytes,
    /// Bytes of headers per second afterwards.
    pub rate: Bytes,
}

/// Least charge for a header, in bytes, for the fixed costs: a request, a look at the file, an entry in the tables.
pub const LEAST_WORK: u64 = 4_096;

impl Default for Work {
    /// 64 MiB, and 16 MiB per second: a CPU parses some 100 MB per second, so a uid uses less than a fifth of a CPU, and
    /// can still put 4,000 models with small headers in a second.
    fn default() -> Self {
        Self { burst: Bytes::from_mib(64), rate: Bytes::from_mib(16) }
    }
}

/// All bounds of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    bounds: [Bound; Resource::ALL.len()],
    work: Work,
}

/// Descriptors of the process itself: its listener, its standard files, its libraries.
const OWN_DESCRIPTORS: u64 = 64;
/// Least memory beside the arenas, for a store of any size.
const LEAST_MEMORY: u64 = 64 << 20;

impl Limits {
    /// The default bounds for a process with this limit of open descriptors.
    ///
    /// Connections get an eighth of the descriptors, since each may hold two more that just arrived. Models get half. Loads
    /// use the rest, since each opens its source twice more. Half of the kernel's limit may be unread: other processes of
    /// the store's user count against the same limit. Memory is an eighth of the arenas' memory, and at least 64 MiB.
    pub fn of_process(descriptors: u64, store: &StoreConfig) -> Self {
        let usable = descriptors.saturating_sub(OWN_DESCRIPTORS);
        let arenas = store.host.0.saturating_add(store.gpu.0);
        let total = |resource| match resource {
            Resource::Connections => (usable / 8).min(store.max_clients.into()),
            Resource::Descriptors => usable / 2,
            Resource::Unread => descriptors / 2,
            Resource::Models => store.max_models.into(),
            Resource::Memory => (arenas / 8).max(LEAST_MEMORY),
        };
        Self { bounds: Resource::ALL.map(|resource| Bound::quarters(total(resource))), work: Work::default() }
    }

    /// Replaces the bound of a resource.
    #[must_use]
    pub const fn with_bound(mut self, resource: Resource, bound: Bound) -> Self {
        self.bounds[resource as usize] = bound;
        self
    }

    /// Replaces the rate of header work.
    #[must_use]
    pub const fn with_work(mut self, work: Work) -> Self {
        self.work = work;
        self
    }

    /// The bound of a resource.
    pub const fn of(&self, resource: Resource) -> Bound {
        self.bounds[resource as usize]
    }

    fn check(&self) -> Result<(), ConfigError> {
        for resource in Resource::ALL {
            let Bound { total, per_uid } = self.of(resource);
            let within = per_uid > 0 && per_uid <= total / 3;
            let bound = "need from 1 to a third of the total for each uid";
            ConfigError::unless(within, resource.name(), format_args!("{per_uid} of {total}"), bound)?;
        }
        let Work { burst, rate } = self.work;
        let within = burst.0 >= LEAST_WORK && rate.0 > 0;
        let bound = "need a burst of at least 4096 bytes, a rate of at least 1";
        ConfigError::unless(within, "header_work", format_args!("{burst} and {rate} per second"), bound)
    }
}

/// The group of uids that is at its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Whose {
    /// Only the uid that asks.
    Uid,
    /// All tenants together.
    Tenants,
    /// All uids together.
    All,
}

/// The request would exceed a bound; it has taken nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Exceeded {
    /// Too much of a resource at once.
    #[error("{asked} more for uid {uid} would pass the bound on {resource}: {} may have {bound}, and {held} are taken",
            match .whose { Whose::Uid => "it", Whose::Tenants => "all uids but the operator's", Whose::All => "all uids" })]
    Held {
        /// The resource.
        resource: Resource,
        /// The uid that asked.
        uid: u32,
        /// The group of uids at its bound.
        whose: Whose,
        /// The requested amount.
        asked: u64,
        /// The amount that the group holds.
        held: u64,
        /// The bound of the group.
        bound: u64,
    },
    /// Too many bytes of headers in too short a time.
    #[error(
        "a header of {asked} bytes for uid {uid} would pass the bound on header_work: {burst} bytes at once, {rate} per second"
    )]
    Work {
        /// The uid that asked.
        uid: u32,
        /// Bytes of the header.
        asked: u64,
        /// Bytes that may be parsed at once.
        burst: u64,
        /// Bytes per second afterwards.
        rate: u64,
    },
}

type Row = [u64; Resource::ALL.len()];

/// The bounds, and the use of each uid: see the [module](self).
#[derive(Debug)]
pub struct Bounds {
    limits: Limits,
    /// The uid of the store, which counts as the operator like root.
    operator: u32,
    held: BTreeMap<u32, Row>,
    /// Sums over all tenants, and over the operator.
    classes: [Row; 2],
    /// Time at which a uid's charged work would be finished at the allowed rate.
    busy: BTreeMap<u32, Timestamp>,
}

impl Bounds {
    /// An empty table. `operator` is the uid of the store.
    ///
    /// # Errors
    /// A bound that leaves no room for others, by name.
    pub fn new(limits: Limits, operator: u32) -> Result<Self, ConfigError> {
        limits.check()?;
        let classes = [Row::default(); 2];
        Ok(Self { limits, operator, held: BTreeMap::new(), classes, busy: BTreeMap::new() })
    }

    /// The bounds.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether the uid is root or the uid of the store.
    pub const fn is_operator(&self, uid: u32) -> bool {
        uid == 0 || uid == self.operator
    }

    /// The amount of a resource that a uid holds.
    pub fn held(&self, uid: u32, resource: Resource) -> u64 {
        self.held.get(&uid).map_or(0, |row| row[resource as usize])
    }

    /// Uids that hold a resource.
    pub fn uids(&self) -> impl Iterator<Item = u32> {
        self.held.keys().copied()
    }

    /// The amount of a resource that all uids hold.
    pub fn total(&self, resource: Resource) -> u64 {
        self.classes.iter().map(|row| row[resource as usize]).sum()
    }

    /// Takes `asked` of a resource for a uid.
    ///
    /// # Errors
    /// The bound that it would exceed.
    pub fn take(&mut self, uid: u32, resource: Resource, asked: u64) -> Result<(), Exceeded> {
        let Bound { total, per_uid } = self.limits.of(resource);
        let (at, class) = (resource as usize, usize::from(self.is_operator(uid)));
        let (of_class, part) = (self.classes[class][at], total - per_uid);
        let own = if class == 1 { (of_class, part) } else { (self.held(uid, resource), per_uid) };
        for (whose, held, bound) in [
            (Whose::Uid, own.0, own.1),
            (Whose::Tenants, of_class, part),
            (Whose::All, self.total(resource), total),
        ] {
            if held.checked_add(asked).is_none_or(|sum| sum > bound) {
                return Err(Exceeded::Held { resource, uid, whose, asked, held, bound });
            }
        }
        self.held.entry(uid).or_default()[at] += asked;
        self.classes[class][at] += asked;
        Ok(())
    }

    /// Gives back part of a resource. Gives back at most the amount that the uid holds.
    pub fn give(&mut self, uid: u32, resource: Resource, given: u64) {
        let (at, class) = (resource as usize, usize::from(self.is_operator(uid)));
        let Some(row) = self.held.get_mut(&uid) else { return };
        let given = given.min(row[at]);
        row[at] -= given;
        self.classes[class][at] -= given;
        if *row == Row::default() {
            self.held.remove(&uid);
        }
    }

    /// Charges a uid for the parse of a header.
    ///
    /// # Errors
    /// If the rate is too high; nothing is charged then.
    pub fn work(&mut self, now: Timestamp, uid: u32, bytes: u64) -> Result<(), Exceeded> {
        let Work { burst, rate } = self.limits.work;
        let time = |bytes: u64| Duration::to_move(Bytes(bytes), rate.0);
        self.busy.retain(|_, until| *until > now);
        let done = self.busy.get(&uid).copied().unwrap_or(now).saturating_add(time(bytes.max(LEAST_WORK)));
        if done > now.saturating_add(time(burst.0)) {
            return Err(Exceeded::Work { uid, asked: bytes, burst: burst.0, rate: rate.0 });
        }
        self.busy.insert(uid, done);
        Ok(())
    }
}

/// The table, shared by the threads of a server.
#[derive(Debug, Clone)]
pub(crate) struct Ledger(Arc<Mutex<Bounds>>);

impl Ledger {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self(Arc::new(Mutex::new(bounds)))
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&Bounds) -> T) -> T {
        look(&self.0.lock())
    }

    pub(crate) fn take(&self, uid: u32, resource: Resource, amount: u64) -> Result<Booked, Exceeded> {
        self.0.lock().take(uid, resource, amount)?;
        Ok(Booked { ledger: self.clone(), uid, resource, amount })
    }

    pub(crate) fn work(&self, now: Timestamp, uid: u32, bytes: u64) -> Result<(), Exceeded> {
        self.0.lock().work(now, uid, bytes)
    }
}

/// A part of a resource, given back on drop.
#[derive(Debug)]
pub(crate) struct Booked {
    ledger: Ledger,
    uid: u32,
    resource: Resource,
    amount: u64,
}

impl Drop for Booked {
    fn drop(&mut self) {
        self.ledger.0.lock().give(self.uid, self.resource, self.amount);
    }
}
