//! The store as a server: a Unix socket, the engine behind a lock, memory behind the engine.
//!
//! # How it works
//! ```text
//!  client ── SOCK_SEQPACKET ──▶ a thread per connection ──┐
//!  client ── SOCK_SEQPACKET ──▶ a thread per connection ──┼─▶ Core: engine, names, arenas  (one lock, never held
//!                               loader threads ───────────┤        over a read, a write or a wait)
//!                               the timer ────────────────┘
//! ```
//! Each connection is a client, and the kernel identifies its process (`SO_PEERCRED`). When the socket closes, even by a
//! crash, the client's references, requests and unfinished writes are released.
//!
//! Readers hold their own descriptors, so they outlive the store. A restarted store knows only the files in its directory;
//! the old arenas' memory is freed with the last process that maps it.
//!
//! # Names
//! A name belongs to the uid that put it: another uid can neither replace nor evict it, and can get it only if it is shared
//! (`Group`, `Public`). The same name of two uids means two models. Root and the store's own uid may read, pin and evict
//! all models. A name means the client's own model, then the operator's, then the first model that another uid shares;
//! `UID:NAME` means only that uid's model. An unreferenced model may lose its memory to another uid's model, but keeps its
//! name and its source.
//!
//! # Limits
//! Through the store, one client can affect another only by its use of memory, within its owner's limits and
//! [`bounds`](crate::bounds). A request beyond a bound is refused with the name of the bound. An answer with descriptors
//! counts until its client has read it or closed its socket, also when the store has ended the connection. The time of
//! loads and of `Verify` is not bounded. A client may keep a document open, or an arena mapped after it gave the reference
//! back. Only a memory cgroup sees that memory, not the store.

mod conn;
mod locked_state;
mod names;

use self::locked_state::{Core, Shared};
use crate::arena_fill::{LoadError, Source};
use crate::backend::{HostBackend, ModelBackend};
use crate::bounds::{Bound, Bounds, Exceeded, Limits, Resource, Work};
use crate::engine::{Store, StoreConfig};
use crate::store::{Access, ModelStore, StoreEvent, StoreLimits};
use gshare_core::{Bytes, ConfigError, GroupId, TenantId};
use rustix::fd::OwnedFd;
use rustix::fs::Mode;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown, socket_with,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Settings of a server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Permissions of the socket. Default 0o666, since access is decided per client.
    pub socket_mode: u32,
    /// Memory and watermarks.
    pub store: StoreConfig,
    /// A directory of `*.safetensors` files. They are models from the start, with the file's stem as name, readable by all
    /// users. Default none.
    pub models: Option<PathBuf>,
    /// Limits of each user without an entry in `limits`. Without a limit of bytes, a user other than root and the store's
    /// own may have half of all memory: used, pinned and sourceless models are not evicted for others.
    pub default_limits: StoreLimits,
    /// Limits of individual users, by uid.
    pub limits: BTreeMap<u32, StoreLimits>,
    /// Bounds that replace those of [`Limits::of_process`].
    pub bounds: BTreeMap<Resource, Bound>,
    /// Rate at which headers of one user are parsed.
    pub header_work: Work,
    /// Threads of one load. Default: one per CPU, at most 8, the number at which memory becomes the limit.
    pub threads: usize,
    /// Expected rate of a load from disk in bytes per second, to compare the costs of evictions. Default 1 GB.
    pub disk_rate: Bytes,
}

gshare_core::with_fields!(ServerConfig {
    with_socket(socket: PathBuf),
    with_socket_mode(socket_mode: u32),
    with_store(store: StoreConfig),
    with_models(models: Option<PathBuf>),
    with_default_limits(default_limits: StoreLimits),
    with_limits(limits: BTreeMap<u32, StoreLimits>),
    with_bounds(bounds: BTreeMap<Resource, Bound>),
    with_header_work(header_work: Work),
    with_threads(threads: usize),
    with_disk_rate(disk_rate: Bytes),
});

