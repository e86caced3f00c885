//! The node's model store: one copy of a model in host memory for all instances of all functions that use it.
//!
//! A model is a safetensors file that a deployment names (`gshare/model`). The store reads its header when the function is
//! deployed, so that a file whose header lies is refused then; its name in the store is its path. An instance gets the store's
//! socket (`$GSHARE_STORE`) and the name (`$GSHARE_MODEL`), which is a path for programs that know no store.

use super::api::ApiError;
use super::host::Version;
use gshare_core::Bytes;
use gshare_modelstore::client::{Client, ClientError, GetOptions};
use gshare_modelstore::frame::Code;
use gshare_modelstore::server::{Running, Server, ServerConfig};
use gshare_modelstore::status::Status;
use gshare_modelstore::store::{Access, MemoryTier};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::SystemTime;

/// The store of this node: of this host, or one that runs already.
#[derive(Debug)]
pub struct Models {
    /// Where clients connect.
    pub socket: PathBuf,
    /// Length and time of change of each file when the store took it.
    taken: Mutex<BTreeMap<PathBuf, Stamp>>,
    errands: Sender<Errand>,
    running: Option<Running>,
}

/// Length of a file and when it was changed.
type Stamp = (u64, Option<SystemTime>);

/// An order of the platform about a model.
#[derive(Debug, Clone)]
pub enum Errand {
    /// A request is expected: its weights are to be in host memory.
    Fetch(PathBuf),
    /// Its weights make room in host memory.
    Forget(PathBuf),
}

impl Errand {
    /// The errand for a function's model; none for a function without.
    pub fn of(version: &Version, fetch: bool) -> Option<Self> {
        let path = version.plan.model.as_ref()?.path.clone();
        Some(if fetch { Self::Fetch(path) } else { Self::Forget(path) })
    }
}

impl Models {
    /// A store of this host, whose models may take this much of host memory.
    ///
    /// # Errors
    /// When it cannot start.
    pub fn start(socket: PathBuf, memory: Bytes) -> anyhow::Result<Self> {
        let mut config = ServerConfig::at(socket.clone());
        config.store.host = memory;
        let running = Server::new(config)?.spawn()?;
        Ok(Self { running: Some(running), ..Self::at(socket)? })
    }

    /// The store that listens at a socket.
    ///
    /// # Errors
    /// When the thread that runs its errands cannot be started.
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

    /// Has the store take a file as a model. One that it has, for another function or another version, is taken again only if the
    /// file has changed.
    ///
    /// # Errors
    /// 400 that names the file and what is wrong with it, the bound that it would pass, or that it has changed while instances use it.
    pub fn put(&self, path: &Path) -> Result<(), ApiError> {
        let refused =
            |why: String| ApiError::bad(format!("annotations: gshare/model: `{}`: {why}", path.display()));
        let file = std::fs::File::open(path).map_err(|error| refused(error.to_string()))?;
        let client =
            Client::connect(&self.socket).map_err(|error| ApiError::internal("the model store", error))?;
        let about = file.metadata().map_err(|error| refused(error.to_string()))?;
        let (name, stamp) = (name(path)?, (about.len(), about.modified().ok()));
        // Functions run as this host's user, who owns the name.
        let put = || client.put_file(name, Access::Private, MemoryTier::Host, &file, |_, _| {}).map(drop);
        let mut taken = self.taken.lock();
        let known = taken.get(path).copied();
        let put = match put() {
            Err(ClientError::Refused { code: Code::NameTaken, .. }) if known == Some(stamp) => Ok(()),
            Err(ClientError::Refused { code: Code::NameTaken, .. }) => match client.evict(name, true) {
                Ok(()) => put(),
                // A store that has outlived its host: whether the file is the one that it has taken is not known.
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

    /// Has the thread for errands do one. One that fails is told in the host's log: a load does what it would have done.
    pub fn send(&self, errand: Errand) {
        let _ = self.errands.send(errand);
    }

    /// Contents of the store.
    pub fn status(&self) -> Option<Status> {
        Client::connect(&self.socket).ok()?.status().ok()
    }

    /// Ends the store, where it is this host's.
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
        // The reference goes when the client does; the model stays as long as there is room.
        Errand::Fetch(path) => drop(client.get(&path.to_string_lossy(), &GetOptions::default())?),
        Errand::Forget(path) => client.evict(&path.to_string_lossy(), false)?,
    }
    Ok(())
}
