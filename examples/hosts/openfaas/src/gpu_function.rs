//! An example function for the OpenFaaS host, as the program `gpu_function` and as `--gpu-function` of the host. It listens on
//! `$HOST:$PORT`, by default of the loopback address, and does not know gshare.
//!
//! | path | answer |
//! |---|---|
//! | `/` | runs `$KERNELS` (5) kernels of 2 ms in sequence, and answers their total time in JSON |
//! | `/echo` | the request's body, streamed |
//! | `/stream?lines=N` | N lines, one every 50 ms |
//! | `/slow?ms=N` | after N ms, without the GPU |
//! | `/headers` | the request's headers |
//! | `/secret/NAME` | a secret |
//! | `/exit` | none: the process ends |
//!
//! - With `$KERNELS` 0 the function uses no GPU.
//! - A kernel takes `$KERNEL_US` (2000) us. With `$KERNEL_SMS` it takes that time on this many SMs, and less time on more.
//! - The weights take `$WEIGHTS_MIB` (64) MiB, or come from `$GSHARE_MODEL` in the store at `$GSHARE_STORE`:
//!   mapped if the store has them on the device, else copied.
//! - With several devices, each holds a part of the weights and runs the kernels of each request.
//! - A stage of a pipeline runs `$KERNELS` for each of `$GSHARE_COMPONENTS`, and its JSON answer contains the answer of the previous
//!   stage. With `$FILE_KIB` the answer to a next stage is padded to that size, and goes there through shared memory.
//! - `$START_MS` (0) is the time before it does anything, in which other programs import their libraries.
//! - `$STEPS` makes the function a training job of that many steps.
//! - In a batch each further request adds `$BATCH_PERCENT` (10) of a request's time to a kernel, and each request takes `$BATCH_MIB` (0)
//!   of memory.
#![allow(unsafe_code, reason = "a kernel launch is unsafe in any CUDA API")]

use crate::between::FILE;
use anyhow::{Context as _, Result};
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, LaunchConfig};
use cudarc::nvrtc::Ptx;
use gshare_fake_cuda_spec::spin_ptx;
use gshare_modelstore::backend::cuda::CudaMap;
use gshare_modelstore::client::{Client, ClientError, GetOptions, Model};
use gshare_modelstore::frame::Code;
use gshare_modelstore::store::MemoryTier;
use gshare_profile::batch::LENGTHS;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The number of requests of a batch, and the receiver of their time on the devices and of the number of devices.
type Job = (u32, oneshot::Sender<Result<(Duration, usize), String>>);

/// Serves until the process ends, or trains.
///
/// # Errors
/// If a variable is invalid, or the GPU or the port cannot be used.
pub fn main() -> Result<()> {
    let number = |name: &'static str, default: u32| {
        std::env::var(name).map_or(Ok(default), |text| text.parse::<u32>()).context(name)
    };
    let components = std::env::var("GSHARE_COMPONENTS").map_or(1, |names| names.split(',').count());
    let work = Work {
        kernels: number("KERNELS", 5)? * u32::try_from(components)?,
        micros: number("KERNEL_US", 2_000)?,
        sms: number("KERNEL_SMS", 0)?,
        weights: usize::try_from(number("WEIGHTS_MIB", 64)?)? << 20,
        batch_percent: number("BATCH_PERCENT", 10)?,
        batch_bytes: usize::try_from(number("BATCH_MIB", 0)?)? << 20,
    };
    std::thread::sleep(Duration::from_millis(number("START_MS", 0)?.into()));
    if let steps @ 1.. = number("STEPS", 0)? {
        return train(work, steps);
    }
    let kernels = work.kernels;
    let host = std::env::var("HOST").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let port: u16 = std::env::var("PORT").context("PORT")?.parse().context("PORT")?;
    let (jobs, todo) = channel();
    if kernels > 0 {
        let (ready, loaded) = channel();
        std::thread::spawn(move || {
            if let Err(error) = gpu(work, &todo, &ready) {
                eprintln!("{error:#}");
                std::process::exit(1);
            }
        });
        // Load the model before the port opens: a connection means ready.
        loaded.recv().context("the GPU cannot be used")?;
    } else {
        // Requests for the GPU then fail at once.
        drop(todo);
    }
    let app = axum::Router::new()
        .route("/", any(infer))
        .route("/echo", any(|request: Request| async { Body::new(request.into_body()) }))
        .route("/stream", get(stream))
        .route("/slow", any(slow))
        .route("/headers", any(headers))
        .route("/secret/{name}", get(secret))
        .route("/exit", any(exit))
        .with_state(jobs);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind((host.as_str(), port)).await?;
        println!("serving, {kernels} kernels a request");
        axum::serve(axum::serve::ListenerExt::tap_io(listener, |stream| drop(stream.set_nodelay(true))), app)
            .await?;
        Ok(())
    })
}

