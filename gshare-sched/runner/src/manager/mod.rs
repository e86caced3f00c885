//! The GPU manager: starts, feeds and kills the model processes of a node (GPU-enabled FaaS, sections III-C and III-E).
//!
//! # Problem
//! A request scheduler ([`gshare_sched::request`]) decides which GPU loads, evicts and runs what. A manager has to do it, with one
//! process per model and GPU, under the hook, and to notice when one of them dies. And nothing may be left behind when
//! the manager itself is killed.
//!
//! # Terms
//! - **program**: how to start the process of a model; it loads the model when it starts, by its own command line;
//! - **model process**: such a process on one GPU; see [`frame`] for what it says and is told;
//! - **report**: what a manager has to say: events for the scheduler, and answers for clients.
//!
//! # Algorithm
//! | order | done by | reported when | as |
//! |---|---|---|---|
//! | `Evict` | `SIGKILL` to the process's group: it holds nothing that could be lost | it has ended, so its memory is free | `Evicted` |
//! | `Load` | start, hooked, `CUDA_VISIBLE_DEVICES` set | it says `Ready`; it ends, or takes too long | `Loaded`; `LoadFailed` |
//! | `Dispatch` | a frame with the request's input | it says `Done`; it ends, or takes too long | `Completed`; `NotResident` |
//!
//! A process that ends while it has nothing to do is reported as `Dropped`. One that breaks the protocol is killed, and
//! reported as one that ended. So a request runs at least once: one whose process died in the middle runs again.
//!
//! A [`GpuManager`] has no thread: it has a descriptor to wait for and a deadline, so that it fits into any loop. [`Serving`] is
//! that loop: scheduler and manager in one thread, with a [`ServingHandle`] to submit requests.
//!
//! # Example
//! ```no_run
//! use gshare_core::{Bytes, Duration, GpuId, ModelId, RequestId};
//! use gshare_sched::request::{LocalityScheduler, ModelProfile, SchedulerConfig};
//! use gshare_runner::manager::{GpuSpec, ManagerConfig, Program, Serving, Submission};
//!
//! let scheduler = LocalityScheduler::new(SchedulerConfig::evict_cost_aware())?;
//! let serving = Serving::spawn(ManagerConfig::default(), Box::new(scheduler))?;
//! let handle = serving.handle();
//! handle.add_gpu(GpuId::new(0), GpuSpec::new("0", Bytes::from_gib(16)))?;
//! let second = Duration::from_secs(1);
//! let profile = ModelProfile { load_disk: second, load_host: second, infer: second };
//! let mut program = Program::new("/usr/bin/python3", Bytes::from_gib(2), profile);
//! program.arguments = vec!["serve_resnet.py".into()];
//! handle.add_model(ModelId::new(0), program)?;
//! let answer = handle.submit(Submission::new(RequestId::new(1), ModelId::new(0), b"input".to_vec()))?.wait()?;
//! println!("{} bytes after {}", answer.output.len(), answer.completed.saturating_since(answer.arrived));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - `kill -9` of a model process: its request is told to the scheduler as not resident, and runs again.
//! - `kill -9` of the manager: the kernel kills the model processes with the thread that started them (their parent death
//!   signal), and their sockets end. A process that a model process started itself is in its group, and is killed with it
//!   as long as the manager lives; after that only the end of the socket tells it.
//! - Orders that make no sense change nothing, and say why.
//! - What others see of the node ([`GpuManager::publish`]) is under a lease: when the manager is gone, so is its record.
//!
//! # Limits
//! Where a model is loaded from is passed on (`GSHARE_LOAD_FROM`, `disk` or `host`; `GSHARE_KEEP_ON_HOST`, `0` or `1`), not
//! provided: pinned memory of the node belongs to the model store. A model process that lies about being ready is only
//! found out by its requests.

pub mod frame;

mod gpu_manager;
mod process;
mod serving;

pub use gpu_manager::{GpuManager, Report};
pub use process::HookedProcess;
pub use serving::{Answer, Ending, Refused, Serving, ServingHandle, ServingSnapshot, Submission, Ticket};

use gshare_core::{Bytes, Duration, GpuId, GpuKind, ModelId, NodeId, RequestId};
use gshare_sched::request::{ModelProfile, StateError};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

