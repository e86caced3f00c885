//! Pauses before refused pods are tried again. Pure: the caller tells the time.
//!
//! # Algorithm
//! - A FaSTPod with a refused pod (by a quota, `PodSecurity`, an admission policy) waits for [`FIRST`], then tries one pod;
//!   each further refusal doubles the pause, up to [`LONGEST`]. A created pod or a changed FaSTPod ends the pause.
//! - Pods of a namespace are made in batches of [`BATCH`]; after a refusal in the last [`LONGEST`], one at a time. No
//!   namespace gets more than [`LIMIT`] refusals within a second, so no tenant can keep the API server busy.

use super::FaSTPod;
use super::fastpod_writes::Refused;
use kube::ResourceExt as _;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tokio::time::Instant;

/// Pause after the first refusal.
pub const FIRST: Duration = Duration::from_secs(1);
/// Longest pause.
pub const LONGEST: Duration = Duration::from_secs(60);
/// Refusals of a namespace within [`WINDOW`].
pub const LIMIT: usize = 10;
/// Time over which they are counted.
pub const WINDOW: Duration = Duration::from_secs(1);
/// Pods of a namespace that are made at once.
pub const BATCH: usize = 8;

#[derive(Debug)]
struct Entry {
    /// Generation of the FaSTPod when it was refused: a changed one is tried at once.
    generation: Option<i64>,
    pause: Duration,
    until: Instant,
    why: String,
}

/// Refusals that still count.
#[derive(Debug, Default)]
pub struct Backoff {
    /// By the UID of the FaSTPod.
    fastpods: BTreeMap<String, Entry>,
    /// Times of refusals by namespace.
    namespaces: BTreeMap<String, VecDeque<Instant>>,
    /// When it was last told what holds.
    told: Option<Instant>,
}

impl Backoff {
    /// The refusals of these FaSTPods, by UID. Those of FaSTPods that are gone or were changed are forgotten.
    pub fn refused(&mut self, fastpods: &[FaSTPod], now: Instant) -> BTreeMap<String, Refused> {
        let there: BTreeMap<_, _> =
            fastpods.iter().filter_map(|one| Some((one.uid()?, one.metadata.generation))).collect();
        self.fastpods.retain(|uid, entry| there.get(uid) == Some(&entry.generation));
        self.namespaces.retain(|_, times| times.back().is_some_and(|last| now - *last < LONGEST));
        self.told = Some(now);
        let told = |entry: &Entry| Refused { why: entry.why.clone(), retry: entry.until <= now };
        self.fastpods.iter().map(|(uid, entry)| (uid.clone(), told(entry))).collect()
    }

    /// How many pods may be made at once in a namespace; 0: none before the window has passed.
    pub fn allowance(&self, namespace: &str, now: Instant) -> usize {
        let Some(times) = self.namespaces.get(namespace) else { return BATCH };
        let recent = times.iter().filter(|time| now - **time < WINDOW).count();
        LIMIT.saturating_sub(recent).min(1)
    }

    /// A pod was refused. Whether its FaSTPod was not waiting before.
    pub fn refuse(
        &mut self,
        (namespace, uid): (&str, &str),
        generation: Option<i64>,
        now: Instant,
        why: &str,
    ) -> bool {
        let times = self.namespaces.entry(namespace.to_owned()).or_default();
        times.push_back(now);
        // Older refusals no longer count.
        times.drain(..times.len().saturating_sub(LIMIT));
        let pause = self.fastpods.get(uid).map(|entry| entry.pause);
        // Refusals of one batch count once.
        if self.fastpods.get(uid).is_some_and(|entry| entry.until > now) {
            return false;
        }
        let longer = pause.map_or(FIRST, |pause| (pause * 2).min(LONGEST));
        let entry = Entry { generation, pause: longer, until: now + longer, why: why.to_owned() };
        self.fastpods.insert(uid.to_owned(), entry);
        pause.is_none()
    }

    /// A pod was made.
    pub fn accept(&mut self, uid: &str) {
        self.fastpods.remove(uid);
    }

    /// Time until one may be tried again. Those of which [`Self::refused`] has told that they may be tried wait for no time: where
    /// none was, there was no room, and a change says when there is.
    pub fn next(&self, now: Instant) -> Option<Duration> {
        let waiting = self.fastpods.values().filter(|entry| self.told.is_none_or(|told| entry.until > told));
        waiting.map(|entry| entry.until.saturating_duration_since(now)).min()
    }
}
