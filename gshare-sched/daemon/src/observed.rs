//! The node and its observers: the journal, the metrics, the reasons, the processes' use and the log see each event and the
//! resulting actions.

use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::usage::Processes;
use crate::why::Reasons;
use gshare_core::{Engine as _, Timestamp};
use gshare_sched::node::{Node, NodeAction, NodeError, NodeEvent, Note};
use std::sync::Arc;

/// A node with its observers.
#[derive(Debug)]
pub(crate) struct Observed {
    node: Node,
    pub(crate) journal: Journal,
    metrics: Arc<Metrics>,
    pub(crate) reasons: Reasons,
    pub(crate) processes: Processes,
    now: Timestamp,
}

impl Observed {
    pub(crate) fn new(node: Node, journal: Journal, metrics: Arc<Metrics>) -> Self {
        let (reasons, processes) = (Reasons::default(), Processes::default());
        Self { node, journal, metrics, reasons, processes, now: Timestamp::ZERO }
    }

    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// Has the node handle an event, and tells the observers.
    pub(crate) fn handle(
        &mut self,
        now: Timestamp,
        event: NodeEvent,
        actions: &mut Vec<NodeAction>,
    ) -> Result<(), NodeError> {
        // A host's own clock may stand still or go back. The node's time must not go back.
        let now = now.max(self.now);
        self.now = now;
        let from = actions.len();
        // The journal comes before the node, so that it has the causing event after a panic.
        self.journal.event(now, &event);
        let handled = self.node.handle(now, event, actions);
        match &handled {
            Ok(()) => {
                let done = actions.get(from..).unwrap_or_default();
                self.journal.handled(now, done);
                self.metrics.observe(now, done);
                self.processes.observe(now, &self.node, done);
                for finding in self.reasons.observe(now, &self.node, done) {
                    self.journal.finding(now, &finding);
                }
                done.iter().for_each(log);
            }
            Err(error) => {
                tracing::debug!(%error, "the node refused an event");
                self.journal.refused(now);
            }
        }
        handled
    }

    /// Hands the journalled events to the kernel. Call it before frames are sent.
    pub(crate) fn write_journal(&mut self) {
        self.journal.flush(self.now);
    }

    pub(crate) fn finish(&mut self) {
        self.journal.finish(self.now);
    }
}

fn log(action: &NodeAction) {
    let NodeAction::Note(note) = action else { return };
    match note {
        Note::Refused { conn, name, refusal } => {
            tracing::info!(%conn, name, code = ?refusal.code(), text = %refusal, "refused");
        }
        Note::Violation { conn, what } => tracing::warn!(%conn, what, "dropped"),
        Note::TokenRefused { token, fault } => {
            tracing::debug!(?token, fault = fault.label(), "the token engine refused an event");
        }
        Note::NotScaled { tenant, name, quota, why } => {
            tracing::warn!(%tenant, name, %quota, why, "takes no part in scaling: its share is fixed");
        }
        _ => {}
    }
}
