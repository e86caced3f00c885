//! The body of a client's request, on its way to an instance.
//!
//! A request reaches an instance only after the first bytes of its body have arrived. A body of at most 64 KiB arrives in full
//! first. So a client that sends nothing occupies no instance. If a body breaks off or pauses for [`STALLED`], the client is at
//! fault, and the instance stays.

use super::api::ApiError;
use super::guard::STALLED;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::collections::VecDeque;
use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use tokio::time::Sleep;

/// Longest body, in bytes, that is read in full before a request reaches an instance.
const SHORT: u64 = 64 << 10;

/// A body, with the frames that have arrived but were not passed on yet.
#[derive(Debug)]
pub struct ClientBody {
    rest: Body,
    come: VecDeque<Frame<Bytes>>,
    pause: Option<Pin<Box<Sleep>>>,
    fault: Fault,
}

/// Tells whether a client's body has failed. Clones share the answer.
#[derive(Debug, Clone, Default)]
pub struct Fault(Arc<OnceLock<ApiError>>);

impl Fault {
    /// The error to answer the client with, if the body has failed.
    pub fn found(&self) -> Option<ApiError> {
        self.0.get().cloned()
    }

    fn set(&self, status: StatusCode, why: String) {
        // A later fault is a consequence of the first.
        let _ = self.0.set(ApiError::new(status, why));
    }
}

impl ClientBody {
    /// Waits until the first bytes of the body arrive, or the whole body if it is short.
    ///
    /// # Errors
    /// 400 if the body breaks off, 408 if it pauses for [`STALLED`].
    pub async fn begun(body: Body) -> Result<Self, ApiError> {
        let mut body = Self { rest: body, come: VecDeque::new(), pause: None, fault: Fault::default() };
        let short = body.rest.size_hint().exact().is_some_and(|bytes| bytes <= SHORT);
        while !body.rest.is_end_stream() && (short || body.come.is_empty()) {
            match poll_fn(|context| body.poll_rest(context)).await {
                Some(Ok(frame)) => body.come.push_back(frame),
                Some(Err(error)) => {
                    let other = || ApiError::bad(format!("body: {error}"));
                    return Err(body.fault.found().unwrap_or_else(other));
                }
                None => break,
            }
        }
        Ok(body)
    }

    /// A handle that stays valid after the body has gone to an instance.
    pub fn fault(&self) -> Fault {
        self.fault.clone()
    }

    fn poll_rest(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.rest).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Err(error))) => {
                self.fault.set(StatusCode::BAD_REQUEST, format!("body: {error}"));
            }
            Poll::Ready(_) => self.pause = None,
            Poll::Pending => {
                let pause = self.pause.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALLED)));
                if pause.as_mut().poll(context).is_ready() {
                    let why = format!("body: no byte arrived for {} s", STALLED.as_secs());
                    self.fault.set(StatusCode::REQUEST_TIMEOUT, why.clone());
                    return Poll::Ready(Some(Err(axum::Error::new(std::io::Error::other(why)))));
                }
            }
        }
        frame
    }
}

impl HttpBody for ClientBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match self.come.pop_front() {
            Some(frame) => Poll::Ready(Some(Ok(frame))),
            None => self.poll_rest(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.come.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let come: u64 = self.come.iter().filter_map(Frame::data_ref).map(|bytes| bytes.len() as u64).sum();
        let (rest, mut hint) = (self.rest.size_hint(), SizeHint::new());
        hint.set_lower(rest.lower().saturating_add(come));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(come));
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn collected(mut body: ClientBody) -> Result<Vec<u8>, axum::Error> {
        let mut bytes = Vec::new();
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            bytes.extend(frame?.into_data().unwrap_or_default());
        }
        Ok(bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_begin_holds_nobody_up_for_long() {
        let (_sender, body) = crate::later::channel();
        let begun = tokio::time::Instant::now();
        let error = ClientBody::begun(body).await.unwrap_err();
        assert_eq!((error.status, begun.elapsed()), (StatusCode::REQUEST_TIMEOUT, STALLED));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stops_on_its_way_is_its_clients_fault() {
        let (sender, body) = crate::later::channel();
        sender.send(Bytes::from("one")).await.unwrap();
        let body = ClientBody::begun(body).await.unwrap();
        let fault = body.fault();
        assert!(fault.found().is_none());
        assert!(collected(body).await.is_err());
        assert_eq!(fault.found().unwrap().status, StatusCode::REQUEST_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_comes_slowly_comes_as_a_whole() {
        let (sender, body) = crate::later::channel();
        tokio::spawn(async move {
            for _ in 0..5 {
                tokio::time::sleep(STALLED - std::time::Duration::from_secs(1)).await;
                sender.send(Bytes::from("ab")).await.unwrap();
            }
        });
        let body = ClientBody::begun(body).await.unwrap();
        assert_eq!(body.size_hint().lower(), 2, "the bytes that have arrived count");
        assert_eq!(collected(body).await.unwrap(), b"ababababab");
    }
}
