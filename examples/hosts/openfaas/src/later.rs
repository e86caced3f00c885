//! `/async-function`: a bounded queue of calls in memory, and the workers that make these calls.

use super::api::ApiError;
use super::client_body::ClientBody;
use super::node::Node;
use super::routes::{BODY, MAX_BODY};
use super::{guard, proxy};
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use hyper::body::{Body as HttpBody, Frame};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};

/// Most calls that wait.
const LENGTH: usize = 256;
/// Most bytes of all bodies together, of waiting calls and of running ones.
const MEMORY: usize = 128 << 20;
/// Calls that run at once.
const WORKERS: usize = 16;

/// A call for later.
#[derive(Debug)]
pub struct Call {
    /// Value of `X-Call-Id`.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// Path that the instance sees.
    pub path: String,
    /// Address for the answer.
    pub callback: Option<Uri>,
    /// The request, with its whole body.
    pub request: Request,
    /// The permit for the memory of the body.
    pub room: OwnedSemaphorePermit,
}

/// The queue, and the bounds of its memory.
#[derive(Debug)]
pub struct Queue {
    calls: mpsc::Sender<Call>,
    next: AtomicU64,
    memory: Arc<Semaphore>,
    /// Hosts that may receive answers.
    callbacks: Vec<String>,
}

impl Queue {
    /// Starts an empty queue and its workers.
    pub fn start(node: &Arc<Node>, patience: Duration, callbacks: Vec<String>) -> Self {
        let (calls, todo) = mpsc::channel::<Call>(LENGTH);
        let todo = Arc::new(Mutex::new(todo));
        for _ in 0..WORKERS {
            let (node, todo) = (Arc::clone(node), Arc::clone(&todo));
            tokio::spawn(async move {
                loop {
                    let Some(call) = todo.lock().await.recv().await else { return };
                    make(&node, call, patience).await;
                }
            });
        }
        let memory = Arc::new(Semaphore::new(MEMORY));
        Self { calls, next: AtomicU64::new(1), memory, callbacks }
    }

    /// The client's `X-Call-Id`, or a new one, which is added to the headers.
    pub fn name(&self, headers: &mut HeaderMap) -> String {
        if let Some(id) = headers.get("x-call-id").and_then(|value| value.to_str().ok()) {
            return id.to_owned();
        }
        let id = format!("{:08x}-{:08x}", std::process::id(), self.next.fetch_add(1, Ordering::Relaxed));
        if let Ok(value) = HeaderValue::from_str(&id) {
            headers.insert("x-call-id", value);
        }
        id
    }

    /// Reads a whole body. Each part of it takes memory from the queue's bound as it arrives.
    ///
    /// # Errors
    /// 429 if the bodies of waiting calls use all of the memory, 413 if the body is too long, 400 if it breaks off, 408 if it
    /// does not arrive in time.
    pub async fn body(&self, body: Body) -> Result<(Bytes, OwnedSemaphorePermit), ApiError> {
        let (mut bytes, mut room) = (Vec::new(), self.room(1)?);
        let mut body = ClientBody::begun(body).await?;
        let all = async {
            while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
                let frame = frame.map_err(|error| {
                    body.fault().found().unwrap_or_else(|| ApiError::bad(format!("body: {error}")))
                })?;
                let Ok(data) = frame.into_data() else { continue };
                if bytes.len() + data.len() > MAX_BODY {
                    let why = format!("body: too long: need at most {MAX_BODY} bytes");
                    return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why));
                }
                room.merge(self.room(data.len())?);
                bytes.extend_from_slice(&data);
            }
            Ok(())
        };
        tokio::time::timeout(BODY, all).await.map_err(|_| {
            let why = format!("body: did not come within {} s", BODY.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, why)
        })??;
        Ok((Bytes::from(bytes), room))
    }

    fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.memory).try_acquire_many_owned(bytes);
        room.map_err(|_| {
            let why = format!("calls with {MEMORY} bytes are waiting: try again later");
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, why)
        })
    }

    /// The address for the answer, if the client names one.
    ///
    /// # Errors
    /// 400 unless it is a plain HTTP URL, 403 for a host that the operator does not allow.
    pub fn callback(&self, headers: &HeaderMap) -> Result<Option<Uri>, ApiError> {
        let Some(value) = headers.get("x-callback-url") else { return Ok(None) };
        let uri = value.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
        let uri = uri.filter(|uri| uri.scheme_str() == Some("http"));
        let Some((uri, host)) = uri.as_ref().and_then(|uri| Some((uri, uri.host()?))) else {
            return Err(ApiError::bad("X-Callback-Url: need http://host[:port]/path"));
        };
        let port = uri.port_u16().unwrap_or(80);
        if !guard::allows(&self.callbacks, host, port) {
            let why = format!("X-Callback-Url: {host}:{port} is not among the hosts of `host.callback`");
            return Err(ApiError::new(StatusCode::FORBIDDEN, why));
        }
        Ok(Some(uri.clone()))
    }

    /// Puts a call into the queue.
    ///
    /// # Errors
    /// 429 if the queue is full.
    pub fn push(&self, call: Call) -> Result<(), ApiError> {
        self.calls.try_send(call).map_err(|_| {
            ApiError::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!("{LENGTH} calls are waiting: try again later"),
            )
        })
    }
}

async fn make(node: &Arc<Node>, call: Call, patience: Duration) {
    let Call { id, name, path, callback, request, room: _room } = call;
    let answer = proxy::forward(node, &name, &path, request, patience).await;
    let (status, body) = match answer {
        Ok(answer) => {
            let status = answer.status();
            // The instance is free again only at the end of the body.
            let body = axum::body::to_bytes(answer.into_body(), MAX_BODY);
            match tokio::time::timeout(patience, body).await {
                Ok(Ok(body)) => (status, body),
                Ok(Err(error)) => (StatusCode::BAD_GATEWAY, Bytes::from(error.to_string())),
                Err(_) => (StatusCode::GATEWAY_TIMEOUT, Bytes::from("no complete answer in time")),
            }
        }
        Err(error) => (error.status, Bytes::from(error.message)),
    };
    let Some(callback) = callback else { return };
    let told = tokio::time::timeout(patience, tell(&callback, &id, &name, status, body)).await;
    let why = match told {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer in time".into(),
    };
    eprintln!("openfaas: call {id} of {name}: callback {callback}: {why}");
}

async fn tell(
    callback: &Uri,
    id: &str,
    name: &str,
    status: StatusCode,
    body: Bytes,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let host = callback.host().ok_or("no host")?;
    let path = callback.path_and_query().map_or("/", |path| path.as_str());
    let authority = callback.authority().map_or(host, |authority| authority.as_str());
    let request = Request::post(path)
        .header(header::HOST, authority)
        .header("x-call-id", id)
        .header("x-function-name", name)
        .header("x-function-status", status.as_u16())
        .body(Body::from(body))?;
    proxy::exchange((host, callback.port_u16().unwrap_or(80)), request).await?;
    Ok(())
}

/// A body, and a sender that writes it part by part.
pub fn channel() -> (mpsc::Sender<Bytes>, Body) {
    let (sender, parts) = mpsc::channel(4);
    (sender, Body::new(Written(parts)))
}

struct Written(mpsc::Receiver<Bytes>);

impl HttpBody for Written {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}
