//! The Prometheus endpoint: `GET /metrics`, and `GET /healthz`.
//!
//! One request per connection. The header must be there within [`HEADER`], and the answer must be read within
//! [`WHOLE`], or the connection is closed.

use crate::config::MetricsAddress;
use crate::handle::Handle;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// Longest time for the header of a request.
const HEADER: Duration = Duration::from_secs(5);
/// Longest time for a request and its answer.
const WHOLE: Duration = Duration::from_secs(10);
/// Most bytes of a request's header; also the least that the library takes.
const MAX_HEADER: usize = 8192;
/// Media type of the answer.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A bound address that is not served yet.
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
    pub(crate) fn bind(address: &MetricsAddress) -> io::Result<Self> {
        match address {
            MetricsAddress::Tcp(address) => {
                if !address.ip().is_loopback() {
                    tracing::warn!(%address, "metrics name tenants, and other hosts can read them");
                }
                TcpListener::bind(address).map(Self::Tcp)
            }
            MetricsAddress::Unix(path) => {
                // Left behind by a daemon that was killed.
                let _ = std::fs::remove_file(path);
                Ok(Self::Unix(UnixListener::bind(path)?, path.clone()))
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

/// Answers the request of one connection, and closes it.
pub(crate) async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin, handle: Handle) {
    let service = service_fn(move |request: Request<Incoming>| {
        let handle = handle.clone();
        async move { Ok::<_, Infallible>(respond(&request, &handle).await) }
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

async fn respond(request: &Request<Incoming>, handle: &Handle) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "need GET or HEAD\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match request.uri().path() {
        "/metrics" => match handle.metrics_later().await {
            Ok(metrics) => {
                let mut response = text(StatusCode::OK, metrics);
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(OPEN_METRICS));
                response
            }
            Err(error) => text(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        },
        "/healthz" => text(StatusCode::OK, "ok\n"),
        _ => text(StatusCode::NOT_FOUND, "see /metrics\n"),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
