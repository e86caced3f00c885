//! Requests of a function that takes several at once (`gshare/batch`): gathered by the platform, sent as one.
//!
//! # Contract with the function
//! A `POST` of the bodies, one after the other, with their lengths in `gshare-batch`; [`gshare_profile::batch`] has the wire format.
//! The requests of a call have the same path and the same `content-type`, which the call has too; no other header of theirs. In
//! Python:
//! ```python
//! def do_POST(self):
//!     lengths = [int(n) for n in self.headers["gshare-batch"].split(",")]
//!     answers = model([self.rfile.read(n) for n in lengths])
//!     self.send_response(200)
//!     self.send_header("gshare-batch", ",".join(str(len(a)) for a in answers))
//!     self.send_header("content-length", str(sum(map(len, answers))))
//!     self.end_headers()
//!     self.wfile.write(b"".join(answers))
//! ```
//! An answer with another status than 2xx is the answer to each request. A request that upgrades its connection goes by itself, as it
//! came.
//!
//! # When
//! The platform decides (`gshare_sched::platform`, `batch.rs`): dispatches to one instance in one answer are a batch. Each request
//! joins its [`Batch`], or is gone by then; the first one starts the call, which waits for all of them and no longer.

use super::api::ApiError;
use super::client_body::{ClientBody, Fault};
use super::node::Node;
use super::proxy;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::Response;
use gshare_core::{InstanceId, RequestId};
use gshare_profile::batch;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// The longest body of a request in a batch: bodies are held until the call.
const MOST: usize = 16 << 20;

/// A batch that requests join, once for each.
#[derive(Debug, Clone)]
pub struct Batch {
    join: UnboundedSender<Member>,
    /// Taken by the first one.
    members: Arc<Mutex<Option<UnboundedReceiver<Member>>>>,
}

impl Default for Batch {
    fn default() -> Self {
        let (join, members) = unbounded_channel();
        Self { join, members: Arc::new(Mutex::new(Some(members))) }
    }
}

impl PartialEq for Batch {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.members, &other.members)
    }
}

impl Eq for Batch {}

/// A request in a batch.
#[derive(Debug)]
struct Member {
    request: RequestId,
    call: Call,
    body: Bytes,
    /// Dropped where the instance was not reached: another turn comes.
    answer: oneshot::Sender<Answer>,
}

/// Requests of one call are equal in this.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Call {
    uri: Uri,
    kind: Option<HeaderValue>,
}

/// The answer to a request, or why there is none; then the instance may have ended.
type Answer = Result<(StatusCode, HeaderMap, Bytes), ApiError>;

impl Batch {
    /// Joins. The first one starts the call, for all that join before their turns are dropped.
    fn join(self, node: &Arc<Node>, name: &str, place: (InstanceId, Option<SocketAddr>), member: Member) {
        let _ = self.join.send(member);
        if let Some(mut members) = self.members.lock().take() {
            let (node, name) = (Arc::clone(node), name.to_owned());
            tokio::spawn(async move {
                let mut calls: Vec<(Call, Vec<Member>)> = Vec::new();
                while let Some(member) = members.recv().await {
                    match calls.iter_mut().find(|(call, _)| *call == member.call) {
                        Some((_, all)) => all.push(member),
                        None => calls.push((member.call.clone(), vec![member])),
                    }
                }
                for (call, members) in calls {
                    serve(&node, &name, place, call, members).await;
                }
            });
        }
    }
}

/// Serves a request as one of a batch. The function sees `path`.
///
/// # Errors
/// As [`proxy::forward`], and 413 for a body of more than 16 MiB.
pub async fn forward(
    node: &Arc<Node>,
    name: &str,
    path: &str,
    mut request: Request,
    patience: Duration,
) -> Result<Response, ApiError> {
    proxy::prepare(&mut request, path, false)?;
    let (mut head, body) = request.into_parts();
    let body = ClientBody::begun(body).await?;
    let fault = body.fault();
    let body = to_bytes(Body::new(body), MOST).await.map_err(|error| {
        let long = || {
            ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("body: {error}: need at most 16 MiB in a batch"),
            )
        };
        fault.found().unwrap_or_else(long)
    })?;
    let mut ticket = proxy::arrive(node, name, &mut head.headers)?;
    let call = Call { uri: head.uri, kind: head.headers.remove(header::CONTENT_TYPE) };
    let mut go = ticket.turn().await?;
    let (status, mut headers, body) = loop {
        let (answer, told) = oneshot::channel();
        let place = (go.instance, go.addresses.first().copied());
        let member = Member { request: ticket.request(), call: call.clone(), body: body.clone(), answer };
        let (instance, load) = (go.instance, go.load);
        // Without a batch of the platform the request goes by itself.
        go.batch.unwrap_or_default().join(node, name, place, member);
        go = tokio::select! {
            biased;
            told = told => match told {
                Ok(answer) => {
                    ticket.reached_by(instance, load);
                    break answer.inspect_err(|_| ticket.broken())?;
                }
                // The instance was not reached, so another turn comes.
                Err(_) => ticket.turn().await?,
            },
            // The instance is gone or has lost its device.
            next = ticket.turn() => next?,
            () = tokio::time::sleep(patience) => {
                let why = format!("{name}: no answer within {} s", patience.as_secs());
                return Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, why));
            }
        };
    };
    ticket.answered(status, &mut headers);
    drop(ticket);
    let mut response = Response::new(Body::from(body));
    (*response.status_mut(), *response.headers_mut()) = (status, headers);
    Ok(response)
}

