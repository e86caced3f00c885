//! Open-loop load for the OpenFaaS host. Each request is sent at its scheduled time, and its latency counts from that time.
//!
//! ```sh
//! openfaas_load http://127.0.0.1:8080 /function/resnet 30:20 110:20 20:20     # requests/s : seconds
//! openfaas_load overhead http://127.0.0.1:8080 /function/resnet/echo http://127.0.0.1:9000 /echo
//! ```
//! The first command prints a line per second to standard error, and a JSON object at the end. The second compares the latency
//! of a call through the provider with a direct call, in alternation.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "seconds and counts of one run are small"
)]

use anyhow::{Context as _, Result, bail, ensure};
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::mpsc::unbounded_channel;

/// Latency objective: 69 ms, as in FaST-GShare, section 5.4.
const SLO: Duration = Duration::from_millis(69);
/// Measured calls through the provider, and as many direct calls.
const CALLS: usize = 1000;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments[..] {
        ["overhead", provider, path, function, direct] => {
            runtime.block_on(overhead((address(provider)?, path), (address(function)?, direct)))
        }
        [url, path, ref phases @ ..] if !phases.is_empty() => {
            let phases = phases.iter().map(|text| phase(text)).collect::<Result<Vec<_>>>()?;
            runtime.block_on(load(address(url)?, path, &phases))
        }
        _ => bail!("usage: openfaas_load URL PATH RATE:SECONDS... | overhead URL PATH URL PATH"),
    }
}

fn address(url: &str) -> Result<SocketAddr> {
    let plain = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
    plain.parse().with_context(|| format!("`{url}`: need http://ADDRESS:PORT"))
}

fn phase(text: &str) -> Result<(u64, u64)> {
    let parts =
        text.split_once(':').and_then(|(rate, seconds)| Some((rate.parse().ok()?, seconds.parse().ok()?)));
    parts
        .filter(|(rate, seconds)| *rate > 0 && *seconds > 0)
        .with_context(|| format!("`{text}`: need RATE:SECONDS"))
}

/// Sends one call over a new connection.
async fn call(to: SocketAddr, path: &str) -> Result<(StatusCode, Bytes)> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::post(path).header("host", to.to_string()).body(Body::from("image"))?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    Ok((status, axum::body::to_bytes(Body::new(answer.into_body()), 1 << 20).await?))
}

/// The next gap between Poisson arrivals, in units of the mean gap. A fixed seed makes runs comparable.
fn gap(state: &mut u64) -> f64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    -((*state >> 11) as f64 / (1u64 << 53) as f64).max(1e-12).ln()
}

#[derive(Default)]
struct Second {
    sent: u64,
    late: u64,
    failed: u64,
    replicas: u64,
}

