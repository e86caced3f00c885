//! A model store: one copy of each model, shared by all processes of a node.
//!
//! # Problem
//! The weights are most of an instance's memory and most of its cold start (FaST-GShare, sections 3.5 and 5.5). A store
//! loads a model once, keeps it in an arena, and hands read-only maps of that arena to every permitted process. If a
//! process dies, its socket closes and its references are released.
//!
//! # Modules
//! | module | for |
//! |---|---|
//! | [`engine`] | the decisions: states, references, limits, access, eviction; pure |
//! | [`server`] | the store as a server on a Unix socket |
//! | [`bounds`] | bounds on each uid's use of the server; pure |
//! | [`client`] | requests to the store, from Rust |
//! | [`status`] | arenas, models and clients of a store, exact to the byte |
//! | [`backend`] | memory for arenas |
//! | [`frame`], [`manifest`] | the protocol of the socket, and the places of tensors in an arena |
//! | [`python`] | the text of the Python package, for programs that embed it |
//! | [`safetensors`], [`arena_fill`], [`content`] | files: checked, read in parallel, hashed on the way |
//!
//! # Guarantees
//! - A model is handed out only when it is complete, and is never written again.
//! - A model is never evicted while a client holds it. A client's references are released when its socket closes.
//! - Bad input (frames, headers, files) is refused with a reason, and changes nothing for others.
//!
//! ```
//! use gshare_modelstore::store::{Access, MemoryTier};
//! use gshare_modelstore::client::{Client, GetOptions};
//! use gshare_modelstore::safetensors::Dtype;
//! use gshare_modelstore::server::{Server, ServerConfig};
//!
//! let dir = tempfile::tempdir()?;
//! let socket = dir.path().join("store.sock");
//! let store = Server::new(ServerConfig::at(&socket))?.spawn()?;
//!
//! let client = Client::connect(&socket)?;
//! let mut put = client.put("tiny", Access::Private, MemoryTier::Host, &[("w", Dtype::F32, &[2])])?;
//! put.write("w", 0, &[0, 0, 128, 63, 0, 0, 0, 64])?;
//! put.commit()?;
//!
//! let model = client.get("tiny", &GetOptions::default())?;
//! assert_eq!(model.bytes_of("w")?, [0, 0, 128, 63, 0, 0, 0, 64]);
//! store.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(test, allow(clippy::cast_possible_truncation))]

pub mod arena_fill;
pub mod backend;
pub mod bounds;
pub mod client;
pub mod content;
pub mod engine;
pub mod frame;
pub mod manifest;
pub mod python;
pub mod safetensors;
pub mod server;
pub mod status;
pub mod store;

mod map;
mod packet;
