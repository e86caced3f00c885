//! Traces: forwards the W3C `traceparent` of a request to its function, and sends spans to an OpenTelemetry collector.
//!
//! A request with a valid `traceparent` continues that trace; any other request begins a new trace. Without a collector the
//! header is forwarded unchanged. With `host.otlp` the host's span `run` becomes the function's parent, and each sampled request
//! is sent as OTLP/HTTP in JSON:
//!
//! ```text
//! function NAME  ├────────────────────────────────────────────────┤  arrival to the end of the answer
//!   queue        ├──┤                                                until an instance is started for it, or is free
//!   load            ├──────────────┤                                 cold start, or return from host memory
//!   queue                          ├┤                                from ready to the acceptance of the request
//!   run                             ├──────────────────────────────┤ from acceptance to the end of the answer
//!     token wait                    ├─────┤                          wait of its processes for GPU time
//! ```
//! The phases leave no gaps, so their times add up to the request's time.
//!
//! # Token wait
//! The daemon counts how long the threads of each process have waited for a token. A process with a token reports this every 10
//! ms. The span's length is the difference between two snapshots: when the instance accepts the request, and when the answer
//! has ended. So the span's place within `run` is unknown, and waits not yet reported are missing. If an instance serves
//! several requests at once, each of them gets the whole wait. Without both snapshots there is no span.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Request, Uri, header};
use gshare_core::{InstanceId, Timestamp};
use serde_json::{Value, json};
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

const TRACEPARENT: &str = "traceparent";
/// Traces that wait to be sent; further traces are lost.
const WAITING: usize = 1024;
/// Traces in one message.
const BATCH: usize = 256;
/// Time limit for the collector's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Concurrent questions to the daemon, which answers at most 32.
const QUESTIONS: usize = 8;
/// The flag of a recorded trace.
const SAMPLED: u8 = 1;

/// A place in a trace, as in `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Context {
    trace: u128,
    span: u64,
    flags: u8,
}

impl Context {
    /// Parses a header in lower-case hexadecimal digits. Neither id may be 0, and fields of later versions are ignored.
    fn parse(text: &str) -> Option<Self> {
        let digits = |text: &str, count: usize| {
            let good = text.len() == count && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            good.then(|| u128::from_str_radix(text, 16).ok()).flatten()
        };
        let mut fields = text.splitn(5, '-');
        let version = digits(fields.next()?, 2).filter(|version| *version != 0xff)?;
        let trace = digits(fields.next()?, 32).filter(|trace| *trace != 0)?;
        let span = digits(fields.next()?, 16).filter(|span| *span != 0)?;
        let flags = digits(fields.next()?, 2)?;
        if version == 0 && fields.next().is_some() {
            return None;
        }
        Some(Self { trace, span: u64::try_from(span).ok()?, flags: u8::try_from(flags).ok()? })
    }

    fn of(headers: &HeaderMap) -> Option<Self> {
        let mut all = headers.get_all(TRACEPARENT).iter();
        let first = all.next()?.to_str().ok()?;
        // Several headers might contradict each other.
        all.next().is_none().then(|| Self::parse(first)).flatten()
    }

    fn put(self, headers: &mut HeaderMap) {
        if let Ok(value) = HeaderValue::from_str(&self.to_string()) {
            headers.insert(TRACEPARENT, value);
        }
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, self.flags & SAMPLED)
    }
}

/// A unique id for a trace or a span, from random hash keys. Never 0.
fn number() -> u64 {
    RandomState::new().hash_one(0_u8).max(1)
}

/// The load that made an instance ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Time of the order for its processes.
    pub from: Timestamp,
    /// Time at which all processes accepted connections.
    pub until: Timestamp,
    /// Whether the instance was parked before, with its weights in host memory.
    pub parked: bool,
}

/// The times of a request on the host's clock.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Arrival of the request.
    pub arrived: Timestamp,
    /// The load of the instance that serves the request.
    pub load: Option<Load>,
    /// Acceptance by the instance.
    pub reached: Option<Timestamp>,
}

/// A part of a request's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Phase {
    name: &'static str,
    from: Timestamp,
    until: Timestamp,
}

