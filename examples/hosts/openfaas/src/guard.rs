//! Guards against those who can reach the host: connections that say nothing, browsers, and too many of either.
//!
//! A page in a browser can send requests to a loopback address. So `/system` refuses other origins and other hosts
//! ([`gshared::page::check`]), and bodies that a form could send.

use super::api::ApiError;
use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Method, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// The time in which the head of a request must have come.
const HEAD: Duration = Duration::from_secs(10);
/// Connections that are open at once; others wait to be taken.
const CONNECTIONS: usize = 8192;

/// Serves connections until the process ends.
///
/// # Errors
/// When no connection can be taken any more.
pub async fn serve(listener: tokio::net::TcpListener, router: Router) -> std::io::Result<()> {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return Ok(()) };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            // Out of descriptors, or a client that has gone again: the next one may be better.
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
            let served = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
            // A connection that breaks is its client's business.
            let _ = served.with_upgrades().await;
            drop(place);
        });
    }
}

/// Whether `/system` listens to this request.
///
/// # Errors
/// 403 for another origin or host, 415 for a body that a form could send.
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

/// Whether answers may be sent to this host, by the list of those that the operator allows.
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

    #[test]
    fn answers_go_where_the_operator_allows() {
        let allowed = ["127.0.0.1".to_owned(), "sink:9000".to_owned()];
        assert!(allows(&allowed, "127.0.0.1", 80) && allows(&allowed, "sink", 9000));
        assert!(!allows(&allowed, "sink", 9001) && !allows(&[], "127.0.0.1", 80));
        assert!(allows(&["*".to_owned()], "anything", 1));
    }
}
