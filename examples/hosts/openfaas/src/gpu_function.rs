//! A function for the OpenFaaS host, as a program of its own (`gpu_function`) and as the host's own (`--gpu-function`): it listens on `127.0.0.1:$PORT` and knows nothing of gshare.
//!
//! | path | answer |
//! |---|---|
//! | `/` | runs `$KERNELS` (5) kernels of 2 ms one after the other, and says in JSON how long that took |
//! | `/echo` | the request's body, as it comes |
//! | `/stream?lines=N` | N lines, one every 50 ms |
//! | `/slow?ms=N` | after N ms, without the GPU |
//! | `/headers` | the request's headers |
//! | `/secret/NAME` | a secret |
//! | `/exit` | none: the process ends |
//!
//! With `$KERNELS` 0 no GPU is looked for. A kernel takes `$KERNEL_US` (2000) us; with `$KERNEL_SMS` it takes that time on
//! that many SMs, and less on a device that has more. The weights take `$WEIGHTS_MIB` (64) MiB, or are
//! those of `$GSHARE_MODEL` from the store at `$GSHARE_STORE`: mapped where that has them on the device, else a copy. As a stage of a pipeline the function runs the kernels of its
//! components, `$KERNELS` for each of `$GSHARE_COMPONENTS`. Its answer is one JSON object, which holds the answer of the stage before;
//! with `$FILE_KIB` the answer to the next stage is padded to that size and goes through shared memory. `$STEPS` makes the function a
//! training job of that many steps. On several devices it spreads its weights over them and runs a request's kernels on each.
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
use gshare_modelstore::backend::cuda::CudaMap;
use gshare_modelstore::client::{Client, ClientError, GetOptions, Model};
use gshare_modelstore::frame::Code;
use gshare_modelstore::store::MemoryTier;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The time of a request on the devices, and their number.
type Job = oneshot::Sender<Result<(Duration, usize), String>>;

/// Serves until the process ends, or trains.
///
/// # Errors
/// When a variable is wrong, or the GPU or the port cannot be used.
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
    };
    if let steps @ 1.. = number("STEPS", 0)? {
        return train(work, steps);
    }
    let kernels = work.kernels;
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
        // The model is loaded before anybody may connect.
        loaded.recv().context("the GPU cannot be used")?;
    } else {
        // A request for the GPU is refused, and does not wait for it.
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
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
        println!("serving, {kernels} kernels a request");
        axum::serve(axum::serve::ListenerExt::tap_io(listener, |stream| drop(stream.set_nodelay(true))), app)
            .await?;
        Ok(())
    })
}

/// Cost of a request: kernels, the time of each in us, the SMs on which a kernel takes that (0: on any device), and bytes of weights.
#[derive(Debug, Clone, Copy)]
struct Work {
    kernels: u32,
    micros: u32,
    sms: u32,
    weights: usize,
}

/// PTX of a kernel each of whose threads looks at the device's clock until `micros` us have passed. The simulated driver goes by
/// its name.
fn spin_ptx(name: &str, micros: u32) -> String {
    format!(
        ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry {name}()\n{{\n\
         .reg .u64 %begin, %now;\n.reg .pred %more;\nmov.u64 %begin, %globaltimer;\nagain:\n\
         mov.u64 %now, %globaltimer;\nsub.u64 %now, %now, %begin;\nsetp.lt.u64 %more, %now, {micros}000;\n\
         @%more bra again;\nret;\n}}\n"
    )
}