/// One call to the instance, for all of these requests.
async fn serve(
    node: &Arc<Node>,
    name: &str,
    (instance, address): (InstanceId, Option<SocketAddr>),
    call: Call,
    mut members: Vec<Member>,
) {
    let line = match address {
        Some(address) => node.line(instance, 0, address).await,
        None => None,
    };
    let Some(line) = line else {
        return node.host().unreachable(instance);
    };
    {
        let mut host = node.host();
        members.retain(|member| host.reached(member.request, instance));
    }
    if members.is_empty() {
        return;
    }
    let mut request =
        Request::new(Body::from(members.iter().flat_map(|member| member.body.clone()).collect::<Bytes>()));
    (*request.method_mut(), *request.uri_mut()) = (Method::POST, call.uri);
    let headers = request.headers_mut();
    headers.insert(header::HOST, HeaderValue::from_static("function"));
    headers.extend(call.kind.map(|kind| (header::CONTENT_TYPE, kind)));
    let lengths = HeaderValue::from_str(&batch::lengths(members.iter().map(|member| member.body.len())));
    headers.extend(lengths.ok().map(|lengths| (HeaderName::from_static(batch::LENGTHS), lengths)));
    let asked =
        proxy::ask(&AtomicBool::new(false), name, line, request, false, proxy::LONGEST, &Fault::default())
            .await;
    let answers = match asked {
        Ok((answer, sender)) => {
            let (head, body) = answer.into_parts();
            match to_bytes(Body::new(body), MOST * members.len().max(1)).await {
                Ok(body) => {
                    node.free(instance, 0, sender);
                    split(name, head.status, head.headers, &body, members.len())
                }
                Err(error) => {
                    broken(name, &format!("the replica broke its answer off: {error}"), members.len())
                }
            }
        }
        Err(error) => vec![Err(error); members.len()],
    };
    for (member, answer) in members.into_iter().zip(answers) {
        // Its client may have gone.
        let _ = member.answer.send(answer);
    }
}

fn broken(name: &str, why: &str, parts: usize) -> Vec<Answer> {
    vec![Err(ApiError::new(StatusCode::BAD_GATEWAY, format!("{name}: {why}"))); parts]
}

/// The answers to the requests of a call.
fn split(name: &str, status: StatusCode, mut headers: HeaderMap, body: &Bytes, parts: usize) -> Vec<Answer> {
    let (lengths, statuses) = (headers.remove(batch::LENGTHS), headers.remove(batch::STATUSES));
    proxy::drop_hops(&mut headers, false);
    headers.remove(header::CONTENT_LENGTH);
    if !status.is_success() {
        return vec![Ok((status, headers, body.clone())); parts];
    }
    let ranges = match batch::split(lengths.as_ref().and_then(|value| value.to_str().ok()), body.len(), parts)
    {
        Ok(ranges) => ranges,
        Err(why) => return broken(name, &format!("the answer to a batch: {why}"), parts),
    };
    let own = statuses.as_ref().and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut own = own.split(',').map(|one| one.trim().parse::<StatusCode>().unwrap_or(status));
    let answer = |range| Ok((own.next().unwrap_or(status), headers.clone(), body.slice(range)));
    ranges.into_iter().map(answer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(lengths: Option<&'static str>, statuses: Option<&'static str>, parts: usize) -> Vec<Answer> {
        let mut headers = HeaderMap::new();
        headers.extend(
            lengths.map(|it| (HeaderName::from_static(batch::LENGTHS), HeaderValue::from_static(it))),
        );
        headers.extend(
            statuses.map(|it| (HeaderName::from_static(batch::STATUSES), HeaderValue::from_static(it))),
        );
        split("f", StatusCode::OK, headers, &Bytes::from_static(b"onetwo"), parts)
    }

    #[test]
    fn each_request_gets_its_part_and_its_status() {
        let found = answers(Some("3,3"), Some("200,404"), 2);
        let parts: Vec<_> =
            found.into_iter().map(Result::unwrap).map(|(status, _, body)| (status.as_u16(), body)).collect();
        assert_eq!(parts, [(200, Bytes::from_static(b"one")), (404, Bytes::from_static(b"two"))]);
        // A program that knows no batches answers one request.
        assert_eq!(answers(None, None, 1).pop().unwrap().unwrap().2, Bytes::from_static(b"onetwo"));
    }

    #[test]
    fn an_answer_that_does_not_fit_is_an_error_of_each_request() {
        let found = answers(None, None, 2);
        assert_eq!(found.len(), 2);
        for answer in found {
            let error = answer.unwrap_err();
            assert!(
                error.status == StatusCode::BAD_GATEWAY && error.message.contains("need 2 lengths"),
                "{error:?}"
            );
        }
    }
}