impl Times {
    /// The phases up to `ended`, without gaps. Empty phases are left out, except for the first and the last.
    fn phases(&self, ended: Timestamp) -> Vec<Phase> {
        let reached = self.reached.unwrap_or(ended);
        // The request did not wait for a load that ended before it arrived.
        let load = self.load.filter(|load| load.until > self.arrived);
        let (from, until) = load.map_or((reached, reached), |load| (load.from, load.until));
        let from = from.clamp(self.arrived, reached);
        let until = until.clamp(from, reached);
        let phase = |name, from, until| Phase { name, from, until };
        let mut phases = vec![phase("queue", self.arrived, from)];
        let more = [phase("load", from, until), phase("queue", until, reached)];
        phases.extend(more.into_iter().filter(|phase| phase.from < phase.until));
        if self.reached.is_some() {
            phases.push(phase("run", reached, ended));
        }
        phases
    }

    /// The header `Server-Timing`, with each phase in ms, once the head of the answer has arrived.
    pub fn server_timing(&self, now: Timestamp) -> String {
        let ms = |phase: &Phase| phase.until.saturating_since(phase.from).as_secs_f64() * 1e3;
        let entry = |phase: &Phase| format!("{};dur={:.3}", phase.name, ms(phase));
        self.phases(now).iter().map(entry).collect::<Vec<_>>().join(", ")
    }
}

/// A request that is being traced.
#[derive(Debug)]
pub struct Traced {
    exporter: Arc<Exporter>,
    function: String,
    /// The trace, and the span of the whole request.
    context: Context,
    parent: Option<u64>,
    run: u64,
    /// Status of the answer, once its head has arrived.
    pub status: Option<u16>,
    /// Names of the instance's processes at the daemon.
    clients: Vec<String>,
    before: Option<JoinHandle<Option<Waited>>>,
}

/// Gives the request to a function its trace context in `headers`. Returns the record of the request if it is sampled.
pub fn begin(
    exporter: Option<&Arc<Exporter>>,
    function: &str,
    headers: &mut HeaderMap,
) -> Option<Box<Traced>> {
    let given = Context::of(headers);
    let sampled = exporter.filter(|_| given.is_none_or(|given| given.flags & SAMPLED != 0));
    let flags = if sampled.is_some() { SAMPLED } else { 0 };
    let fresh = || u128::from(number()) << 64 | u128::from(number());
    let Some(exporter) = sampled else {
        if given.is_none() {
            Context { trace: fresh(), span: number(), flags }.put(headers);
        }
        return None;
    };
    let trace = given.map_or_else(fresh, |given| given.trace);
    let (context, run) = (Context { trace, span: number(), flags }, number());
    Context { span: run, ..context }.put(headers);
    Some(Box::new(Traced {
        exporter: Arc::clone(exporter),
        function: function.to_owned(),
        context,
        parent: given.map(|given| given.span),
        run,
        status: None,
        clients: Vec::new(),
        before: None,
    }))
}

impl Traced {
    /// Notes that an instance with `processes` processes has accepted the request.
    pub fn reached(&mut self, instance: InstanceId, processes: usize) {
        let name = |index| super::host::client(&self.function, instance, index, processes);
        self.clients = (0..processes).map(name).collect();
        self.before = self.exporter.ask(&self.clients);
    }

    /// Sends the spans of an ended request. `now` is the host's clock.
    pub fn end(mut self, times: Times, now: Timestamp) {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let zero = since_epoch.saturating_sub(u128::from(now.as_nanos()));
        let exporter = Arc::clone(&self.exporter);
        self.exporter.runtime.clone().spawn(async move {
            let mut waited = None;
            if let Some(before) = self.before.take()
                && let (Ok(Some(before)), Some(after)) = (before.await, exporter.ask(&self.clients))
                && let Ok(Some(after)) = after.await
            {
                waited = after.seen.then(|| after.ns.saturating_sub(before.ns));
            }
            exporter.send(self.spans(times, now, zero, waited));
        });
    }

