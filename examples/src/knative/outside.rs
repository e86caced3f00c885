//! Questions to servers other than the API server: to pods and activators about their load, and to services about their
//! backend.

use super::decider::PodLoad;
use super::settings::milli;
use axum::body::Body;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use prost::Message as _;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

/// A queue-proxy's report on its pod for the last second: `metrics.Stat` of Knative, as protobuf.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Stat {
    /// The pod.
    #[prost(string, tag = "1")]
    pub pod_name: String,
    /// Requests at a time.
    #[prost(double, tag = "2")]
    pub average_concurrent_requests: f64,
    /// Part of these requests that came through an activator.
    #[prost(double, tag = "3")]
    pub average_proxied_concurrent_requests: f64,
    /// Requests that came.
    #[prost(double, tag = "4")]
    pub request_count: f64,
    /// Part of these requests that came through an activator.
    #[prost(double, tag = "5")]
    pub proxied_request_count: f64,
    /// For how long it has run, in seconds.
    #[prost(double, tag = "6")]
    pub process_uptime: f64,
    /// When this was, in ms since 1970.
    #[prost(int64, tag = "7")]
    pub timestamp: i64,
}

/// Why a question failed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutsideError {
    /// No server there, or an answer that breaks off.
    #[error("{0}")]
    Connection(String),
    /// No answer in time.
    #[error("no answer in time")]
    Late,
    /// An answer, but not 200.
    #[error("status {0}, need 200")]
    Status(u16),
    /// An answer in another form.
    #[error("content-type: `{0}`: need {PROTOBUF}")]
    ContentType(String),
    /// More bytes than any answer has.
    #[error("an answer of more than {MOST} bytes")]
    TooLong,
    /// No message of that kind.
    #[error("no Stat: {0}")]
    Message(String),
    /// A load that is no number of requests.
    #[error("{0}: {1}: need 0 to 1000000")]
    Number(&'static str, String),
}

/// Time for one answer: all of them are wanted once a second.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Longest answer in bytes: an activator's answer grows with the number of revisions.
const MOST: usize = 16 << 20;
const PROTOBUF: &str = "application/protobuf";

/// Decodes a queue-proxy's report.
///
/// # Errors
/// When it is no such message, or not a number of requests.
pub fn decode(bytes: &[u8]) -> Result<PodLoad, OutsideError> {
    let stat = Stat::decode(bytes).map_err(|error| OutsideError::Message(error.to_string()))?;
    let check = |field, value: f64| match milli(value) {
        Some(_) => Ok(value),
        None => Err(OutsideError::Number(field, value.to_string())),
    };
    Ok(PodLoad {
        concurrent: check("average_concurrent_requests", stat.average_concurrent_requests)?,
        proxied: check("average_proxied_concurrent_requests", stat.average_proxied_concurrent_requests)?,
        rate: check("request_count", stat.request_count)?,
    })
}

/// Requests at activators, by namespace and revision.
pub type Waiting = BTreeMap<(String, String), f64>;

/// Reads the waiting requests of an activator: the gauge `activator_request_concurrency` of its Prometheus text,
/// `kn_revision_request_concurrency` since Knative 1.19. Lines of other gauges and unreadable lines are skipped.
pub fn waiting(text: &str) -> Waiting {
    const GAUGES: [(&str, &str, &str); 2] = [
        ("activator_request_concurrency{", "namespace_name", "revision_name"),
        ("kn_revision_request_concurrency{", "k8s_namespace_name", "kn_revision_name"),
    ];
    let mut found = BTreeMap::new();
    for line in text.lines() {
        for (gauge, namespace, revision) in GAUGES {
            let Some((labels, value)) = line.strip_prefix(gauge).and_then(|rest| rest.rsplit_once('}'))
            else {
                continue;
            };
            // Names of objects have no quotes or commas in them.
            let label = |name: &str| {
                let labels = labels.split(',').filter_map(|label| label.split_once('='));
                let mut labels = labels.filter(|(key, _)| *key == name);
                labels.next().map(|(_, value)| value.trim_matches('"').to_owned())
            };
            let value = value.split_whitespace().next().and_then(|value| value.parse::<f64>().ok());
            if let (Some(namespace), Some(revision), Some(value)) = (label(namespace), label(revision), value)
                && milli(value).is_some()
            {
                *found.entry((namespace, revision)).or_insert(0.0) += value;
            }
        }
    }
    found
}

/// Pods and activators, as this controller asks them.
pub trait Outside: Send + Sync {
    /// The load of the pod at this address.
    fn pod(&self, address: IpAddr) -> BoxFuture<'_, Result<PodLoad, OutsideError>>;
    /// Waiting requests at the activator with this address: see [`waiting`].
    fn activator(&self, address: IpAddr) -> BoxFuture<'_, Result<Waiting, OutsideError>>;
    /// Whether the activator answers for a service.
    fn is_backed(&self, namespace: &str, service: &str, h2c: bool) -> BoxFuture<'_, bool>;
}

