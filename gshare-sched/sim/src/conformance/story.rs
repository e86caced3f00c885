//! The record of a suite's run: its events, and the first broken claim.

use crate::log::Log as RunLog;
use crate::story::Story;
use core::fmt::{self, Debug};
use gshare_core::Engine;
use gshare_sched::Wrapped;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of events in a story.
const KEPT: usize = 40;

/// A broken claim, and the fault.
pub(super) type Broken = (&'static str, String);

/// Breaks a claim unless `holds`.
pub(super) fn claim(holds: bool, claim: &'static str, wrong: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err((claim, wrong())) }
}

struct Lines {
    log: RunLog,
    at: String,
    broken: Option<Broken>,
}

impl Default for Lines {
    fn default() -> Self {
        Self { log: RunLog::keeping(KEPT), at: String::new(), broken: None }
    }
}

/// A record of a run, shared between the suite and its watched engines.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Lines>>);

impl Log {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, at: &impl fmt::Display, line: &str) {
        let mut lines = self.lines();
        lines.log.mix_bytes(line.as_bytes());
        lines.at = at.to_string();
        lines.log.line(at, || line.to_owned());
    }

    /// Watches an engine and notes its every call.
    pub(super) fn watch<E>(&self, engine: Box<E>) -> Wrapped<E>
    where
        E: Engine<Event: Debug, Action: Debug> + ?Sized,
    {
        let log = self.clone();
        Wrapped::new(engine, move |engine, now, event, actions| {
            let (told, before) = (format!("{event:?}"), actions.len());
            let result = engine.handle(now, event, actions);
            let answer = actions.get(before..).unwrap_or_default();
            match &result {
                Ok(()) => log.note(&now, &format!("{told} -> {answer:?}")),
                Err(error) => {
                    log.note(&now, &format!("{told} -> refused: {error}"));
                    if actions.len() != before {
                        let wrong = "the event was refused and the list of actions changed".to_owned();
                        log.breaks(("an error changes nothing", wrong));
                    }
                }
            }
            result
        })
    }

    /// Breaks a claim unless another run had the same events and answers.
    pub(super) fn is_repeated_by(&self, again: &Self) -> Result<(), Broken> {
        let hash = |log: &Self| log.lines().log.hash();
        claim(hash(self) == hash(again), "the same events give the same actions", || "they did not".into())
    }

    /// Notes a claim broken by an engine; only the first claim counts.
    pub(super) fn breaks(&self, broken: Broken) {
        self.lines().broken.get_or_insert(broken);
    }

    /// Breaks the first claim broken by an engine, if any.
    pub(super) fn is_unbroken(&self) -> Result<(), Broken> {
        self.lines().broken.clone().map_or(Ok(()), Err)
    }

    pub(super) fn story(&self, seed: u64, (claim, wrong): Broken) -> Story {
        let lines = self.lines();
        // The first rule broken by an engine explains the later broken rules.
        let (claim, wrong) = lines.broken.clone().unwrap_or((claim, wrong));
        Story { claim, seed: Some(seed), at: lines.at.clone(), wrong, events: lines.log.lines() }
    }
}
