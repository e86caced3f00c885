//! The node in virtual time.

mod memory;
mod shares;

use super::{Node, NodeConfig, vertical_scaler};
use crate::token::{MultiToken, MultiTokenConfig, SlotScheduler};
use gshare_core::{Duration, TokenScheduler};

#[derive(Debug, Clone, Copy)]
enum Policy {
    MultiToken,
    SlotTable,
}

/// A node with the grace of the daemon's defaults.
fn node_of(config: NodeConfig, policy: Policy) -> Node {
    let tokens = MultiTokenConfig { grace: Duration::from_millis(50), ..MultiTokenConfig::default() };
    let tokens: Box<dyn TokenScheduler> = match policy {
        Policy::MultiToken => Box::new(MultiToken::new(tokens).unwrap()),
        Policy::SlotTable => Box::new(SlotScheduler::new(tokens).unwrap()),
    };
    let scaler = vertical_scaler(config.max_clients).unwrap();
    Node::new(config, 1, tokens, scaler).unwrap()
}
