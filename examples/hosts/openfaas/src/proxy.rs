//! `/function/{name}`: streams a request to an instance of the platform's choice, and streams the answer back.

use super::api::{ApiError, NAMESPACE};
use super::between::FILE;
use super::client_body::{ClientBody, Fault};
use super::node::{Line, Node, Sender, Ticket};
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

/// Longest body, in bytes, between two stages of a pipeline.
const MAX_BETWEEN: usize = 256 << 20;

/// The longest time of a call for several requests, each of which waits no longer than its client's.
pub(super) const LONGEST: std::time::Duration = std::time::Duration::from_secs(3600);

/// Hop-by-hop headers, which are not forwarded.
const HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::PROXY_AUTHORIZATION,
];

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Splits a path below `/function/` into the function's name and the rest. The name may carry the suffix `.openfaas-fn`,
/// and of a host of `all` namespaces any other one.
///
/// # Errors
/// 400 for a namespace that is not the host's.
pub fn target(path: &str, all: bool) -> Result<(&str, &str), ApiError> {
    let (full, rest) = path.split_at(path.find('/').unwrap_or(path.len()));
    match full.split_once('.') {
        None => Ok((full, rest)),
        Some((_, namespace)) if all && namespace != NAMESPACE => Ok((full, rest)),
        Some((name, namespace)) => {
            super::api::check_namespace(Some(namespace))?;
            Ok((name, rest))
        }
    }
}

/// Forwards a request to an instance. `path` is the path that the instance sees.
///
/// # Errors
/// 400 or 408 if the client's body fails, 503 if no instance can serve the request, 429 if too many requests wait, 502 if the
/// instance fails, 504 after `patience`.
pub async fn forward(
    node: &Arc<Node>,
    name: &str,
    path: &str,
    request: Request,
    patience: std::time::Duration,
) -> Result<Response, ApiError> {
    let upgrade = request.headers().contains_key(header::UPGRADE);
    if !upgrade && node.host().takes_batches(name) {
        return super::batches::forward(node, name, path, request, patience).await;
    }
    let (head, body) = request.into_parts();
    let body = ClientBody::begun(body).await?;
    let fault = body.fault();
    let mut request = Request::from_parts(head, Body::new(body));
    let mut ticket = arrive(node, name, request.headers_mut())?;
    let streams = ticket.connect().await?;
    let mut losses = ticket.losses();
    let theirs = upgrade.then(|| hyper::upgrade::on(&mut request));
    prepare(&mut request, path, upgrade)?;
    let last = streams.len().saturating_sub(1);
    let broken = AtomicBool::new(false);
    // Dropped, and so removed, once the next stage has read the file and answered.
    let mut file = None;
    for (stage, stream) in streams.into_iter().enumerate() {
        let again = (stage < last).then(|| {
            let place = request.headers().get(TRACEPARENT).cloned();
            (request.method().clone(), request.uri().clone(), place)
        });
        let (mut answer, sender) = tokio::select! {
            biased;
            // A process on a lost device may hang for ever: the driver neither answers nor fails.
            why = losses.next() => {
                ticket.broken();
                return Err(ApiError::new(StatusCode::BAD_GATEWAY, format!("{name}: {why}")));
            }
            answer = ask(&broken, name, stream, request, upgrade, patience, &fault) => match answer {
                Ok(answer) => answer,
                Err(error) => {
                    if broken.load(Ordering::Relaxed) {
                        ticket.broken();
                    }
                    return Err(error);
                }
            },
        };
        drop(file.take());
        let Some((method, uri, place)) = again.filter(|_| answer.status().is_success()) else {
            let status = answer.status();
            ticket.answered(status, answer.headers_mut());
            if status == StatusCode::SWITCHING_PROTOCOLS
                && let Some(theirs) = theirs
            {
                let ours = hyper::upgrade::on(&mut answer);
                tokio::spawn(splice(theirs, ours, ticket));
                return Ok(answer.map(Body::new));
            }
            drop_hops(answer.headers_mut(), false);
            answer.headers_mut().remove(FILE);
            let sender = Some(sender).filter(|_| !upgrade);
            return Ok(answer.map(|body| {
                let over = body.is_end_stream();
                Body::new(Served { body, ticket, stage, sender, over })
            }));
        };
        file = ticket.on_its_way(name, answer.headers())?;
        request = tokio::select! {
            biased;
            why = losses.next() => {
                ticket.broken();
                return Err(ApiError::new(StatusCode::BAD_GATEWAY, format!("{name}: {why}")));
            }
            request = hand_on(&mut ticket, name, (method, uri), answer, patience) => request?,
        };
        if let Some(place) = place {
            // A stage that sets its own `traceparent` is the parent span of the next stage.
            request.headers_mut().entry(TRACEPARENT).or_insert(place);
        }
        ticket.free(stage, sender);
    }
    Err(ApiError::internal(name, "an instance without a process"))
}