    /// The spans in OTLP's JSON. `zero` is the start of the host's clock, in ns since 1970.
    fn spans(&self, times: Times, ended: Timestamp, zero: u128, waited: Option<u64>) -> Vec<Value> {
        let unix = |at: Timestamp| (zero + u128::from(at.as_nanos())).to_string();
        let span = |id: u64, parent: Option<u64>, kind: u8, phase: Phase, attributes: Value| {
            json!({
                "traceId": format!("{:032x}", self.context.trace),
                "spanId": format!("{id:016x}"),
                "parentSpanId": parent.map_or_else(String::new, |parent| format!("{parent:016x}")),
                "name": phase.name,
                "kind": kind,
                "startTimeUnixNano": unix(phase.from),
                "endTimeUnixNano": unix(phase.until),
                "attributes": attributes,
            })
        };
        const INTERNAL: u8 = 1;
        const SERVER: u8 = 2;
        const CLIENT: u8 = 3;
        let text = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
        let whole = Phase { name: "", from: times.arrived, until: ended };
        let mut attributes = vec![text("faas.name", &self.function)];
        if let Some(status) = self.status {
            let value = json!({"intValue": status.to_string()});
            attributes.push(json!({"key": "http.response.status_code", "value": value}));
        }
        let mut root = span(self.context.span, self.parent, SERVER, whole, Value::Array(attributes));
        root["name"] = format!("function {}", self.function).into();
        if self.status.is_none_or(|status| status >= 500) {
            root["status"] = json!({"code": 2});
        }
        let mut spans = vec![root];
        for phase in times.phases(ended) {
            let (id, kind) = if phase.name == "run" { (self.run, CLIENT) } else { (number(), INTERNAL) };
            let attributes = match (phase.name, times.load) {
                ("load", Some(load)) => {
                    let how = if load.parked { "return from parked" } else { "cold start" };
                    json!([text("gshare.load", how)])
                }
                _ => json!([]),
            };
            spans.push(span(id, Some(self.context.span), kind, phase, attributes));
            if let ("run", Some(waited)) = (phase.name, waited) {
                let until = phase.from.saturating_add(gshare_core::Duration::from_nanos(waited));
                let wait = Phase { name: "token wait", until: until.min(phase.until), ..phase };
                let said = json!([text("gshare.place", "a sum: its place within the run is not known")]);
                spans.push(span(number(), Some(self.run), INTERNAL, wait, said));
            }
        }
        spans
    }
}

/// Total wait for tokens of an instance's processes.
#[derive(Debug, Clone, Copy, Default)]
struct Waited {
    ns: u64,
    /// Whether the daemon knows any of the processes.
    seen: bool,
}

/// Address of a collector: `http://HOST[:PORT][/PATH]`. The default path is OTLP's path for traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    host: String,
    port: u16,
    path: String,
}

impl FromStr for Collector {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let uri = text.parse::<Uri>().ok().filter(|uri| uri.scheme_str() == Some("http"));
        let Some((host, uri)) = uri.as_ref().and_then(|uri| Some((uri.host()?, uri))) else {
            return Err(format!("`{text}`: need http://HOST[:PORT][/PATH], such as http://127.0.0.1:4318"));
        };
        let path = match uri.path() {
            "" | "/" => "/v1/traces",
            path => path,
        };
        Ok(Self { host: host.to_owned(), port: uri.port_u16().unwrap_or(80), path: path.to_owned() })
    }
}

/// Sends traces to a collector, in messages of up to 256. A slow or missing collector loses traces but delays no request.
#[derive(Debug)]
pub struct Exporter {
    runtime: tokio::runtime::Handle,
    traces: mpsc::Sender<Vec<Value>>,
    lost: Arc<AtomicU64>,
    /// Socket of the node's daemon, for questions about waits.
    daemon: Option<PathBuf>,
    questions: Arc<Semaphore>,
}

impl Exporter {
    /// Starts the task that sends traces. Needs a runtime.
    pub fn start(collector: Collector, daemon: Option<PathBuf>) -> Arc<Self> {
        let (traces, todo) = mpsc::channel(WAITING);
        let (lost, questions) = (Arc::default(), Arc::new(Semaphore::new(QUESTIONS)));
        tokio::spawn(export(collector, todo, Arc::clone(&lost)));
        let runtime = tokio::runtime::Handle::current();
        Arc::new(Self { runtime, traces, lost, daemon, questions })
    }