/// The hook, and the daemon that its processes register with.
#[derive(Debug, Clone)]
pub struct Hook {
    /// `libgshare_hook.so`.
    pub preload: PathBuf,
    /// The daemon's socket.
    pub socket: PathBuf,
}

gshare_core::config! {
    /// Settings of a [`GpuManager`].
    #[derive(Debug, Clone)]
    pub struct ManagerConfig {
        /// The hook that model processes run under. None by default.
        pub hook: Option<Hook> = None, with_hook;
        /// More environment for every model process. Nothing by default.
        pub environment: Vec<(OsString, OsString)> = Vec::new(), with_environment;
        /// How long a load may take before its process is killed. 2 minutes: the largest models from a slow disk.
        pub load_patience: Duration = Duration::from_secs(120), with_load_patience;
        /// How long a run may take before its process is killed. 1 minute: a run is a second or so.
        pub run_patience: Duration = Duration::from_secs(60), with_run_patience;
        /// How long what others see of a GPU lives without being renewed. 5 s: a few renewals may be lost.
        pub lease: Duration = Duration::from_secs(5), with_lease;
    }
}

/// A GPU of the node.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GpuSpec {
    /// The value of `CUDA_VISIBLE_DEVICES` for model processes: an index, or a UUID.
    pub visible: String,
    /// The kind of the GPU. Kind 0.
    pub kind: GpuKind,
    /// The node. Node 0.
    pub node: NodeId,
    /// Memory for models: what the GPU has, less the contexts of its processes and the driver's own.
    pub memory: Bytes,
}

impl GpuSpec {
    /// A GPU of kind 0 of node 0.
    pub fn new(visible: impl Into<String>, memory: Bytes) -> Self {
        Self { visible: visible.into(), kind: GpuKind::new(0), node: NodeId::new(0), memory }
    }
}

/// How to start the process of a model, and what the model costs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Program {
    /// The program.
    pub program: OsString,
    /// Its arguments. None.
    pub arguments: Vec<OsString>,
    /// Its environment besides the manager's. None.
    pub environment: Vec<(OsString, OsString)>,
    /// Memory the model takes on a GPU, its context included.
    pub memory: Bytes,
    /// The most that the hook lets it allocate. No limit.
    pub memory_limit: Option<Bytes>,
    /// The model's costs by kind of GPU; it runs on no other kind.
    pub profiles: Vec<(GpuKind, ModelProfile)>,
}

impl Program {
    /// A program for GPUs of kind 0.
    pub fn new(program: impl Into<OsString>, memory: Bytes, profile: ModelProfile) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            memory,
            memory_limit: None,
            profiles: vec![(GpuKind::new(0), profile)],
        }
    }
}

/// Why a manager refuses. Nothing changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// No such GPU (any more).
    #[error("unknown {0}")]
    UnknownGpu(GpuId),
    /// The GPU is here already.
    #[error("{0} is already here")]
    GpuExists(GpuId),
    /// No program was told for the model.
    #[error("unknown {0}: no program to start")]
    UnknownModel(ModelId),
    /// A model cannot change while a process of it runs.
    #[error("{0} runs: its program cannot change")]
    ModelRuns(ModelId),
    /// An order for a GPU that is doing something, or with a model that is in another state.
    #[error("{gpu} cannot {what} {model}: it {why}")]
    Order {
        /// Which GPU.
        gpu: GpuId,
        /// Load, run or evict.
        what: &'static str,
        /// Which model.
        model: ModelId,
        /// The obstacle, in words.
        why: &'static str,
    },
    /// The input is too long for a frame.
    #[error("input of {request} has {length} bytes: need at most {}", frame::MAX_PAYLOAD)]
    InputTooLong {
        /// Which request.
        request: RequestId,
        /// Its length.
        length: usize,
    },
    /// The shared state could not be written; if another manager wrote it, that one has the GPU now.
    #[error(transparent)]
    State(#[from] StateError),
    /// A request, GPU or model was refused by the scheduler.
    #[error(transparent)]
    Scheduler(#[from] gshare_sched::request::RequestError),
    /// The serving thread has stopped.
    #[error("serving has stopped")]
    Stopped,
    /// A system call failed that does not fail.
    #[error(transparent)]
    Io(#[from] io::Error),
}
