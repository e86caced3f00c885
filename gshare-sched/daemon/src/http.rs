//! The Prometheus endpoint: `GET /metrics`, and `GET /healthz`.

use crate::config::MetricsAddress;
use crate::handle::Handle;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use tiny_http::{Header, Method, Response, Server};

/// Serves until it is dropped.
#[derive(Debug)]
pub(crate) struct Endpoint {
    server: Arc<ServerBox>,
    thread: Option<JoinHandle<()>>,
    unlink: Option<std::path::PathBuf>,
}

struct ServerBox(Server);

impl std::fmt::Debug for ServerBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.0.server_addr())
    }
}

impl Endpoint {
    pub(crate) fn start(address: &MetricsAddress, handle: Handle) -> io::Result<Self> {
        let (server, unlink) = match address {
            MetricsAddress::Tcp(address) => (Server::http(address), None),
            MetricsAddress::Unix(path) => {
                // Left behind by a daemon that was killed.
                let _ = std::fs::remove_file(path);
                (Server::http_unix(path), Some(path.clone()))
            }
        };
        let server = Arc::new(ServerBox(server.map_err(io::Error::other)?));
        let shared = Arc::clone(&server);
        let thread = std::thread::Builder::new()
            .name("gshared-metrics".into())
            .stack_size(256 << 10)
            .spawn(move || serve(&shared.0, &handle))?;
        Ok(Self { server, thread: Some(thread), unlink })
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.server.0.unblock();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(path) = &self.unlink {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn serve(server: &Server, handle: &Handle) {
    // `recv` fails when it is unblocked.
    while let Ok(request) = server.recv() {
        let known = matches!(request.method(), Method::Get | Method::Head);
        let response = match (known, request.url()) {
            (true, "/metrics") => match handle.metrics() {
                Ok(text) => {
                    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                    let header = Header::from_bytes("Content-Type", kind).ok();
                    let response = Response::from_string(text);
                    header.into_iter().fold(response, Response::with_header)
                }
                Err(error) => Response::from_string(error.to_string()).with_status_code(503),
            },
            (true, "/healthz") => Response::from_string("ok\n"),
            _ => Response::from_string("see /metrics\n").with_status_code(404),
        };
        if let Err(error) = request.respond(response) {
            tracing::debug!(%error, "a scrape was not answered");
        }
    }
}
