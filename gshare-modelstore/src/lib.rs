//! One copy of a model for all who use it.
//!
//! # Problem
//! The weights are most of an instance's memory and most of its cold start (FaST-GShare, sections 3.5 and 5.5). A
//! store loads a model once, keeps it in an arena, and hands read-only maps of that arena to every process that may
//! use it; a process that dies gives its references back by the closing of its socket.
//!
//! # What is here
//! | module | for |
//! |---|---|
//! | [`engine`] | the decisions: states, references, limits, access, eviction; pure |
//! | [`server`] | the store as a server on a Unix socket |
//! | [`bounds`] | how much of the server each uid may take; pure |
//! | [`client`] | asking it, from Rust |
//! | [`status`] | its arenas, models and clients, to the byte |
//! | [`backend`] | memory that models live in |
//! | [`frame`], [`manifest`] | what goes over the socket, and where tensors lie in an arena |
//! | [`python`] | the text of the Python package, for programs that bring it along |
//! | [`safetensors`], [`arena_fill`], [`content`] | files: checked, read in parallel, hashed on the way |
//!
//! # Guarantees
//! - A model that is not complete is never handed out; one that is handed out is never written again.
//! - A model that a client holds is never evicted; what it held is free as soon as its socket is closed.
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
