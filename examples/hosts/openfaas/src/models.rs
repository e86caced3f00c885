//! The node's model store: one copy of each model in host memory, shared by all instances.
//!
//! A model is a safetensors file that a deployment names (`gshare/model`). The store checks the file's header at deployment, so
//! a corrupt file is refused at once. The model's name in the store is the path of the file. An instance gets the store's
//! socket (`$GSHARE_STORE`) and the name (`$GSHARE_MODEL`). A program that does not use the store opens the name as a path.

use super::api::ApiError;
use super::host::Version;
use gshare_core::Bytes;
use gshare_modelstore::backend::HostBackend;
use gshare_modelstore::client::{Client, ClientError, GetOptions};
use gshare_modelstore::frame::Code;
use gshare_modelstore::server::{Running, Server, ServerConfig};
use gshare_modelstore::status::Status;
use gshare_modelstore::store::{Access, MemoryTier, ModelStore};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::SystemTime;

/// The store of this node, run by this host or by another process.
#[derive(Debug)]
pub struct Models {
    /// Socket of the store.
    pub socket: PathBuf,
    /// Size and modification time of each file when the store read it.
    taken: Mutex<BTreeMap<PathBuf, Stamp>>,
    errands: Sender<Errand>,
    running: Option<Running>,
}

/// Size and modification time of a file.
type Stamp = (u64, Option<SystemTime>);

/// An order of the platform about a model.
#[derive(Debug, Clone)]
pub enum Errand {
    /// Load the weights into host memory: a request is expected.
    Fetch(PathBuf),
    /// Remove the weights from host memory to make room.
    Forget(PathBuf),
}

impl Errand {
    /// The errand for the model of a function; none if it has no model.
    pub fn of(version: &Version, fetch: bool) -> Option<Self> {
        let path = version.plan.model.clone()?;
        Some(if fetch { Self::Fetch(path) } else { Self::Forget(path) })
    }
}

impl Models {
    /// Starts a store with at most `memory` bytes of models in host memory, or with a policy of the host's own.
    ///
    /// # Errors
    /// If the store cannot start.
    pub fn start(socket: PathBuf, memory: Bytes, own: Option<Box<dyn ModelStore>>) -> anyhow::Result<Self> {
        let mut config = ServerConfig::at(socket.clone());
        config.store.host = memory;
        let server = match own {
            Some(own) => Server::with_engine(config, own, Box::new(HostBackend), None)?,
            None => Server::new(config)?,
        };
        let running = server.spawn()?;
        Ok(Self { running: Some(running), ..Self::at(socket)? })
    }

    /// Uses the store that listens at `socket`.
    ///
    /// # Errors
    /// If the thread for errands cannot be started.
    pub fn at(socket: PathBuf) -> anyhow::Result<Self> {
        let (errands, todo) = channel();
        let store = socket.clone();
        std::thread::Builder::new().name("models".into()).spawn(move || {
            for errand in todo {
                if let Err(error) = run(&store, &errand) {
                    eprintln!("openfaas: model store: {errand:?}: {error}");
                }
            }
        })?;
        Ok(Self { socket, taken: Mutex::default(), errands, running: None })
    }

    /// Puts a file into the store. A file in the store is read again only if it has changed.
    ///
    /// # Errors
    /// 400 if the file is faulty, exceeds a bound of the store, or has changed while instances use it. 500 if the store does
    /// not answer.
    pub fn put(&self, path: &Path) -> Result<(), ApiError> {
        let refused =
            |why: String| ApiError::bad(format!("annotations: gshare/model: `{}`: {why}", path.display()));
        let file = std::fs::File::open(path).map_err(|error| refused(error.to_string()))?;
        let client =
            Client::connect(&self.socket).map_err(|error| ApiError::internal("the model store", error))?;
        let about = file.metadata().map_err(|error| refused(error.to_string()))?;
        let (name, stamp) = (name(path)?, (about.len(), about.modified().ok()));
        // Functions run as the host's user, the owner of the name.
        let put = || client.put_file(name, Access::Private, MemoryTier::Host, &file, |_, _| {}).map(drop);
        let mut taken = self.taken.lock();
        let known = taken.get(path).copied();
        let put = match put() {
            Err(ClientError::Refused { code: Code::NameTaken, .. }) if known == Some(stamp) => Ok(()),
            Err(ClientError::Refused { code: Code::NameTaken, .. }) => match client.evict(name, true) {
                Ok(()) => put(),
                // The store outlived an earlier host, so it is unknown whether its copy matches the file.
                Err(ClientError::Refused { code: Code::InUse, .. }) if known.is_none() => Ok(()),
                Err(ClientError::Refused { code: Code::InUse, .. }) => {
                    return Err(refused("the file has changed, and instances use it as it was".into()));
                }
                Err(error) => Err(error),
            },
            put => put,
        };
        put.map_err(|error| refused(error.to_string()))?;
        taken.insert(path.to_owned(), stamp);
        Ok(())
    }

    /// Queues an errand. A failure only reaches the log, because the load that follows does the same work.
    pub fn send(&self, errand: Errand) {
        let _ = self.errands.send(errand);
    }

    /// Contents of the store; none if it does not answer.
    pub fn status(&self) -> Option<Status> {
        Client::connect(&self.socket).ok()?.status().ok()
    }

    /// Stops the store if this host runs it.
    pub fn stop(self) {
        if let Some(running) = self.running {
            running.stop();
        }
    }
}

fn name(path: &Path) -> Result<&str, ApiError> {
    path.to_str().ok_or_else(|| ApiError::bad("annotations: gshare/model: need a path in UTF-8"))
}

fn run(socket: &Path, errand: &Errand) -> anyhow::Result<()> {
    let client = Client::connect(socket)?;
    match errand {
        // The reference ends with this client. The model stays until its room is needed.
        Errand::Fetch(path) => drop(client.get(&path.to_string_lossy(), &GetOptions::default())?),
        Errand::Forget(path) => client.evict(&path.to_string_lossy(), false)?,
    }
    Ok(())
}
