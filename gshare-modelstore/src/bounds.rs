//! How much of a store each uid may take, so that one uid never takes what the others need.
//!
//! # Problem
//! A store serves every user of a machine from one process. Its descriptors, its connections and the memory beside its arenas are
//! finite, and a client can ask for all of them: many small models, many connections, answers that it never reads, headers of
//! 100 MB. What one uid can take must therefore be a part of what there is.
//!
//! # Terms
//! - **resource**: see [`Resource`]; each has a [`Bound`] of a total and a part that one uid may have;
//! - **operator**: root, and the uid that the store runs as; every other uid is a **tenant**.
//!
//! # Rules
//! With `T` the total and `p` the part of one uid, `3 p <= T`:
//! 1. a tenant has at most `p`;
//! 2. all tenants together have at most `T - p`;
//! 3. the operator has at most `T - p`;
//! 4. all together have at most `T`.
//!
//! So every other uid can have `p`, against anything that one uid does; and the operator can have `p`, against anything that all
//! tenants do together, which is what it needs to look at the store and to take their models away.
//!
//! A user who may use several uids, such as those of a user namespace, has the part of each; rule 2 is what holds then.
//!
//! Header work is a rate: a uid may have `burst` bytes of headers parsed at once and `rate` bytes per second from then on.
//!
//! Example: 1,024 descriptors may be open, so that 480 are for models, 120 of them for each tenant. A tenant that puts models of
//! 5 descriptors each is refused the 25th; 24 models of another tenant still fit, and so do those of the operator.
//!
//! # Cost
//! Taking and giving back are O(log uids). Memory: one row per uid that has something, and one per uid that was charged for work
//! that is not paid off.

#![forbid(unsafe_code)]

use crate::engine::StoreConfig;
use gshare_core::{Bytes, ConfigError, Duration, Timestamp};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A resource whose use is counted for each uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Connections: those that are open, and those that ended with answers that their client has neither read nor thrown away.
    Connections,
    /// Descriptors that the store keeps open for models: their sources, arenas and manifests.
    Descriptors,
    /// Descriptors in answers that were sent and not read. The kernel bounds their number for all processes of the store's user
    /// together (`RLIMIT_NOFILE`), and refuses every further answer beyond it.
    Unread,
    /// Models that the store knows.
    Models,
    /// Bytes of memory beside the arenas: headers while they are parsed, layouts and manifests of models, answers that were not
    /// read.
    Memory,
}

impl Resource {
    /// Every resource.
    pub const ALL: [Self; 5] =
        [Self::Connections, Self::Descriptors, Self::Unread, Self::Models, Self::Memory];

    /// Name of its bound in errors and in the status.
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

/// How much of a resource there is, and how much of it one uid may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// All uids together, in the unit of the resource.
    pub total: u64,
    /// The part of one uid that is not the operator's; at most a third of the total.
    pub per_uid: u64,
}

impl Bound {
    /// A quarter for each uid: three tenants can be at their bound at once, and the operator still has its part.
    pub fn quarters(total: u64) -> Self {
        let total = total.max(4);
        Self { total, per_uid: total / 4 }
    }
}

/// How fast headers are parsed for one uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Bytes of headers that may come at once.
    pub burst: Bytes,
    /// Bytes of headers per second after that.
    pub rate: Bytes,
}

/// The parse of any header costs as much as that of this many bytes: a request, a look at the file, a model more in the tables.
pub const LEAST_WORK: u64 = 4_096;

impl Default for Work {
    /// 64 MiB, and 16 MiB per second: a CPU parses some 100 MB per second, so that a uid keeps less than a fifth of one CPU
    /// busy, and can still put 4,000 models of small headers in a second.
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

/// Descriptors that a process has beside those of clients and models: its listener, its standard files, its libraries'.
const OWN_DESCRIPTORS: u64 = 64;
/// Memory beside the arenas that a store of any size has.
const LEAST_MEMORY: u64 = 64 << 20;

impl Limits {
    /// The defaults for a process that may have this number of descriptors open.
    ///
    /// Connections get an eighth of the descriptors, since each may hold two more that just came; models get half; the rest is for
    /// loads, which open their source twice more. Half of what the kernel allows may be unread: other processes of the
    /// store's user count against the same number. Memory is an eighth of the arenas' and at least 64 MiB.
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

    /// Another bound for a resource.
    #[must_use]
    pub const fn with_bound(mut self, resource: Resource, bound: Bound) -> Self {
        self.bounds[resource as usize] = bound;
        self
    }

    /// Another rate of header work.
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

/// The uids whose use of a resource is at its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Whose {
    /// The uid that asks alone.
    Uid,
    /// All tenants together.
    Tenants,
    /// All uids together.
    All,
}

/// A bound that would be passed; nothing was taken.
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
        /// The uids whose bound it is.
        whose: Whose,
        /// How much was asked for.
        asked: u64,
        /// How much they have.
        held: u64,
        /// How much they may have.
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
        /// Bytes that may come at once.
        burst: u64,
        /// Bytes per second after that.
        rate: u64,
    },
}

type Row = [u64; Resource::ALL.len()];

/// The bounds, and what each uid has taken: see the [module](self).
#[derive(Debug)]
pub struct Bounds {
    limits: Limits,
    /// The uid that the store runs as, which is the operator's like root's.
    operator: u32,
    held: BTreeMap<u32, Row>,
    /// The sums of all tenants, and of the operator.
    classes: [Row; 2],
    /// When the work that a uid was charged for would be done, had it come at the rate.
    busy: BTreeMap<u32, Timestamp>,
}

impl Bounds {
    /// Nothing is taken. `operator` is the uid that the store runs as.
    ///
    /// # Errors
    /// A bound that leaves no room for others; names it.
    pub fn new(limits: Limits, operator: u32) -> Result<Self, ConfigError> {
        limits.check()?;
        let classes = [Row::default(); 2];
        Ok(Self { limits, operator, held: BTreeMap::new(), classes, busy: BTreeMap::new() })
    }

    /// The bounds.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// True for root and for the uid that the store runs as.
    pub const fn is_operator(&self, uid: u32) -> bool {
        uid == 0 || uid == self.operator
    }

    /// How much of a resource a uid has.
    pub fn held(&self, uid: u32, resource: Resource) -> u64 {
        self.held.get(&uid).map_or(0, |row| row[resource as usize])
    }

    /// Uids that have something.
    pub fn uids(&self) -> impl Iterator<Item = u32> {
        self.held.keys().copied()
    }

    /// How much of a resource all uids have.
    pub fn total(&self, resource: Resource) -> u64 {
        self.classes.iter().map(|row| row[resource as usize]).sum()
    }

    /// Takes so much of a resource for a uid.
    ///
    /// # Errors
    /// The bound that it would pass.
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

    /// Gives back what was taken; never more than that.
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
    /// When it comes faster than the bound; nothing is charged then.
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

/// The table as the threads of a server share it.
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

/// A part of a resource that is taken until this is dropped.
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