/// Cost of a request: kernels, the time of each in us, the SMs at which a kernel takes that time (0 for any device), and bytes
/// of weights. Cost of each further request of a batch in per cent of that time, and bytes of each request.
#[derive(Debug, Clone, Copy)]
struct Work {
    kernels: u32,
    micros: u32,
    sms: u32,
    weights: usize,
    batch_percent: u32,
    batch_bytes: usize,
}

/// A device with its part of the weights, and its kernel.
struct Gpu {
    work: Work,
    stream: Arc<CudaStream>,
    /// By the number of requests.
    kernels: BTreeMap<u32, cudarc::driver::CudaFunction>,
    /// Time of a kernel of one request.
    micros: u32,
    _weights: Weights,
}

/// A part of the weights on a device.
#[allow(dead_code, reason = "held, and not read: kernels of this program touch no memory")]
enum Weights {
    Own(CudaSlice<u8>),
    /// The store's copy, which others share as long as this one is held, and 4 MiB to work in.
    Shared(CudaMap, Model, CudaSlice<u8>),
}

impl Weights {
    fn of_store(
        name: &str,
        store: &str,
        (ordinal, stream): (usize, &Arc<CudaStream>),
    ) -> Result<Result<Self, Model>> {
        let store = Client::connect(store)?;
        let on_device = GetOptions { tier: MemoryTier::Gpu, ..GetOptions::default() };
        match store.get(name, &on_device) {
            Ok(model) => {
                let map = CudaMap::new(&model, u32::try_from(ordinal)?)?;
                Ok(Ok(Self::Shared(map, model, stream.alloc_zeros(4 << 20)?)))
            }
            // It has no such memory.
            Err(ClientError::Refused { code: Code::ModelTooLarge, .. }) => {
                Ok(Err(store.get(name, &GetOptions::default())?))
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Gpu {
    /// All devices of this process, each with an equal part of the weights.
    fn all(work: Work) -> Result<Vec<Self>> {
        let count = usize::try_from(CudaContext::device_count()?)?;
        (0..count).map(|ordinal| Self::open(work, ordinal, count)).collect()
    }

    fn open(work: Work, ordinal: usize, count: usize) -> Result<Self> {
        let context = CudaContext::new(ordinal)?;
        let stream = context.new_stream()?;
        let sms = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let micros = match work.sms {
            0 => work.micros,
            of => work.micros * of / u32::try_from(context.attribute(sms)?)?.max(1),
        };
        let weights = match (std::env::var("GSHARE_MODEL"), std::env::var("GSHARE_STORE")) {
            (Ok(name), Ok(store)) => {
                Weights::of_store(&name, &store, (ordinal, &stream))?.or_else(|model| {
                    let bytes = model.memory()?;
                    let part =
                        bytes.chunks(bytes.len().div_ceil(count).max(1)).nth(ordinal).unwrap_or_default();
                    Ok::<_, anyhow::Error>(Weights::Own(stream.clone_htod(part)?))
                })?
            }
            _ => Weights::Own(stream.alloc_zeros::<u8>(work.weights.div_ceil(count))?),
        };
        Ok(Self { work, stream, kernels: BTreeMap::new(), micros, _weights: weights })
    }

    /// Loads the kernel of a batch of this size.
    fn prepare(&mut self, size: u32) -> Result<(), cudarc::driver::DriverError> {
        if !self.kernels.contains_key(&size) {
            let micros = self.micros + self.micros * self.work.batch_percent * (size - 1) / 100;
            let name = format!("spin_{micros}us");
            let module = self.stream.context().load_module(Ptx::from_src(spin_ptx(&name, micros)))?;
            self.kernels.insert(size, module.load_function(&name)?);
        }
        Ok(())
    }

    /// Runs a batch of this size on all devices at once.
    fn run(all: &mut [Self], size: u32) -> Result<Duration, String> {
        let config = LaunchConfig { grid_dim: (16, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
        let begun = Instant::now();
        let mut run = || {
            let mut held = Vec::new();
            for gpu in &mut *all {
                gpu.stream.context().bind_to_thread()?;
                gpu.prepare(size)?;
                let bytes = gpu.work.batch_bytes * size as usize;
                if bytes > 0 {
                    held.push(gpu.stream.alloc_zeros::<u8>(bytes)?);
                }
                for _ in 0..gpu.work.kernels {
                    // SAFETY: the kernel takes no arguments and touches no memory.
                    unsafe { gpu.stream.launch_builder(&gpu.kernels[&size]).launch(config) }?;
                }
            }
            all.iter().try_for_each(|gpu| gpu.stream.synchronize())
        };
        run().map(|()| begun.elapsed()).map_err(|error: cudarc::driver::DriverError| error.to_string())
    }
}

/// The GPU's thread, which runs one request after the other.
fn gpu(work: Work, todo: &Receiver<Job>, ready: &Sender<()>) -> Result<()> {
    let mut gpus = Gpu::all(work)?;
    ready.send(())?;
    for (size, job) in todo {
        let ran = Gpu::run(&mut gpus, size);
        // The caller may have left.
        let _ = job.send(ran.map(|took| (took, gpus.len())));
    }
    Ok(())
}

/// Runs a training job.
fn train(work: Work, steps: u32) -> Result<()> {
    let mut gpus = Gpu::all(work)?;
    for step in 0..steps {
        Gpu::run(&mut gpus, 1).map_err(anyhow::Error::msg)?;
        if step % 100 == 0 {
            println!("step {step} of {steps}");
        }
    }
    println!("{steps} steps done");
    Ok(())
}

/// An answer to the next stage, padded to `$FILE_KIB`; the last stage's answer as it is.
fn padded(seen: &serde_json::Value) -> String {
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let last = number("GSHARE_STAGE").zip(number("GSHARE_STAGES")).is_none_or(|(stage, of)| stage + 1 == of);
    let size = number("FILE_KIB").filter(|_| !last).map_or(0, |kib| kib << 10);
    let text = seen.to_string();
    let padding = " ".repeat(size.saturating_sub(text.len()));
    format!("{text}{padding}\n")
}

/// Writes a long answer into a file for the next stage. Returns the file's name.
fn in_file(answer: &str) -> Option<String> {
    let folder = std::env::var("GSHARE_BETWEEN").ok().filter(|_| answer.len() > 64 << 10)?;
    let file = tempfile::Builder::new().tempfile_in(folder).ok()?;
    std::fs::write(file.path(), answer).ok()?;
    let (_, path) = file.keep().ok()?;
    Some(path.file_name()?.to_str()?.to_owned())
}

/// The answer of the previous stage, from the file that the request names or from the body.
fn before(headers: &HeaderMap, body: &Bytes) -> Option<serde_json::Value> {
    let Some(name) = headers.get(FILE) else { return serde_json::from_slice(body).ok() };
    let path = std::path::Path::new(&std::env::var("GSHARE_BETWEEN").ok()?).join(name.to_str().ok()?);
    let bytes = std::fs::read(&path).ok()?;
    std::fs::remove_file(&path).ok()?;
    let mut value: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    value["file_bytes"] = bytes.len().into();
    Some(value)
}

async fn infer(State(jobs): State<Sender<Job>>, headers: HeaderMap, body: Bytes) -> Response {
    let (job, done) = oneshot::channel();
    let lengths = headers.get(LENGTHS).and_then(|value| value.to_str().ok());
    let size = lengths.map_or(1, |lengths| lengths.split(',').count());
    if jobs.send((u32::try_from(size).unwrap_or(1), job)).is_err() {
        return (StatusCode::NOT_IMPLEMENTED, "KERNELS is 0\n").into_response();
    }
    match done.await {
        Ok(Ok((took, devices))) => {
            let mut seen = serde_json::json!({"gpu_ms": took.as_secs_f64() * 1e3, "pid": std::process::id()});
            if devices > 1 {
                seen["devices"] = devices.into();
            }
            if lengths.is_some() {
                seen["batch"] = size.into();
                let answer = format!("{seen}\n");
                let lengths = gshare_profile::batch::lengths(vec![answer.len(); size]);
                return ([(LENGTHS, lengths)], answer.repeat(size)).into_response();
            }
            if let Ok(stage) = std::env::var("GSHARE_STAGE") {
                seen["stage"] = stage.into();
                seen["components"] = std::env::var("GSHARE_COMPONENTS").unwrap_or_default().into();
                if let Some(before) = before(&headers, &body) {
                    seen["before"] = before;
                }
                if let Some(name) = in_file(&padded(&seen)) {
                    return ([(FILE, name)], "").into_response();
                }
            }
            ([(header::CONTENT_TYPE, "application/json")], padded(&seen)).into_response()
        }
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn stream(Query(query): Query<BTreeMap<String, u32>>) -> Response {
    let lines = query.get("lines").copied().unwrap_or(5);
    let (sender, body) = crate::later::channel();
    tokio::spawn(async move {
        for line in 0..lines {
            if sender.send(Bytes::from(format!("{{\"line\":{line}}}\n"))).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

async fn slow(Query(query): Query<BTreeMap<String, u64>>) -> &'static str {
    let ms = query.get("ms").copied().unwrap_or(100);
    println!("sleeping for {ms} ms");
    tokio::time::sleep(Duration::from_millis(ms)).await;
    "slow\n"
}

async fn headers(headers: HeaderMap) -> Response {
    let text = |value: &header::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let all: BTreeMap<&str, String> =
        headers.iter().map(|(key, value)| (key.as_str(), text(value))).collect();
    serde_json::to_string(&all).unwrap_or_default().into_response()
}

async fn exit() -> StatusCode {
    std::process::exit(3)
}

async fn secret(Path(name): Path<String>) -> Response {
    let dir = std::env::var_os("secret_mount_path").unwrap_or_default();
    // A name is one segment of the path, so it contains no `/`.
    match std::fs::read(std::path::Path::new(&dir).join(name)) {
        Ok(bytes) => bytes.into_response(),
        Err(error) => (StatusCode::NOT_FOUND, error.to_string()).into_response(),
    }
}
