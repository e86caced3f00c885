//! An HTTP server as the function: `127.0.0.1:$PORT`, as of-watchdog's HTTP mode has it.
//!
//! # Problem
//! The deployed functions of a host take requests over HTTP. They are to be measured as they are deployed, so a call of a trial
//! is one request to the program, and the program is ready when it takes connections.
//!
//! # Algorithm
//! 1. A port is chosen. The caller knows shares, hook and environment, and starts the program with the port.
//! 2. The port is tried every [`PROBE`] until it takes a connection, the program ends, or the time is over.
//! 3. Calls go to [`Call::connections`] threads with a connection each; an answer of any status counts as an answer, unless
//!    the server itself is missing behind it (no status at all), which ends the trial.
//!
//! A call is one request, so settings have batch size 1; how many the program has at once is the load's to say
//! ([`Load::Closed`](crate::load::Load)). Of a program that takes batches ([`Call::batched`]) a call is one batch, as
//! [`batch`](mod@crate::batch) has it, and one that is not answered well ends the trial.

use crate::batch;
use crate::executor::{ExecError, Executor, Ready};
use gshare_core::profile::Setting;
use gshare_core::{Duration, Timestamp};
use parking_lot::Mutex;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

/// Time between two attempts to connect to a starting program.
pub const PROBE: Duration = Duration::from_millis(5);
/// How often a wait for an answer looks whether the program has ended.
const LOOK: Duration = Duration::from_millis(100);

/// A started program. Dropping it ends the program and all its descendants.
pub trait Program: Send {
    /// How the program ended, if it has.
    fn ended(&mut self) -> Option<String>;

    /// Called again and again until the program takes connections. Gives the cause of the delay, if one is seen.
    fn does_not_listen(&mut self) -> Option<String> {
        None
    }

    /// Whether it is of no use to wait longer, since the program does nothing, as of the last [`Program::does_not_listen`].
    fn is_idle(&self) -> bool {
        false
    }

    /// Where it takes connections; none while that is not known. By default at its port of the loopback address.
    fn address(&self, port: u16) -> Option<SocketAddr> {
        Some((Ipv4Addr::LOCALHOST, port).into())
    }
}

/// Starts the program of a setting, to listen on this port of the loopback address.
type Start<P> = Box<dyn FnMut(Setting, u16) -> Result<P, String> + Send>;

/// The request, sent again and again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The path with its query; begins with `/`.
    pub path: String,
    /// The body; a request without one is a GET, one with a body a POST.
    pub body: Vec<u8>,
    /// Whether the program takes batches: a call has as many requests as its setting says.
    pub batched: bool,
    /// The most requests at once: as many threads, each with a connection. 1 to 64.
    pub connections: u32,
    /// The longest wait for an answer.
    pub patience: Duration,
}

/// Runs an HTTP server. See the [module](self).
pub struct Http<P> {
    start: Start<P>,
    call: Call,
    begin: Instant,
    running: Option<Running<P>>,
}

struct Running<P> {
    program: P,
    calls: Sender<()>,
    answers: Receiver<Result<Instant, String>>,
}

impl<P: Program> Http<P> {
    /// A program started by `start`, and the request sent to it.
    pub fn new(call: Call, start: impl FnMut(Setting, u16) -> Result<P, String> + Send + 'static) -> Self {
        Self { start: Box::new(start), call, begin: Instant::now(), running: None }
    }

    fn time(&self, at: Instant) -> Timestamp {
        Timestamp::ZERO.saturating_add(at.saturating_duration_since(self.begin).into())
    }

    fn connect(&self, address: SocketAddr, batch: u32) -> (Sender<()>, Receiver<Result<Instant, String>>) {
        let (calls, todo) = channel::<()>();
        let (done, answers) = channel();
        let todo = Arc::new(Mutex::new(todo));
        let url = format!("http://{address}{}", self.call.path);
        let batch = self.call.batched.then_some(batch as usize);
        for _ in 0..self.call.connections.clamp(1, 64) {
            let (todo, done, url) = (Arc::clone(&todo), done.clone(), url.clone());
            let body = self.call.body.repeat(batch.unwrap_or(1));
            let patience = Some(self.call.patience.into());
            let worker = move || {
                let config =
                    ureq::Agent::config_builder().timeout_global(patience).http_status_as_error(false);
                let agent = ureq::Agent::new_with_config(config.build());
                loop {
                    // A worker holds the lock only while it waits for its turn.
                    let turn = todo.lock().recv();
                    if turn.is_err() || done.send(request(&agent, &url, &body, batch)).is_err() {
                        return;
                    }
                }
            };
            // Fewer connections than wanted measure a lower throughput; none at all is found by the first call.
            let _ = std::thread::Builder::new().name("gshare-call".into()).spawn(worker);
        }
        (calls, answers)
    }
}

fn request(agent: &ureq::Agent, url: &str, body: &[u8], batch: Option<usize>) -> Result<Instant, String> {
    let answer = match batch {
        Some(parts) => {
            let lengths = batch::lengths((0..parts).map(|_| body.len() / parts.max(1)));
            agent.post(url).header(batch::LENGTHS, lengths).send(body)
        }
        None if body.is_empty() => agent.get(url).call(),
        None => agent.post(url).send(body),
    };
    let mut answer = answer.map_err(|error| error.to_string())?;
    // The connection is used again once the answer was read.
    let bytes = std::io::copy(&mut answer.body_mut().as_reader(), &mut std::io::sink())
        .map_err(|error| error.to_string())?;
    if let Some(parts) = batch {
        if !answer.status().is_success() {
            return Err(format!("a batch of {parts} is answered {}", answer.status()));
        }
        let header = answer.headers().get(batch::LENGTHS).and_then(|value| value.to_str().ok());
        batch::split(header, usize::try_from(bytes).unwrap_or(usize::MAX), parts)?;
    }
    Ok(Instant::now())
}