/// The real pods and activators, over HTTP.
#[derive(Debug, Clone)]
pub struct Http {
    /// Port at which queue-proxies and activators report their load.
    pub metrics_port: u16,
    /// Domain suffix of the services' names.
    pub domain: String,
    /// Port of services for HTTP/1, and for HTTP/2.
    pub service_ports: (u16, u16),
    /// Time for one answer.
    pub patience: Duration,
}

impl Outside for Http {
    fn pod(&self, address: IpAddr) -> BoxFuture<'_, Result<PodLoad, OutsideError>> {
        async move {
            let (kind, bytes) =
                get((address, self.metrics_port), "/metrics", &[("accept", PROTOBUF)], self.patience).await?;
            if kind != PROTOBUF {
                return Err(OutsideError::ContentType(kind));
            }
            decode(&bytes)
        }
        .boxed()
    }

    fn activator(&self, address: IpAddr) -> BoxFuture<'_, Result<Waiting, OutsideError>> {
        async move {
            let (_, bytes) =
                get((address, self.metrics_port), "/metrics", &[("accept", "text/plain")], self.patience)
                    .await?;
            Ok(waiting(&String::from_utf8_lossy(&bytes)))
        }
        .boxed()
    }

    fn is_backed(&self, namespace: &str, service: &str, h2c: bool) -> BoxFuture<'_, bool> {
        let host = format!("{service}.{namespace}.svc.{}", self.domain);
        let port = if h2c { self.service_ports.1 } else { self.service_ports.0 };
        async move { is_activator((host.as_str(), port), self.patience).await }.boxed()
    }
}

/// Whether the activator answers there.
async fn is_activator(target: impl tokio::net::ToSocketAddrs, patience: Duration) -> bool {
    let probe = [("k-network-probe", "activator"), ("user-agent", "Knative-Autoscaling-Probe")];
    let answer = get(target, "/healthz", &probe, patience).await;
    answer.is_ok_and(|(_, body)| body == b"activator"[..])
}

