//! The state that the nodes of a cluster share, in memory, and how a scheduler catches up with it.
//!
//! # Problem
//! The scheduler's picture of a GPU's memory may be old: a process died, a node restarted (GPU-enabled FaaS, section III-E
//! keeps status, LRU lists and estimates in a store that others write). Old must never mean wrong: what is not surely
//! there is a miss.
//!
//! # Algorithm
//! A node writes the record of each of its GPUs under a lease. [`reconcile`] compares what the scheduler believes with what
//! the store holds: a GPU without a live record is lost; a model that is missing in a record newer than the last one seen
//! was dropped. Models the scheduler does not know about are left alone: it did not order them.
//!
//! ## Example
//! The scheduler believes A and B on GPU 0; its record, version 7, says A. `Dropped{gpu0, B}` follows. The node dies; its
//! lease ends; `GpuLost{gpu0}` follows, and its requests are queued again.

use crate::request::{GpuRecord, RequestEvent, RequestScheduler, StateError, StateStore, Version};
use gshare_core::{Duration, GpuId, Timestamp};
use std::collections::BTreeMap;

/// A [`StateStore`] in the memory of one process. Never unavailable. O(log n) per call.
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    records: BTreeMap<GpuId, (Version, Timestamp, GpuRecord)>,
}

impl MemoryStore {
    /// An empty store.
    pub const fn new() -> Self {
        Self { records: BTreeMap::new() }
    }
}

impl StateStore for MemoryStore {
    fn put(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        record: GpuRecord,
        expected: Version,
        lease: Duration,
    ) -> Result<Version, StateError> {
        let found = self.version(gpu)?;
        if found != expected {
            return Err(StateError::Conflict { gpu, expected, found });
        }
        let version = Version(found.0 + 1);
        self.records.insert(gpu, (version, now.saturating_add(lease), record));
        Ok(version)
    }

    fn get(&self, now: Timestamp, gpu: GpuId) -> Result<Option<(Version, GpuRecord)>, StateError> {
        let live = self.records.get(&gpu).filter(|(_, ends, _)| now < *ends);
        Ok(live.map(|(version, _, record)| (*version, record.clone())))
    }

    fn version(&self, gpu: GpuId) -> Result<Version, StateError> {
        Ok(self.records.get(&gpu).map_or_else(Version::default, |(version, ..)| *version))
    }

    fn live(&self, now: Timestamp) -> Result<Vec<GpuId>, StateError> {
        let live = self.records.iter().filter(|(_, (_, ends, _))| now < *ends);
        Ok(live.map(|(gpu, _)| *gpu).collect())
    }
}

/// The versions of the records that a scheduler has caught up with.
#[derive(Debug, Clone, Default)]
pub struct Seen(BTreeMap<GpuId, Version>);

/// The events that the scheduler has to be told about `gpus` so that it believes nothing that the store does not hold.
///
/// A store that cannot be reached tells nothing; what the scheduler believes then may be wrong, and is found out at
/// dispatch.
pub fn reconcile(
    now: Timestamp,
    store: &dyn StateStore,
    scheduler: &dyn RequestScheduler,
    gpus: &[GpuId],
    seen: &mut Seen,
) -> Vec<RequestEvent> {
    let mut events = Vec::new();
    for &gpu in gpus {
        let (Some(believed), Ok(found)) = (scheduler.gpu(gpu), store.get(now, gpu)) else { continue };
        let Some((version, record)) = found else {
            seen.0.remove(&gpu);
            events.push(RequestEvent::GpuLost { gpu });
            continue;
        };
        if seen.0.get(&gpu).is_some_and(|last| *last >= version) {
            continue;
        }
        seen.0.insert(gpu, version);
        let missing = believed.models.into_iter().filter(|model| !record.models.contains(model));
        events.extend(missing.map(|model| RequestEvent::Dropped { gpu, model }));
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::ModelId;

    fn record(models: &[u32]) -> GpuRecord {
        let models = models.iter().copied().map(ModelId::new).collect();
        GpuRecord { busy: false, free_at: Timestamp::ZERO, models }
    }

    #[test]
    fn a_write_must_name_the_version_it_replaces() {
        let (mut store, gpu) = (MemoryStore::new(), GpuId::new(3));
        let (now, lease) = (Timestamp::ZERO, Duration::from_secs(5));
        let first = store.put(now, gpu, record(&[1]), Version(0), lease).unwrap();
        let error = store.put(now, gpu, record(&[2]), Version(0), lease).unwrap_err();
        assert_eq!(error.to_string(), "record of gpu3 is at version 1, not 0");
        assert_eq!(store.get(now, gpu).unwrap(), Some((first, record(&[1]))), "nothing was written");
        assert_eq!(store.put(now, gpu, record(&[2]), first, lease), Ok(Version(2)));
    }

    #[test]
    fn a_record_lives_as_long_as_its_lease_and_its_version_longer() {
        let (mut store, gpu) = (MemoryStore::new(), GpuId::new(0));
        let version =
            store.put(Timestamp::ZERO, gpu, record(&[1]), Version(0), Duration::from_secs(5)).unwrap();
        let (before, after) = (Timestamp::from_millis(4_999), Timestamp::from_millis(5_000));
        assert_eq!(store.live(before).unwrap(), [gpu]);
        assert_eq!(store.get(after, gpu).unwrap(), None);
        assert_eq!(store.live(after).unwrap(), []);
        assert_eq!(store.version(gpu).unwrap(), version, "an old writer still loses");
    }
}