impl<P: Program> Executor for Http<P> {
    fn start(&mut self, setting: Setting, within: Duration) -> Result<Ready, ExecError> {
        self.stop();
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let port = port.map_err(|error| ExecError::Unavailable(format!("a port: {error}")))?.port();
        let began = Instant::now();
        let mut program = (self.start)(setting, port).map_err(ExecError::Unavailable)?;
        let address = loop {
            if let Some(address) = program.address(port)
                && TcpStream::connect(address).is_ok()
            {
                break address;
            }
            if let Some(how) = program.ended() {
                return Err(ExecError::Ended(how));
            }
            let why = program.does_not_listen();
            let waited = Duration::from(began.elapsed());
            if waited > within || program.is_idle() {
                let within = Duration::from_secs(waited.min(within).as_nanos() / 1_000_000_000).max(PROBE);
                return Err(ExecError::NotReady { within, why });
            }
            std::thread::sleep(PROBE.into());
        };
        let load = Duration::from(began.elapsed());
        let (calls, answers) = self.connect(address, setting.batch);
        self.running = Some(Running { program, calls, answers });
        Ok(Ready { load: Some(load) })
    }

    fn now(&self) -> Timestamp {
        self.time(Instant::now())
    }

    fn submit(&mut self) -> Result<(), ExecError> {
        let sent = self.running.as_ref().map(|running| running.calls.send(()));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(ExecError::Ended("no thread can call it".to_owned())),
        }
    }

    fn wait(&mut self, until: Timestamp) -> Result<Option<Timestamp>, ExecError> {
        let wait = until.saturating_since(self.now());
        let Some(running) = &mut self.running else {
            return Err(ExecError::Ended("it was not started".to_owned()));
        };
        let began = Instant::now();
        loop {
            let rest = wait.saturating_sub(began.elapsed().into());
            return match running.answers.recv_timeout(rest.min(LOOK).into()) {
                Ok(Ok(at)) => Ok(Some(self.time(at))),
                Ok(Err(error)) => Err(ExecError::Ended(running.program.ended().unwrap_or(error))),
                Err(RecvTimeoutError::Timeout) => match running.program.ended() {
                    Some(how) => Err(ExecError::Ended(how)),
                    None if rest > LOOK => continue,
                    None => Ok(None),
                },
                Err(RecvTimeoutError::Disconnected) => {
                    Err(ExecError::Ended("no thread can call it".to_owned()))
                }
            };
        }
    }

    fn stop(&mut self) {
        self.running = None;
    }
}

gshare_core::debug_fields!(Http<P> { call });

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{Quota, SmShare};
    use std::io::{Read as _, Write as _};

    /// A server in a thread of this process: its end is the end of its listener.
    struct Served(Option<String>);

    impl Program for Served {
        fn ended(&mut self) -> Option<String> {
            self.0.clone()
        }
    }

    fn serve(port: u16, answer: &'static [u8]) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                std::thread::spawn(move || {
                    let mut buffer = [0; 1024];
                    while stream.read(&mut buffer).is_ok_and(|read| read > 0)
                        && stream.write_all(answer).is_ok()
                    {}
                });
            }
        });
    }

    fn call() -> Call {
        Call {
            path: "/".into(),
            body: Vec::new(),
            batched: false,
            connections: 2,
            patience: Duration::from_secs(5),
        }
    }

    fn setting() -> Setting {
        Setting { batch: 1, sm: SmShare::WHOLE, quota: Quota::WHOLE }
    }

    #[test]
    fn a_program_that_serves_is_measured_and_one_that_ends_is_told_apart() {
        let mut function = Http::new(call(), |_, port| {
            serve(port, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            Ok(Served(None))
        });
        let patience = Duration::from_secs(60);
        assert!(function.start(setting(), patience).unwrap().load.is_some());
        for _ in 0..20 {
            // Two at once, as there are connections.
            function.submit().unwrap();
            function.submit().unwrap();
            let until = function.now().saturating_add(patience);
            let answers = [function.wait(until).unwrap(), function.wait(until).unwrap()];
            assert!(answers.iter().all(Option::is_some), "{answers:?}");
        }
        function.stop();
        assert!(function.submit().is_err(), "one that was stopped takes no call");

        let mut ended = Http::new(call(), |_, _| Ok(Served(Some("exit status: 3".into()))));
        let error = ended.start(setting(), Duration::from_secs(60)).unwrap_err();
        assert_eq!(error, ExecError::Ended("exit status: 3".into()));

        struct Elsewhere;
        impl Program for Elsewhere {
            fn ended(&mut self) -> Option<String> {
                None
            }

            fn does_not_listen(&mut self) -> Option<String> {
                Some("listens elsewhere".into())
            }

            fn is_idle(&self) -> bool {
                true
            }
        }
        let mut elsewhere = Http::new(call(), |_, _| Ok(Elsewhere));
        // An idle program ends the wait at once.
        let error = elsewhere.start(setting(), Duration::from_secs(60)).unwrap_err();
        assert_eq!(error.to_string(), "not ready within 5ms: listens elsewhere");
        let mut none = Http::<Served>::new(call(), |_, _| Err("no such file".into()));
        assert!(matches!(none.start(setting(), Duration::from_secs(60)), Err(ExecError::Unavailable(_))));
    }
}
