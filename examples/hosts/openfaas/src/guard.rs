//! Guards against clients that reach the host: idle connections, web pages, and too many connections.
//!
//! A web page can send requests to a loopback address. So `/system` refuses foreign origins and hosts
//! ([`gshared::page::check`]), and any body that an HTML form could send.

use super::api::ApiError;
use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Method, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future as _;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Semaphore;
use tokio::time::Sleep;

/// Time limit for the head of a request.
const HEAD: Duration = Duration::from_secs(10);
/// Longest pause of a client while it sends a body or reads an answer. It occupies an instance of a function meanwhile.
pub const STALLED: Duration = Duration::from_secs(10);
/// Connections that are open at once; further ones stay in the listener's backlog.
const CONNECTIONS: usize = 8192;

/// Serves connections until the process ends.
///
/// # Errors
/// None at present: a failed accept is tried again after a pause.
pub async fn serve(listener: tokio::net::TcpListener, router: Router) -> io::Result<()> {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return Ok(()) };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            // Out of descriptors, or the client left before the accept. The next accept may succeed.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let service = router.clone().layer(axum::Extension(ConnectInfo(peer)));
        tokio::spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD);
            let served = http
                .serve_connection(TokioIo::new(Impatient::new(stream)), TowerToHyperService::new(service));
            // A broken connection concerns only its client.
            let _ = served.with_upgrades().await;
            drop(place);
        });
    }
}

/// A connection that fails if the client reads nothing of an answer for [`STALLED`].
struct Impatient<S> {
    stream: S,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    const fn new(stream: S) -> Self {
        Self { stream, stalled: None }
    }

    fn bounded(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALLED)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bounded(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.bounded(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Checks whether `/system` may serve this request.
///
/// # Errors
/// 403 for a foreign origin or host, 415 for a body that an HTML form could send.
pub fn check(method: &Method, headers: &HeaderMap, loopback: bool) -> Result<(), ApiError> {
    gshared::page::check(headers, loopback).map_err(|why| ApiError::new(StatusCode::FORBIDDEN, why))?;
    let from_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
    let kind = headers.get(header::CONTENT_TYPE).map_or("", |value| value.to_str().unwrap_or("?"));
    let json =
        kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"));
    if from_page && *method != Method::GET && !json {
        let why = format!("Content-Type: `{kind}`: need application/json");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    Ok(())
}

/// Whether the operator's list allows answers to this host: by `*`, by name, or by name and port.
pub fn allows(allowed: &[String], host: &str, port: u16) -> bool {
    let full = format!("{host}:{port}");
    allowed.iter().any(|one| one == "*" || one.eq_ignore_ascii_case(host) || one.eq_ignore_ascii_case(&full))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn refused(method: &Method, headers: &[(&'static str, &'static str)], loopback: bool) -> Option<u16> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, HeaderValue::from_static(value));
        }
        check(method, &map, loopback).err().map(|error| error.status.as_u16())
    }

    #[test]
    fn pages_of_other_sites_are_refused_and_programs_are_not() {
        let local = ("host", "127.0.0.1:8080");
        let json = ("content-type", "application/json");
        assert_eq!(refused(&Method::POST, &[local], true), None);
        assert_eq!(refused(&Method::POST, &[local, ("content-type", "text/plain")], true), None);
        assert_eq!(refused(&Method::POST, &[("host", "localhost:8080"), json], true), None);
        assert_eq!(refused(&Method::POST, &[("host", "[::1]:8080"), json], true), None);
        assert_eq!(refused(&Method::GET, &[("host", "evil.example:8080")], true), Some(403));
        assert_eq!(refused(&Method::GET, &[("host", "gpu.example:8080")], false), None);
        assert_eq!(
            refused(&Method::POST, &[local, ("origin", "http://evil.example"), json], true),
            Some(403)
        );
        assert_eq!(refused(&Method::POST, &[local, ("origin", "null"), json], true), Some(403));
        assert_eq!(refused(&Method::POST, &[local, ("sec-fetch-site", "cross-site"), json], true), Some(403));
        let own = ("origin", "http://127.0.0.1:8080");
        assert_eq!(refused(&Method::POST, &[local, own, json], true), None);
        assert_eq!(refused(&Method::POST, &[local, own, ("content-type", "text/plain")], true), Some(415));
        assert_eq!(refused(&Method::GET, &[local, own], true), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_of_its_answer_loses_its_connection() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (ours, mut theirs) = tokio::io::duplex(4);
        let mut ours = Impatient::new(ours);
        let begun = tokio::time::Instant::now();
        let write = tokio::spawn(async move { (ours.write_all(&[7; 12]).await, ours) });
        for _ in 0..2 {
            // A slow client is fine as long as it reads something.
            tokio::time::sleep(STALLED - Duration::from_secs(1)).await;
            theirs.read_exact(&mut [0; 4]).await.unwrap();
        }
        let (written, mut ours) = write.await.unwrap();
        written.unwrap();
        let error = ours.write_all(&[7; 12]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(begun.elapsed(), STALLED * 3 - Duration::from_secs(2));
    }

    #[test]
    fn answers_go_where_the_operator_allows() {
        let allowed = ["127.0.0.1".to_owned(), "sink:9000".to_owned()];
        assert!(allows(&allowed, "127.0.0.1", 80) && allows(&allowed, "sink", 9000));
        assert!(!allows(&allowed, "sink", 9001) && !allows(&[], "127.0.0.1", 80));
        assert!(allows(&["*".to_owned()], "anything", 1));
    }
}
