//! The HTTP endpoint: `GET /metrics` for Prometheus, `GET /ui` for people, and `GET /healthz`.
//!
//! The page asks for `GET /status`, the snapshot of `gshare status --json`. A browser may read it only for the page of this very
//! endpoint ([`page::check`]).
//!
//! A connection has one request. The endpoint closes the connection unless the header arrives within [`HEADER`] and the answer is
//! read within [`WHOLE`].

use crate::config::MetricsAddress;
use crate::handle::Handle;
use crate::page;
use crate::server::DaemonError;
use crate::sockets::clear_the_way;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// Longest time for the header of a request.
const HEADER: Duration = Duration::from_secs(5);
/// Longest time for a request and its answer.
const WHOLE: Duration = Duration::from_secs(10);
/// Most bytes of a request's header, and the smallest bound the library takes.
const MAX_HEADER: usize = 8192;
/// Media type of the metrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A bound address before the front thread serves it.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Binds an address.
    ///
    /// # Errors
    /// The address is in use, or this process may not use it.
    pub(crate) fn bind(address: &MetricsAddress) -> Result<Self, DaemonError> {
        let setup = |cause| DaemonError::Setup { what: format!("metrics = {address}"), cause };
        match address {
            MetricsAddress::Tcp(address) => {
                if !address.ip().is_loopback() {
                    tracing::warn!(%address, "metrics and the page name tenants, and other hosts can read them");
                }
                TcpListener::bind(address).map(Self::Tcp).map_err(setup)
            }
            MetricsAddress::Unix(path) => {
                clear_the_way(path)?;
                Ok(Self::Unix(UnixListener::bind(path).map_err(setup)?, path.clone()))
            }
        }
    }

    /// The file of a UNIX socket.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(_, path) => Some(path.clone()),
        }
    }
}

/// Answers the request of one connection, and closes the connection. `loopback` states that it came to a loopback address.
pub(crate) async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin, handle: Handle, loopback: bool) {
    let service = service_fn(move |request: Request<Incoming>| {
        let handle = handle.clone();
        async move { Ok::<_, Infallible>(respond(&request, &handle, loopback).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER)
        .max_buf_size(MAX_HEADER)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(WHOLE, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a request for metrics failed"),
        Err(_) => tracing::debug!("a request for metrics took longer than {WHOLE:?}"),
    }
}

async fn respond(request: &Request<Incoming>, handle: &Handle, loopback: bool) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return answer_of(StatusCode::METHOD_NOT_ALLOWED, "need GET or HEAD\n", &[(ALLOW, "GET, HEAD")]);
    }
    match request.uri().path() {
        "/metrics" => match handle.metrics_later().await {
            Ok(metrics) => answer_of(StatusCode::OK, metrics, &[(CONTENT_TYPE, OPEN_METRICS)]),
            Err(error) => answer_of(StatusCode::SERVICE_UNAVAILABLE, error.to_string(), &[]),
        },
        "/status" => status(request, handle, loopback).await,
        "/ui" => answer_of(
            StatusCode::OK,
            page::daemon(),
            &[(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, page::POLICY)],
        ),
        "/" => answer_of(StatusCode::TEMPORARY_REDIRECT, "see /ui\n", &[(LOCATION, "/ui")]),
        "/healthz" => answer_of(StatusCode::OK, "ok\n", &[]),
        _ => answer_of(StatusCode::NOT_FOUND, "see /metrics and /ui\n", &[]),
    }
}

/// The snapshot of `gshare status --json`.
async fn status(request: &Request<Incoming>, handle: &Handle, loopback: bool) -> Response<Full<Bytes>> {
    if let Err(why) = page::check(request.headers(), loopback) {
        return answer_of(StatusCode::FORBIDDEN, why, &[]);
    }
    let snapshot = match handle.snapshot_later().await {
        Ok(snapshot) => serde_json::to_vec(&snapshot).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match snapshot {
        Ok(json) => {
            let headers = [(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")];
            answer_of(StatusCode::OK, json, &headers)
        }
        Err(why) => answer_of(StatusCode::SERVICE_UNAVAILABLE, why, &[]),
    }
}

/// An answer, in plain text unless its headers set another type.
fn answer_of(
    status: StatusCode,
    body: impl Into<Bytes>,
    headers: &[(HeaderName, &'static str)],
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let usual = [(CONTENT_TYPE, "text/plain; charset=utf-8"), (X_CONTENT_TYPE_OPTIONS, "nosniff")];
    for (name, value) in usual.iter().chain(headers) {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