/// The content type and the body of an answer of 200.
async fn get(
    target: impl tokio::net::ToSocketAddrs,
    path: &str,
    headers: &[(&str, &str)],
    patience: Duration,
) -> Result<(String, axum::body::Bytes), OutsideError> {
    let broken = |error: &dyn std::fmt::Display| OutsideError::Connection(error.to_string());
    let ask = async {
        let stream = tokio::net::TcpStream::connect(target).await.map_err(|error| broken(&error))?;
        let host = stream.peer_addr().map_err(|error| broken(&error))?.to_string();
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| broken(&error))?;
        // `send_request` reports the same errors.
        tokio::spawn(connection.map(drop));
        let mut request = hyper::Request::get(path).header("host", host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).map_err(|error| broken(&error))?;
        let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
        if answer.status() != 200 {
            return Err(OutsideError::Status(answer.status().as_u16()));
        }
        let kind = answer.headers().get("content-type").and_then(|kind| kind.to_str().ok());
        let kind = kind.unwrap_or_default().to_owned();
        let body = axum::body::to_bytes(Body::new(answer.into_body()), MOST).await;
        Ok((kind, body.map_err(|_| OutsideError::TooLong)?))
    };
    tokio::time::timeout(patience, ask).await.map_err(|_| OutsideError::Late)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::http::HeaderMap;
    use axum::routing::get as on_get;
    use proptest::prelude::*;

    #[test]
    fn a_stat_reads_as_queue_proxy_writes_it() {
        // Made by hand: field 1 is text, 2 to 6 are doubles in little endian, 7 a varint.
        let mut bytes = b"\x0a\x05pod-1".to_vec();
        for (field, value) in [(2u8, 2.5f64), (3, 0.5), (4, 30.0), (5, 6.0), (6, 12.0)] {
            bytes.push(field << 3 | 1);
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(b"\x38\xac\x02");
        assert_eq!(decode(&bytes).unwrap(), PodLoad { concurrent: 2.5, proxied: 0.5, rate: 30.0 });
        assert_eq!(Stat::decode(&*bytes).unwrap().timestamp, 300);
        // A field of a later version is skipped.
        bytes.extend(b"\x40\x01");
        assert!(decode(&bytes).is_ok());
        assert_eq!(decode(b""), Ok(PodLoad::default()), "nothing is said of what is 0");
        assert!(matches!(decode(&bytes[..9]), Err(OutsideError::Message(_))));
        let nan = Stat { request_count: f64::NAN, ..Stat::default() }.encode_to_vec();
        assert_eq!(decode(&nan), Err(OutsideError::Number("request_count", "NaN".into())));
    }

    #[test]
    fn what_waits_is_read_from_old_and_new_activators() {
        let text = "\
# TYPE activator_request_concurrency gauge
activator_request_concurrency{configuration_name=\"f\",namespace_name=\"default\",revision_name=\"f-1\"} 3
kn_revision_request_concurrency{k8s_namespace_name=\"default\",kn_revision_name=\"f-1\"} 1.5 1700000000
kn_revision_request_concurrency{k8s_namespace_name=\"default\",kn_revision_name=\"g-1\"} NaN
activator_request_count{namespace_name=\"default\",revision_name=\"f-1\"} 9
activator_request_concurrency{namespace_name=\"default\"} 7
activator_request_concurrency{
";
        let key = ("default".to_owned(), "f-1".to_owned());
        assert_eq!(waiting(text), BTreeMap::from([(key, 4.5)]));
    }

    #[tokio::test]
    async fn pods_and_activators_are_asked_over_http() {
        let stat = Stat { average_concurrent_requests: 4.0, request_count: 8.0, ..Stat::default() };
        let metrics = move |headers: HeaderMap| {
            let protobuf = headers["accept"] == PROTOBUF;
            let text = "activator_request_concurrency{namespace_name=\"n\",revision_name=\"r\"} 2\n";
            let (kind, body) =
                if protobuf { (PROTOBUF, stat.encode_to_vec()) } else { ("text/plain", text.into()) };
            std::future::ready(([("content-type", kind)], body))
        };
        let probe =
            |headers: HeaderMap| std::future::ready(headers["k-network-probe"].to_str().unwrap().to_owned());
        let router = Router::new().route("/metrics", on_get(metrics)).route("/healthz", on_get(probe));
        let (here, port) = serve(router).await;
        let http = Http {
            metrics_port: port,
            domain: "invalid".into(),
            service_ports: (port, port),
            patience: LONG,
        };
        assert_eq!(http.pod(here).await, Ok(PodLoad { concurrent: 4.0, proxied: 0.0, rate: 8.0 }));
        assert_eq!(http.activator(here).await.unwrap()[&("n".into(), "r".into())], 2.0);
        assert!(is_activator((here, port), LONG).await);
        assert_eq!(get((here, port), "/nothing", &[], LONG).await, Err(OutsideError::Status(404)));
        // A pod answers, but as itself.
        let pod = serve(Router::new().route("/healthz", on_get(|| std::future::ready("queue")))).await;
        assert!(!is_activator(pod, LONG).await);
    }

    /// Long, for a machine that does other things, too.
    const LONG: Duration = Duration::from_secs(600);

    async fn serve(router: Router) -> (IpAddr, u16) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (address.ip(), address.port())
    }

    #[tokio::test]
    async fn answers_that_are_none_are_told_apart() {
        let text = on_get(|| std::future::ready(([("content-type", "text/plain")], "queue_requests 1")));
        let (here, metrics_port) = serve(Router::new().route("/metrics", text)).await;
        let http = Http { metrics_port, domain: "invalid".into(), service_ports: (80, 81), patience: LONG };
        assert_eq!(http.pod(here).await, Err(OutsideError::ContentType("text/plain".into())));
        let long = on_get(|| std::future::ready(vec![b'#'; MOST + 1]));
        let target = serve(Router::new().route("/metrics", long)).await;
        assert_eq!(get(target, "/metrics", &[], LONG).await, Err(OutsideError::TooLong));
        // The port is bound, so that no other process has it, and no process listens there.
        let nobody = tokio::net::TcpSocket::new_v4().unwrap();
        nobody.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let answer = get(nobody.local_addr().unwrap(), "/metrics", &[], LONG).await;
        assert!(matches!(answer, Err(OutsideError::Connection(_))));
    }

    /// On virtual time.
    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_long() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let answer = get(silent.local_addr().unwrap(), "/metrics", &[], PATIENCE).await;
        assert_eq!(answer, Err(OutsideError::Late));
    }

    proptest! {
        /// Only numbers of requests are read, from any answer.
        #[test]
        fn what_is_read_are_numbers_of_requests(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            text in "(activator_request_concurrency|kn_revision_request_concurrency)\\{[a-z_=,\"{} ]{0,60}\\} ?[-+.0-9eNaninf]{0,12}\\PC{0,8}",
            values in prop::array::uniform3(any::<f64>()),
        ) {
            let numbers = |load: PodLoad| [load.concurrent, load.proxied, load.rate];
            let sensible = |number: f64| (0.0..=1e6).contains(&number);
            if let Ok(load) = decode(&bytes) {
                prop_assert!(numbers(load).into_iter().all(sensible));
            }
            let stat = Stat {
                average_concurrent_requests: values[0],
                average_proxied_concurrent_requests: values[1],
                request_count: values[2],
                ..Stat::default()
            };
            let read = decode(&stat.encode_to_vec());
            prop_assert_eq!(read.is_ok(), values.into_iter().all(sensible));
            let said = PodLoad { concurrent: values[0], proxied: values[1], rate: values[2] };
            prop_assert!(read.is_err() || read == Ok(said));
            prop_assert!(waiting(&text).into_values().all(sensible));
        }
    }
}
