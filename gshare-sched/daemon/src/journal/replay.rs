//! Replay of a journal: an equal node handles the same events at the same times.

use super::{Line, VERSION, digest};
use gshare_core::{Engine as _, Timestamp};
use gshare_sched::node::{Node, NodeAction, NodeConfig, NodeEvent, vertical_scaler};
use gshare_sched::token::{MultiToken, MultiTokenConfig};

/// Why a journal cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The journal has another version of the format.
    #[error(
        "the journal has version {found}, and this program replays version {VERSION}: use the release that wrote it"
    )]
    Version {
        /// The version in the header.
        found: u32,
    },
    /// The file does not begin with a header.
    #[error("does not begin with a journal's header")]
    NoHeader,
    /// The daemon's token scheduler was the host's own, so the header does not describe it.
    #[error("its token scheduler was the host's own")]
    OwnScheduler,
    /// A line, or the header, has no valid content.
    #[error("cannot be read: {0}")]
    Line(#[from] serde_json::Error),
    /// A setting in the header is out of its bounds.
    #[error("{0}")]
    Config(String),
}

/// A node under the events of a journal.
#[derive(Debug)]
pub struct Replay {
    node: Node,
    actions: Vec<NodeAction>,
}

/// The result of replaying a line.
#[derive(Debug)]
#[non_exhaustive]
pub struct Replayed<'a> {
    /// The time of the event.
    pub now: Timestamp,
    /// The node's actions; empty if the node refused the event.
    pub actions: &'a [NodeAction],
    /// Whether the node refused the event.
    pub refused: bool,
    /// Whether the outcome equals the recorded outcome; `None` where the line has no outcome.
    pub same: Option<bool>,
}

impl Replay {
    /// A node in the state at the beginning of a run.
    ///
    /// # Errors
    /// The line is no header, has another version or bad settings, or names no scheduler that can be built again.
    pub fn new(header: &Line) -> Result<Self, ReplayError> {
        let version = header.journal.ok_or(ReplayError::NoHeader)?;
        if version != VERSION {
            return Err(ReplayError::Version { found: version });
        }
        let engine = header.engine.clone().filter(|engine| !engine.is_null());
        let tokens: MultiTokenConfig = serde_json::from_value(engine.ok_or(ReplayError::OwnScheduler)?)?;
        let config: NodeConfig = serde_json::from_value(header.node.clone().unwrap_or_default())?;
        let bad = |error: &dyn std::fmt::Display| ReplayError::Config(error.to_string());
        let tokens = MultiToken::new(tokens).map_err(|error| bad(&error))?;
        let epoch = header.epoch.unwrap_or(0);
        let node =
            Node::new(config, epoch, Box::new(tokens), vertical_scaler()).map_err(|error| bad(&error))?;
        Ok(Self { node, actions: Vec::new() })
    }

    /// The node in the state after the last line.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Has the node handle the event of a line; `None` if the line has no event.
    ///
    /// # Errors
    /// The event is unknown to this version.
    pub fn line(&mut self, line: &Line) -> Result<Option<Replayed<'_>>, ReplayError> {
        let (Some(now), Some(event)) = (line.now_ns, line.event()?) else { return Ok(None) };
        Ok(Some(self.event(Timestamp::from_nanos(now), event, line)))
    }

    fn event(&mut self, now: Timestamp, event: NodeEvent, line: &Line) -> Replayed<'_> {
        self.actions.clear();
        let refused = self.node.handle(now, event, &mut self.actions).is_err();
        let recorded = line.outcome.is_some() || line.refused;
        let same = refused == line.refused && (refused || line.outcome == Some(digest(&self.actions)));
        Replayed { now, actions: &self.actions, refused, same: recorded.then_some(same) }
    }
}
