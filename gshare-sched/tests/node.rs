//! The decisions of a node: turns to launch, and the node as a whole.

#[path = "support/paced.rs"]
mod paced;
#[path = "support/node_bench.rs"]
mod support;

mod node_events;
mod node_guarantees;
mod node_history;
mod node_paces;
mod node_parking;
mod node_room;
mod node_usage;
mod token_conformance;
mod token_histories;
mod token_node;
mod token_paced;
mod token_slots;