/// Gets into line, or says why there is none.
pub(super) fn arrive(node: &Arc<Node>, name: &str, headers: &mut HeaderMap) -> Result<Ticket, ApiError> {
    node.arrive(name, headers).map_err(|error| {
        let message = format!("no endpoints available for: {name}: {}", error.message);
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
    })
}

/// Turns the answer of a stage into the request to the next stage.
async fn hand_on(
    ticket: &mut Ticket,
    name: &str,
    (method, uri): (Method, Uri),
    answer: hyper::Response<hyper::body::Incoming>,
    patience: std::time::Duration,
) -> Result<Request, ApiError> {
    let (head, body) = answer.into_parts();
    let body = tokio::time::timeout(patience, axum::body::to_bytes(Body::new(body), MAX_BETWEEN)).await;
    let body = body.map_err(|_| {
        ticket.broken();
        let why = format!("{name}: between two stages: no complete answer within {} s", patience.as_secs());
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, why)
    })?;
    let body = body.map_err(|error| {
        ticket.broken();
        ApiError::new(StatusCode::BAD_GATEWAY, format!("{name}: between two stages: {error}"))
    })?;
    // A GET becomes a POST once there is an answer to pass on.
    let method = if body.is_empty() && !head.headers.contains_key(FILE) { method } else { Method::POST };
    let mut next = Request::new(Body::from(body));
    (*next.method_mut(), *next.uri_mut()) = (method, uri);
    for key in [header::CONTENT_TYPE, TRACEPARENT, FILE] {
        if let Some(value) = head.headers.get(&key) {
            next.headers_mut().insert(key, value.clone());
        }
    }
    next.headers_mut().insert(header::HOST, HeaderValue::from_static("stage"));
    Ok(next)
}

/// Sends a request to one process. Returns the answer, and the connection for reuse once its body has been read.
/// Sets `broken` if the process breaks the request off.
pub(super) async fn ask(
    broken: &AtomicBool,
    name: &str,
    line: Line,
    mut request: Request,
    upgrade: bool,
    patience: std::time::Duration,
    fault: &Fault,
) -> Result<(hyper::Response<hyper::body::Incoming>, Sender), ApiError> {
    let late = |_| {
        let message = format!("{name}: no answer within {} s", patience.as_secs());
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, message)
    };
    let stream = match line {
        Line::New(stream) => stream,
        Line::Used(mut sender, address) => {
            // An upgraded connection belongs to the client afterwards, so take a new one.
            if !upgrade {
                let sent = tokio::time::timeout(patience, sender.try_send_request(request)).await;
                match sent.map_err(late)? {
                    Ok(answer) => return Ok((answer, sender)),
                    // The process closed the idle connection before it read any of the request, so the request can be sent
                    // again.
                    Err(mut error) => match error.take_message() {
                        Some(unsent) => request = unsent,
                        None => return Err(broke_off(broken, name, error.error(), fault)),
                    },
                }
            }
            let stream = super::node::connect(address).await;
            stream.map_err(|error| {
                broken.store(true, Ordering::Relaxed);
                ApiError::new(
                    StatusCode::BAD_GATEWAY,
                    format!("{name}: the replica takes no connection: {error}"),
                )
            })?
        }
    };
    let _ = stream.set_nodelay(true);
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| broke_off(broken, name, &error, fault))?;
    tokio::spawn(async move {
        // `send_request` reports the same errors.
        let _ = if upgrade { connection.with_upgrades().await } else { connection.await };
    });
    let answer = tokio::time::timeout(patience, sender.send_request(request)).await.map_err(late)?;
    answer.map(|answer| (answer, sender)).map_err(|error| broke_off(broken, name, &error, fault))
}

