//! Replay of a journal: the same node, told the same events at the same times.

use super::{Line, VERSION, digest};
use gshare_core::{Engine as _, Timestamp};
use gshare_sched::node::{Node, NodeAction, NodeConfig, NodeEvent, vertical_scaler};
use gshare_sched::token::{MultiToken, MultiTokenConfig};

/// Why a journal cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// Another version of the format.
    #[error(
        "the journal has version {found}, and this program replays version {VERSION}: use the release that wrote it"
    )]
    Version {
        /// The version in the header.
        found: u32,
    },
    /// A file that does not begin with a header.
    #[error("does not begin with a journal's header")]
    NoHeader,
    /// The daemon had a token scheduler that is not described in the header.
    #[error("its token scheduler was the host's own")]
    OwnScheduler,
    /// A line that is not what it should be.
    #[error("cannot be read: {0}")]
    Line(#[from] serde_json::Error),
    /// A setting that is out of its bounds.
    #[error("{0}")]
    Config(String),
}

/// A node that a journal is told to.
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
    /// The orders of the node; empty if it refused the event.
    pub actions: &'a [NodeAction],
    /// Whether it refused the event.
    pub refused: bool,
    /// Whether the outcome is the recorded one; `None` where none is recorded.
    pub same: Option<bool>,
}

impl Replay {
    /// A node as it was when a run began.
    ///
    /// # Errors
    /// A header of another version, or of a scheduler that cannot be built again.
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
        let scaler = vertical_scaler(config.max_clients).map_err(|error| bad(&error))?;
        let epoch = header.epoch.unwrap_or(0);
        let node = Node::new(config, epoch, Box::new(tokens), scaler).map_err(|error| bad(&error))?;
        Ok(Self { node, actions: Vec::new() })
    }

    /// The node, as it is after the last line.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Tells the node a line; `None` if the line has no event.
    ///
    /// # Errors
    /// An event that this version does not know.
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