/// A device with its part of the weights on it, and what runs a request's kernels there.
struct Gpu {
    work: Work,
    stream: Arc<CudaStream>,
    kernel: cudarc::driver::CudaFunction,
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
    /// All devices that this process sees, each with an equal part of the weights.
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
        let name = format!("spin_{micros}us");
        let module = context.load_module(Ptx::from_src(spin_ptx(&name, micros)))?;
        let kernel = module.load_function(&name)?;
        let weights = match (std::env::var("GSHARE_MODEL"), std::env::var("GSHARE_STORE")) {
            (Ok(name), Ok(store)) => Weights::of_store(&name, &store, (ordinal, &stream))?.or_else(|model| {
                let bytes = model.memory()?;
                let part = bytes.chunks(bytes.len().div_ceil(count).max(1)).nth(ordinal).unwrap_or_default();
                Ok::<_, anyhow::Error>(Weights::Own(stream.clone_htod(part)?))
            })?,
            _ => Weights::Own(stream.alloc_zeros::<u8>(work.weights.div_ceil(count))?),
        };
        Ok(Self { work, stream, kernel, _weights: weights })
    }

    /// Runs a request on all devices at once.
    fn run(all: &[Self]) -> Result<Duration, String> {
        let config = LaunchConfig { grid_dim: (16, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
        let begun = Instant::now();
        let run = || {
            for gpu in all {
                gpu.stream.context().bind_to_thread()?;
                for _ in 0..gpu.work.kernels {
                    // SAFETY: the kernel takes no arguments and touches no memory.
                    unsafe { gpu.stream.launch_builder(&gpu.kernel).launch(config) }?;
                }
            }
            all.iter().try_for_each(|gpu| gpu.stream.synchronize())
        };
        run().map(|()| begun.elapsed()).map_err(|error: cudarc::driver::DriverError| error.to_string())
    }
}

/// The GPU's thread: one request after the other.
fn gpu(work: Work, todo: &Receiver<Job>, ready: &Sender<()>) -> Result<()> {
    let gpus = Gpu::all(work)?;
    ready.send(())?;
    for job in todo {
        // The one that asked may have gone.
        let _ = job.send(Gpu::run(&gpus).map(|took| (took, gpus.len())));
    }
    Ok(())
}

/// A training job.
fn train(work: Work, steps: u32) -> Result<()> {
    let gpus = Gpu::all(work)?;
    for step in 0..steps {
        Gpu::run(&gpus).map_err(anyhow::Error::msg)?;
        if step % 100 == 0 {
            println!("step {step} of {steps}");
        }
    }
    println!("{steps} steps done");
    Ok(())
}

/// Hands an answer of at least `$FILE_KIB` on to the next stage in a file, padded to that size, and returns the name.
fn in_file(seen: &serde_json::Value) -> Option<String> {
    let variable = |name: &str| std::env::var(name).ok();
    let number = |name: &str| variable(name)?.parse::<usize>().ok();
    let (kib, folder) = (number("FILE_KIB")?, variable("GSHARE_BETWEEN")?);
    if number("GSHARE_STAGE")? + 1 == number("GSHARE_STAGES")? {
        return None;
    }
    let file = tempfile::Builder::new().tempfile_in(folder).ok()?;
    let mut text = seen.to_string();
    text.push_str(&" ".repeat((kib << 10).saturating_sub(text.len())));
    std::fs::write(file.path(), text).ok()?;
    let (_, path) = file.keep().ok()?;
    Some(path.file_name()?.to_str()?.to_owned())
}

/// The answer of the stage before this one, which is the body or the file that the request names.
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
    if jobs.send(job).is_err() {
        return (StatusCode::NOT_IMPLEMENTED, "KERNELS is 0\n").into_response();
    }
    match done.await {
        Ok(Ok((took, devices))) => {
            let mut seen = serde_json::json!({"gpu_ms": took.as_secs_f64() * 1e3, "pid": std::process::id()});
            if devices > 1 {
                seen["devices"] = devices.into();
            }
            if let Ok(stage) = std::env::var("GSHARE_STAGE") {
                seen["stage"] = stage.into();
                seen["components"] = std::env::var("GSHARE_COMPONENTS").unwrap_or_default().into();
                if let Some(before) = before(&headers, &body) {
                    seen["before"] = before;
                }
                if let Some(name) = in_file(&seen) {
                    return ([(FILE, name)], "").into_response();
                }
            }
            ([(header::CONTENT_TYPE, "application/json")], format!("{seen}\n")).into_response()
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
    // A name has no `/`, since it is one segment of the path.
    match std::fs::read(std::path::Path::new(&dir).join(name)) {
        Ok(bytes) => bytes.into_response(),
        Err(error) => (StatusCode::NOT_FOUND, error.to_string()).into_response(),
    }
}