impl ServerConfig {
    /// The default settings for this socket.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            socket_mode: 0o666,
            store: StoreConfig::default(),
            models: None,
            default_limits: StoreLimits::default(),
            limits: BTreeMap::new(),
            bounds: BTreeMap::new(),
            header_work: Work::default(),
            threads: std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(8)),
            disk_rate: Bytes(1_000_000_000),
        }
    }

    /// Replaces the bound of a resource, which by default follows from [`Limits::of_process`].
    #[must_use]
    pub fn with_bound(mut self, resource: Resource, bound: Bound) -> Self {
        self.bounds.insert(resource, bound);
        self
    }

    /// The bounds for a process with this limit of open descriptors.
    fn bounds(&self, descriptors: u64) -> Limits {
        let limits = Limits::of_process(descriptors, &self.store).with_work(self.header_work);
        self.bounds.iter().fold(limits, |limits, (&resource, &bound)| limits.with_bound(resource, bound))
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A store listens there already.
    #[error("a store listens at {path} already")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// A model of the directory is invalid.
    #[error("{path}: {error}")]
    Model {
        /// The file.
        path: PathBuf,
        /// The fault of the file.
        error: LoadError,
    },
    /// The models of the directory exceed a bound.
    #[error(transparent)]
    Bound(#[from] Exceeded),
    /// The system refused an operation.
    #[error("{what}: {error}")]
    Io {
        /// The attempted operation.
        what: String,
        /// The system's error.
        error: io::Error,
    },
}

/// A server, ready to run.
#[derive(Debug)]
pub struct Server {
    listener: OwnedFd,
    shared: Arc<Shared>,
    path: PathBuf,
}

/// A running server. Stops on drop.
#[derive(Debug)]
pub struct Running {
    listener: OwnedFd,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    path: PathBuf,
}

impl Server {
    /// Binds the socket and reads the directory. The only tier is host memory, in memory files.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn new(config: ServerConfig) -> Result<Self, ServerError> {
        Self::with_backends(config, Box::new(HostBackend), None)
    }

    /// As [`Self::new`], with the caller's memory backends.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn with_backends(
        config: ServerConfig,
        host: Box<dyn ModelBackend>,
        gpu: Option<Box<dyn ModelBackend>>,
    ) -> Result<Self, ServerError> {
        let mut engine = config.store.clone();
        if gpu.is_none() {
            engine.gpu = Bytes::ZERO;
        }
        Self::with_engine(config, Box::new(Store::new(engine)?), host, gpu)
    }

    /// The same with a policy of the host's own, which keeps to the memory that the configuration names.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn with_engine(
        config: ServerConfig,
        engine: Box<dyn ModelStore>,
        host: Box<dyn ModelBackend>,
        gpu: Option<Box<dyn ModelBackend>>,
    ) -> Result<Self, ServerError> {
        let ServerConfig { socket: path, socket_mode, models, .. } = config.clone();
        let backends = [gpu.map(Arc::from), Some(Arc::from(host))];
        let open = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let bounds = config.bounds(open.unwrap_or(u64::MAX));
        let bounds = Bounds::new(bounds, rustix::process::geteuid().as_raw())?;
        let mut core = Core::new(engine, config, backends, bounds);
        for (name, file) in models.as_deref().map(listed).transpose()?.unwrap_or_default() {
            add(&mut core, name, &file)?;
        }
        let listener = listen_at(&path, socket_mode)?;
        let shared = Arc::new(Shared::new(core));
        Ok(Self { listener, shared, path })
    }

    /// Serves in background threads.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn spawn(self) -> io::Result<Running> {
        let Self { listener, shared, path } = self;
        let accepting = listener.try_clone()?;
        let (accept, timer) = (shared.clone(), shared.clone());
        let threads = vec![
            std::thread::Builder::new()
                .name("store-accept".into())
                .spawn(move || conn::accept(&accepting, &accept))?,
            std::thread::Builder::new().name("store-timer".into()).spawn(move || timer.run_timer())?,
        ];
        Ok(Running { listener, shared, threads, path })
    }
}

impl Running {
    /// The store's figures, as `gshare store stat --json` prints them.
    pub fn stat(&self) -> serde_json::Value {
        self.shared.stat()
    }

    /// Stops serving; clients keep their maps.
    pub fn stop(self) {
        drop(self);
    }

    /// Waits until another thread stops the server.
    pub fn join(mut self) {
        for thread in std::mem::take(&mut self.threads) {
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.stop();
        let _ = shutdown(&self.listener, Shutdown::Both);
        let _ = std::fs::remove_file(&self.path);
        for thread in std::mem::take(&mut self.threads) {
            let _ = thread.join();
        }
    }
}

fn failed<'a>(what: impl Into<String> + 'a) -> impl FnOnce(io::Error) -> ServerError + 'a {
    |error| ServerError::Io { what: what.into(), error }
}

/// Binds the socket. Replaces a stale socket without a listener.
fn listen_at(path: &Path, mode: u32) -> Result<OwnedFd, ServerError> {
    let name = path.display().to_string();
    let address = SocketAddrUnix::new(path).map_err(|error| failed(&name)(error.into()))?;
    let make = || socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = make().map_err(|error| failed("socket")(error.into()))?;
    if path.exists() {
        let probe = make().map_err(|error| failed("socket")(error.into()))?;
        if rustix::net::connect(&probe, &address).is_ok() {
            return Err(ServerError::InUse { path: path.to_owned() });
        }
        std::fs::remove_file(path).map_err(failed(&name))?;
    }
    bind(&socket, &address).map_err(|error| failed(&name)(error.into()))?;
    rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(|error| failed(&name)(error.into()))?;
    listen(&socket, 1_024).map_err(|error| failed(&name)(error.into()))?;
    Ok(socket)
}

/// The safetensors files of a directory, by name.
fn listed(directory: &Path) -> Result<BTreeMap<String, PathBuf>, ServerError> {
    let name = directory.display().to_string();
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(failed(&name))? {
        let path = entry.map_err(failed(&name))?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
        if path.extension().is_some_and(|ending| ending == "safetensors")
            && let Some(stem) = stem
        {
            files.insert(stem, path);
        }
    }
    Ok(files)
}

fn add(core: &mut Core, name: String, path: &Path) -> Result<(), ServerError> {
    let file = File::open(path).map_err(failed(path.display().to_string()))?;
    let source = Source::open(file).map_err(|error| ServerError::Model { path: path.to_owned(), error })?;
    let uid = rustix::process::geteuid().as_raw();
    let (owner, group) = (TenantId::new(uid), GroupId::new(rustix::process::getegid().as_raw()));
    let bytes = Bytes(source.layout.arena_bytes);
    let reload = core.reload_time(bytes);
    let each =
        [(Resource::Models, 1), (Resource::Memory, source.layout.footprint()), (Resource::Descriptors, 1)];
    let booked: Result<_, Exceeded> =
        each.into_iter().map(|(resource, amount)| core.ledger.take(uid, resource, amount)).collect();
    let model = core.name(&name, Some(Arc::new(source)), Access::Public, uid, booked?);
    let event = StoreEvent::ModelAdded { model, owner, group, access: Access::Public, bytes, reload };
    core.tell(event, None)
        .map_err(|error| ServerError::Io { what: name, error: io::Error::other(error.to_string()) })
}
