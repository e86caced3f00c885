//! A function for the OpenFaaS host: it listens on `127.0.0.1:$PORT` and knows nothing of gshare.
//!
//! | path | answer |
//! |---|---|
//! | `/` | runs `$KERNELS` (5) kernels of 2 ms one after the other, and says in JSON how long that took |
//! | `/echo` | the request's body, as it comes |
//! | `/stream?lines=N` | N lines, one every 50 ms |
//! | `/slow?ms=N` | after so long, without the GPU |
//! | `/headers` | the request's headers |
//! | `/secret/NAME` | a secret |
//! | `/exit` | none: the process ends |
//!
//! With `$KERNELS` 0 no GPU is looked for.
#![allow(unsafe_code, reason = "a kernel launch is unsafe in any CUDA API")]

use anyhow::{Context as _, Result};
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use cudarc::driver::{CudaContext, LaunchConfig};
use cudarc::nvrtc::Ptx;
use gshare_examples::spin_ptx;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

const KERNEL: &str = "spin_2000us";

type Job = oneshot::Sender<Result<Duration, String>>;

fn main() -> Result<()> {
    let port: u16 = std::env::var("PORT").context("PORT")?.parse().context("PORT")?;
    let kernels: u32 = std::env::var("KERNELS").map_or(Ok(5), |text| text.parse()).context("KERNELS")?;
    let (jobs, todo) = channel();
    if kernels > 0 {
        let (ready, loaded) = channel();
        std::thread::spawn(move || {
            if let Err(error) = gpu(kernels, &todo, &ready) {
                eprintln!("{error:#}");
                std::process::exit(1);
            }
        });
        // The model is loaded before anybody may connect.
        loaded.recv().context("the GPU cannot be used")?;
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

/// The GPU's thread: one request after the other.
fn gpu(kernels: u32, todo: &Receiver<Job>, ready: &Sender<()>) -> Result<()> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let kernel = context.load_module(Ptx::from_src(spin_ptx(KERNEL, 2_000)))?.load_function(KERNEL)?;
    let config = LaunchConfig { grid_dim: (16, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    let _weights = stream.alloc_zeros::<u8>(64 << 20)?;
    ready.send(())?;
    for job in todo {
        let begun = Instant::now();
        let run = || {
            for _ in 0..kernels {
                // SAFETY: the kernel takes no arguments and touches no memory.
                unsafe { stream.launch_builder(&kernel).launch(config) }?;
            }
            stream.synchronize()
        };
        let ran = run().map(|()| begun.elapsed()).map_err(|error| error.to_string());
        // Whoever asked may have gone.
        let _ = job.send(ran);
    }
    Ok(())
}

async fn infer(State(jobs): State<Sender<Job>>) -> Response {
    let (job, done) = oneshot::channel();
    if jobs.send(job).is_err() {
        return (StatusCode::NOT_IMPLEMENTED, "KERNELS is 0\n").into_response();
    }
    match done.await {
        Ok(Ok(took)) => {
            let seen = serde_json::json!({"gpu_ms": took.as_secs_f64() * 1e3, "pid": std::process::id()});
            ([(header::CONTENT_TYPE, "application/json")], format!("{seen}\n")).into_response()
        }
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn stream(Query(query): Query<BTreeMap<String, u32>>) -> Response {
    let lines = query.get("lines").copied().unwrap_or(5);
    let (sender, body) = gshare_examples::openfaas::later::channel();
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
