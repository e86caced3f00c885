//! The node in virtual time.

mod memory_limits;
mod shares;

use super::{Node, NodeConfig, vertical_scaler};
use crate::token::{MultiToken, MultiTokenConfig};
use gshare_core::Duration;

/// A node with the grace of the daemon's defaults.
fn node_of(config: NodeConfig) -> Node {
    let tokens = MultiTokenConfig { grace: Duration::from_millis(50), ..MultiTokenConfig::default() };
    let scaler = vertical_scaler();
    Node::new(config, 1, Box::new(MultiToken::new(tokens).unwrap()), scaler).unwrap()
}