async fn load(to: SocketAddr, path: &str, phases: &[(u64, u64)]) -> Result<()> {
    let name = path.trim_start_matches("/function/").split('/').next().unwrap_or_default().to_owned();
    let (done, mut results) = unbounded_channel();
    let (mut random, mut at, mut start) = (0x9E37_79B9_7F4A_7C15u64, 0.0, 0.0);
    let mut plan = Vec::new();
    for &(rate, seconds) in phases {
        let end = start + seconds as f64;
        at = f64::max(at, start);
        loop {
            at += gap(&mut random) / rate as f64;
            if at >= end {
                break;
            }
            plan.push(at);
        }
        start = end;
    }
    let whole = phases.iter().map(|(_, seconds)| *seconds).sum::<u64>();
    let began = Instant::now();
    let watcher = tokio::spawn(async move {
        let mut seen = Vec::new();
        for second in 0..whole {
            tokio::time::sleep_until((began + Duration::from_secs(second + 1)).into()).await;
            let body = call_get(to, &format!("/system/function/{name}")).await.unwrap_or_default();
            let status: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            seen.push(status["availableReplicas"].as_u64().unwrap_or(0));
        }
        seen
    });
    for &at in &plan {
        let due = began + Duration::from_secs_f64(at);
        tokio::time::sleep_until(due.into()).await;
        let (done, path) = (done.clone(), path.to_owned());
        tokio::spawn(async move {
            let answer = call(to, &path).await;
            let ok = matches!(answer, Ok((status, _)) if status.is_success());
            let why = match answer {
                Ok((status, _)) if status.is_success() => None,
                Ok((status, body)) => Some(format!("{status}: {}", String::from_utf8_lossy(&body).trim())),
                Err(error) => Some(format!("{error:#}")),
            };
            // The receiver lives until all calls have reported.
            let _ = done.send((at, due.elapsed(), ok, why));
        });
    }
    drop(done);
    let mut seconds: Vec<Second> = std::iter::repeat_with(Second::default).take(whole as usize).collect();
    let mut latencies = Vec::new();
    let mut reasons = std::collections::BTreeMap::<String, u64>::new();
    while let Some((at, took, ok, why)) = results.recv().await {
        let second = &mut seconds[at as usize];
        second.sent += 1;
        second.late += u64::from(ok && took > SLO);
        second.failed += u64::from(!ok);
        latencies.push(took);
        if let Some(why) = why {
            *reasons.entry(why).or_default() += 1;
        }
    }
    for (second, replicas) in seconds.iter_mut().zip(watcher.await?) {
        second.replicas = replicas;
    }
    eprintln!("second  sent  late  failed  replicas");
    for (n, second) in seconds.iter().enumerate() {
        let Second { sent, late, failed, replicas } = second;
        eprintln!("{n:>6}  {sent:>4}  {late:>4}  {failed:>6}  {replicas:>8}");
    }
    latencies.sort_unstable();
    let of = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    let sum = |what: fn(&Second) -> u64| seconds.iter().map(what).sum::<u64>();
    let (sent, late, failed) = (sum(|s| s.sent), sum(|s| s.late), sum(|s| s.failed));
    ensure!(sent as usize == plan.len(), "{sent} of {} requests came back", plan.len());
    let result = serde_json::json!({
        "requests": sent, "slo_ms": SLO.as_millis() as u64, "violations": late + failed,
        "violations_percent": 100.0 * (late + failed) as f64 / sent as f64, "failed": failed, "reasons": reasons,
        "p50_ms": of(0.5), "p95_ms": of(0.95), "p99_ms": of(0.99), "max_ms": of(1.0),
        "replicas": seconds.iter().map(|second| second.replicas).collect::<Vec<_>>(),
    });
    println!("{result}");
    Ok(())
}

async fn call_get(to: SocketAddr, path: &str) -> Result<Bytes> {
    let stream = TcpStream::connect(to).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut request = Request::get(path).header("host", to.to_string());
    // `user:password` for a provider that requires credentials.
    if let Ok(pair) = std::env::var("OPENFAAS_CREDENTIALS") {
        use base64::Engine as _;
        let text = base64::engine::general_purpose::STANDARD.encode(pair);
        request = request.header("authorization", format!("Basic {text}"));
    }
    let answer = sender.send_request(request.body(Body::empty())?).await?;
    Ok(axum::body::to_bytes(Body::new(answer.into_body()), 1 << 20).await?)
}

async fn overhead(provider: (SocketAddr, &str), function: (SocketAddr, &str)) -> Result<()> {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..CALLS + 50 {
        for (kind, (to, path)) in [provider, function].into_iter().enumerate() {
            let begun = Instant::now();
            let (status, _) = call(to, path).await?;
            ensure!(status.is_success(), "{path}: {status}");
            // The first rounds only warm caches up.
            if round >= 50 {
                times[kind].push(begun.elapsed());
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    let of = |kind: usize, place: usize| times[kind][place].as_secs_f64() * 1e6;
    let (p50, p99) = (CALLS / 2, CALLS * 99 / 100);
    let result = serde_json::json!({
        "calls": CALLS, "through_p50_us": of(0, p50), "through_p99_us": of(0, p99),
        "direct_p50_us": of(1, p50), "direct_p99_us": of(1, p99),
        "added_p50_us": of(0, p50) - of(1, p50), "added_p99_us": of(0, p99) - of(1, p99),
    });
    println!("{result}");
    Ok(())
}