/// Sends one request over a connection of its own.
///
/// # Errors
/// If the server cannot be reached, or breaks off.
pub(crate) async fn exchange(
    server: impl tokio::net::ToSocketAddrs,
    request: Request,
) -> anyhow::Result<hyper::Response<hyper::body::Incoming>> {
    let stream = tokio::net::TcpStream::connect(server).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

async fn splice(theirs: OnUpgrade, ours: OnUpgrade, ticket: Ticket) {
    if let (Ok(theirs), Ok(ours)) = (theirs.await, ours.await) {
        let (mut theirs, mut ours) = (TokioIo::new(theirs), TokioIo::new(ours));
        let _ = tokio::io::copy_bidirectional(&mut theirs, &mut ours).await;
    }
    drop(ticket);
}

fn broke_off(broken: &AtomicBool, name: &str, error: &hyper::Error, fault: &Fault) -> ApiError {
    if let Some(theirs) = fault.found() {
        return theirs;
    }
    broken.store(true, Ordering::Relaxed);
    ApiError::new(StatusCode::BAD_GATEWAY, format!("{name}: the replica broke the request off: {error}"))
}

/// Removes the hop-by-hop headers, also those that `Connection` names. An upgrade keeps `Upgrade` and `Connection`.
pub(super) fn drop_hops(headers: &mut HeaderMap, upgrade: bool) {
    let named = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let named: Vec<HeaderName> =
        named.flat_map(|names| names.split(',')).filter_map(|name| name.trim().parse().ok()).collect();
    for name in named.into_iter().chain(HOP) {
        if !(upgrade && [header::UPGRADE, header::CONNECTION].contains(&name)) {
            headers.remove(name);
        }
    }
    if upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
}

pub(super) fn prepare(request: &mut Request, path: &str, upgrade: bool) -> Result<(), ApiError> {
    let path = if path.is_empty() { "/" } else { path };
    let full = request.uri().query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    *request.uri_mut() = full.parse::<Uri>().map_err(|error| ApiError::bad(format!("path: {error}")))?;
    let peer = request.extensions().get::<axum::extract::ConnectInfo<std::net::SocketAddr>>();
    let peer = peer.map(|peer| peer.0.ip().to_string());
    let headers = request.headers_mut();
    let host = headers.get(header::HOST).cloned();
    let absent = |headers: &mut HeaderMap, name: &'static str, value: Option<HeaderValue>| {
        if let (false, Some(value)) = (headers.contains_key(name), value) {
            headers.insert(name, value);
        }
    };
    headers.remove(FILE);
    absent(headers, "x-forwarded-host", host);
    if let Some(peer) = peer {
        // Addresses that the client claims come first; only the last one is verified.
        let before = headers.get_all(FORWARDED_FOR).iter().filter_map(|value| value.to_str().ok());
        let all: Vec<&str> = before.chain([peer.as_str()]).collect();
        if let Ok(all) = HeaderValue::from_str(&all.join(", ")) {
            headers.insert(FORWARDED_FOR, all);
        }
    }
    drop_hops(headers, upgrade);
    if !upgrade {
        // Without a length or this header, hyper would send a GET without its body.
        let unknown = !request.body().is_end_stream() && request.body().size_hint().exact().is_none();
        if unknown {
            request.headers_mut().insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
    Ok(())
}

/// The body of an answer. Its end frees the instance for the next request.
struct Served<B> {
    body: B,
    ticket: Ticket,
    stage: usize,
    sender: Option<Sender>,
    /// Whether the body has ended, which makes the connection reusable.
    over: bool,
}

impl<B> Drop for Served<B> {
    fn drop(&mut self) {
        if let Some(sender) = self.sender.take().filter(|_| self.over) {
            self.ticket.free(self.stage, sender);
        }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Served<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Err(_))) => self.ticket.broken(),
            Poll::Ready(None) => self.over = true,
            Poll::Ready(Some(Ok(_))) => self.over = self.body.is_end_stream(),
            Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
