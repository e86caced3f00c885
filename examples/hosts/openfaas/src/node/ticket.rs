//! A request on its way through the node, from its arrival to its answer.

use super::{Line, Node, Sender};
use crate::api::ApiError;
use crate::between::OnItsWay;
use crate::host::{Go, Turn};
use crate::traces::{self, Load, Times, Traced};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use gshare_core::{InstanceId, RequestId};
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A request on its way. Dropping the ticket ends the request at any stage.
#[derive(Debug)]
pub struct Ticket {
    node: Arc<Node>,
    request: RequestId,
    /// News of the request's turn; [`Ticket::losses`] takes the receiver.
    turns: Option<UnboundedReceiver<Turn>>,
    /// Instance that serves the request, once it has its turn.
    instance: Option<InstanceId>,
    broken: bool,
    times: Times,
    traced: Option<Box<Traced>>,
}

impl Node {
    /// Puts a request into the queue for an instance, and its trace context into the headers.
    ///
    /// # Errors
    /// See [`Host::arrive`](crate::host::Host::arrive).
    pub fn arrive(self: &Arc<Self>, name: &str, headers: &mut HeaderMap) -> Result<Ticket, ApiError> {
        let (sender, turns) = unbounded_channel();
        let arrived = self.now();
        let request = self.host().arrive(arrived, name, sender)?;
        let traced = traces::begin(self.runner.traces.as_ref(), name, headers);
        let (node, times) = (Arc::clone(self), Times { arrived, load: None, reached: None });
        let turns = Some(turns);
        Ok(Ticket { node, request, turns, instance: None, broken: false, times, traced })
    }
}

impl Ticket {
    /// The request's name.
    pub const fn request(&self) -> RequestId {
        self.request
    }

    /// Waits for an instance.
    ///
    /// # Errors
    /// If the request is rejected.
    pub async fn turn(&mut self) -> Result<Go, ApiError> {
        loop {
            let turn = match &mut self.turns {
                Some(turns) => turns.recv().await,
                None => None,
            };
            return match turn {
                Some(Turn::Again(request)) => {
                    self.request = request;
                    continue;
                }
                Some(Turn::Go(go)) => Ok(go),
                Some(Turn::No(reason)) => Err(crate::host::refusal(reason)),
                Some(Turn::Hopeless(why) | Turn::DeviceLost(why)) => {
                    Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why))
                }
                None => Err(ApiError::new(StatusCode::BAD_GATEWAY, "the instance is gone")),
            };
        }
    }

    /// An instance has taken the request.
    pub fn reached_by(&mut self, instance: InstanceId, load: Option<Load>) {
        self.instance = Some(instance);
        (self.times.load, self.times.reached) = (load, Some(self.node.now()));
        if let Some(traced) = &mut self.traced {
            traced.reached(instance, 1);
        }
    }

    /// Waits for an instance, and connects to its processes in the order of stages.
    ///
    /// # Errors
    /// The reason, if no instance will serve the request.
    pub async fn connect(&mut self) -> Result<Vec<Line>, ApiError> {
        let node = Arc::clone(&self.node);
        let mut next = None;
        loop {
            let Go { instance, addresses, load, .. } = match next.take() {
                Some(go) => go,
                None => self.turn().await?,
            };
            let connects = async {
                let mut streams = Vec::with_capacity(addresses.len());
                for (stage, address) in addresses.iter().enumerate() {
                    streams.push(node.line(instance, stage, *address).await?);
                }
                Some(streams).filter(|streams| !streams.is_empty())
            };
            let streams = tokio::select! {
                biased;
                streams = connects => streams,
                // The platform has moved the request, or has given it up.
                turn = self.turn() => {
                    next = Some(turn?);
                    continue;
                }
            };
            let Some(streams) = streams else {
                node.host().unreachable(instance);
                continue;
            };
            if self.node.host().reached(self.request, instance) {
                self.instance = Some(instance);
                (self.times.load, self.times.reached) = (load, Some(self.node.now()));
                if let Some(traced) = &mut self.traced {
                    traced.reached(instance, addresses.len());
                }
                return Ok(streams);
            }
            // The platform has moved the request to another instance, or will.
        }
    }

    /// Notes the head of the answer, and adds the `Server-Timing` header.
    pub fn answered(&mut self, status: StatusCode, headers: &mut HeaderMap) {
        if let (Some(instance), Some(reached)) = (self.instance, self.times.reached) {
            let now = self.node.now();
            self.node.host().answered(now, instance, now.saturating_since(reached));
        }
        if let Ok(value) = HeaderValue::from_str(&self.times.server_timing(self.node.now())) {
            headers.append("server-timing", value);
        }
        if let Some(traced) = &mut self.traced {
            traced.status = Some(status.as_u16());
        }
    }

    /// News about the device of the instance that serves the request.
    pub const fn losses(&mut self) -> Losses {
        Losses(self.turns.take())
    }

    /// Keeps a connection that has served the request for reuse.
    pub fn free(&self, stage: usize, sender: Sender) {
        if let Some(instance) = self.instance.filter(|_| !self.broken) {
            self.node.free(instance, stage, sender);
        }
    }

    /// The file that a stage's answer names, if any.
    ///
    /// # Errors
    /// 502 if the name contains a path.
    pub fn on_its_way(&self, name: &str, answer: &HeaderMap) -> Result<Option<OnItsWay>, ApiError> {
        let (Some(instance), Some(between)) = (self.instance, &self.node.runner.between) else {
            return Ok(None);
        };
        let why = |why| ApiError::new(StatusCode::BAD_GATEWAY, format!("{name}: between two stages: {why}"));
        between.on_its_way(instance, answer).map_err(why)
    }

    /// Marks the instance as broken.
    pub const fn broken(&mut self) {
        self.broken = true;
    }
}

/// Waits for the loss of the device under a request.
#[derive(Debug)]
pub struct Losses(Option<UnboundedReceiver<Turn>>);

impl Losses {
    /// Returns the reason for the loss of the device; never returns while the device works.
    pub async fn next(&mut self) -> String {
        while let Some(turns) = &mut self.0 {
            match turns.recv().await {
                Some(Turn::DeviceLost(why)) => return why,
                Some(_) => {}
                None => self.0 = None,
            }
        }
        std::future::pending().await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let now = self.node.now();
        // An exiting process may still accept further connections and break these off too, so end its instance now.
        if let Some(instance) = self.instance.filter(|_| self.broken) {
            let pids = self.node.host().pids(instance);
            if pids.into_iter().any(is_ending) {
                self.node.host().unreachable(instance);
            }
        }
        self.node.host().end(now, self.request);
        if let Some(traced) = self.traced.take() {
            traced.end(self.times, now);
        }
    }
}

/// Whether a process is exiting: the kernel frees its memory before it closes its sockets.
fn is_ending(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/statm")).map_or(true, |text| text.starts_with("0 "))
}

#[cfg(test)]
mod tests {
    use crate::node::connect;

    #[tokio::test(start_paused = true)]
    async fn a_process_that_does_not_answer_a_connection_is_given_up() {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        // Beyond these two, connections wait for the process.
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let mut streams = Vec::new();
        let error = loop {
            match connect(address).await {
                Ok(stream) => streams.push(stream),
                Err(error) => break error,
            }
            assert!(streams.len() < 8, "all were taken");
        };
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    }
}