    fn send(&self, spans: Vec<Value>) {
        if self.traces.try_send(spans).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Asks the daemon for the total wait of these clients. None without a daemon, or with too many questions under way.
    fn ask(&self, clients: &[String]) -> Option<JoinHandle<Option<Waited>>> {
        let place = Arc::clone(&self.questions).try_acquire_owned().ok()?;
        let (daemon, clients) = (self.daemon.clone()?, clients.to_vec());
        Some(self.runtime.spawn_blocking(move || {
            let snapshot = gshared::admin::snapshot(&daemon).ok()?;
            drop(place);
            let mut all = Waited::default();
            for client in snapshot.clients.iter().filter(|client| clients.contains(&client.name)) {
                all = Waited { ns: all.ns.saturating_add(client.waited_ns.as_nanos()), seen: true };
            }
            Some(all)
        }))
    }
}

async fn export(collector: Collector, mut todo: mpsc::Receiver<Vec<Value>>, lost: Arc<AtomicU64>) {
    let mut failing = false;
    let mut traces = Vec::with_capacity(BATCH);
    while todo.recv_many(&mut traces, BATCH).await > 0 {
        let count = traces.len() as u64;
        let sent = tokio::time::timeout(PATIENCE, post(&collector, message(traces.drain(..)))).await;
        let why = match sent {
            Ok(Ok(())) => {
                failing = false;
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
        };
        let lost = lost.fetch_add(count, Ordering::Relaxed) + count;
        if !std::mem::replace(&mut failing, true) {
            let Collector { host, port, path } = &collector;
            eprintln!("openfaas: host.otlp http://{host}:{port}{path}: {why}; {lost} traces are lost so far");
        }
    }
}

/// A message of OTLP.
fn message(traces: impl Iterator<Item = Vec<Value>>) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    json!({"resourceSpans": [{
        "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "gshare-openfaas"}}]},
        "scopeSpans": [{
            "scope": {"name": "gshare-openfaas", "version": version},
            "spans": traces.flatten().collect::<Vec<_>>(),
        }],
    }]})
}

async fn post(collector: &Collector, message: Value) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let Collector { host, port, path } = collector;
    // IPv6 addresses have brackets only in URLs.
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let request = Request::post(path)
        .header(header::HOST, format!("{host}:{port}"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(serde_json::to_vec(&message)?))?;
    match crate::proxy::exchange((name, *port), request).await?.status() {
        status if status.is_success() => Ok(()),
        status => Err(format!("answered {status}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_context_is_taken_as_the_standard_says() {
        let context = Context::parse(GOOD).unwrap();
        assert_eq!(context.to_string(), GOOD);
        let later = Context::parse(&GOOD.replacen("00", "01", 1).replace("-01", "-03-more")).unwrap();
        assert_eq!((later.trace, later.flags), (context.trace, 3));
        for bad in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(Context::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn without_a_collector_a_context_goes_on_as_it_came_and_a_bad_one_is_replaced() {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static(GOOD));
        assert!(begin(None, "f", &mut headers).is_none());
        assert_eq!(headers[TRACEPARENT], GOOD);
        headers.append(TRACEPARENT, HeaderValue::from_static(GOOD));
        assert!(begin(None, "f", &mut headers).is_none());
        let made = Context::of(&headers).expect("one, and a valid one");
        assert!(made.trace != Context::parse(GOOD).unwrap().trace && made.flags == 0);
    }

    #[test]
    fn phases_leave_no_gap() {
        let at = Timestamp::from_millis;
        let load = |from, until| Some(Load { from: at(from), until: at(until), parked: false });
        for (load, reached, wanted) in [
            (None, Some(14), "queue;dur=4.000, run;dur=6.000"),
            // The load ends before the arrival, during the wait, or does not exist.
            (load(2, 8), Some(14), "queue;dur=4.000, run;dur=6.000"),
            (load(2, 13), Some(14), "queue;dur=0.000, load;dur=3.000, queue;dur=1.000, run;dur=6.000"),
            (load(11, 13), Some(14), "queue;dur=1.000, load;dur=2.000, queue;dur=1.000, run;dur=6.000"),
            (None, None, "queue;dur=10.000"),
        ] {
            let times = Times { arrived: at(10), load, reached: reached.map(at) };
            assert_eq!(times.server_timing(at(20)), wanted, "{load:?}");
            let phases = times.phases(at(20));
            assert_eq!((phases[0].from, phases[phases.len() - 1].until), (at(10), at(20)));
            assert!(phases.windows(2).all(|two| two[0].until == two[1].from));
        }
    }

    #[test]
    fn a_collector_is_named_by_a_plain_url() {
        let of = |text: &str| text.parse::<Collector>();
        let collector = of("http://127.0.0.1:4318").unwrap();
        assert_eq!((collector.port, collector.path.as_str()), (4318, "/v1/traces"));
        assert_eq!(of("http://[::1]/otlp").unwrap().path, "/otlp");
        for bad in ["127.0.0.1:4318", "https://collector:4318", "http://"] {
            assert!(of(bad).unwrap_err().contains("need http://HOST"), "{bad}");
        }
    }
}
