//! Traces: a collector on loopback gets the spans of a slow request, and its function the request's place in the trace.

use crate::common::{PATIENCE, Provider};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};

/// A collector, and its spans.
fn collector() -> (SocketAddr, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, spans) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert!(stream.read_line(&mut head).unwrap() > 0, "{head}");
            }
            let head = head.to_lowercase();
            assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
            assert!(head.contains("content-type: application/json"), "{head}");
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            let mut body = vec![0; length.parse().unwrap()];
            stream.read_exact(&mut body).unwrap();
            let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
            stream.get_mut().write_all(answer).unwrap();
            let message: Value = serde_json::from_slice(&body).unwrap();
            let resource = &message["resourceSpans"][0];
            assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "gshare-openfaas");
            for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
                let _ = sender.send(span.clone());
            }
        }
    });
    (address, spans)
}

fn get(address: SocketAddr, path: &str, traceparent: &str) -> (String, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let headers = format!("Host: localhost\r\nConnection: close\r\ntraceparent: {traceparent}");
    write!(stream, "GET {path} HTTP/1.1\r\n{headers}\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{text}");
    (head.to_lowercase(), serde_json::from_str(body).unwrap_or_else(|_| body.into()))
}

fn ns(span: &Value, key: &str) -> u64 {
    span[key].as_str().unwrap().parse().unwrap()
}

fn took(span: &Value) -> u64 {
    ns(span, "endTimeUnixNano") - ns(span, "startTimeUnixNano")
}

/// The spans of the next request: the whole request, and its phases.
fn next(spans: &Receiver<Value>) -> (Value, Vec<Value>) {
    let next = || spans.recv_timeout(PATIENCE).expect("a span");
    // The token wait of an earlier request does not count.
    let root = std::iter::repeat_with(next).find(|span| span["name"] != "token wait").unwrap();
    let mut phases = vec![next()];
    // The phases end with the request; the token wait follows `run`.
    while phases[phases.len() - 1]["endTimeUnixNano"] != root["endTimeUnixNano"] {
        phases.push(next());
    }
    (root, phases)
}

#[test]
fn a_slow_request_is_one_trace_whose_phases_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let (collector, spans) = collector();
    let url = format!("http://{collector}");
    let provider = Provider::start(dir.path(), &["--sim=v100", "--set", &format!("host.otlp={url}")]);
    // 120 ms of kernels, with room for 20 in a window of 100 ms.
    provider.deploy(
        "cold",
        r#","envVars":{"KERNELS":"60"},"annotations":{"gshare/profile":"none","fastgshare/gpu_sm_partition":"50",
            "fastgshare/gpu_quota_request":"0.2","fastgshare/gpu_quota_limit":"0.2"}"#,
    );
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let (head, _) = get(provider.address, "/function/cold", &format!("00-{trace}-b7ad6b7169203331-01"));
    assert!(head.contains("server-timing: queue;dur=") && head.contains("load;dur="), "{head}");
    let (root, phases) = next(&spans);
    assert_eq!((&root["name"], &root["traceId"]), (&"function cold".into(), &trace.into()));
    assert_eq!(root["parentSpanId"], "b7ad6b7169203331");
    let names: Vec<&str> = phases.iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert!(names.starts_with(&["queue", "load"]) && names.ends_with(&["run"]), "{names:?}");
    assert!(phases.iter().all(|span| span["traceId"] == trace && span["parentSpanId"] == root["spanId"]));
    assert_eq!(phases[1]["attributes"][0]["value"]["stringValue"], "cold start");
    assert_eq!(phases.iter().map(took).sum::<u64>(), took(&root), "{phases:?}");
    assert!(took(&phases[1]) > 0);
    let run = &phases[phases.len() - 1];
    let wait = spans.recv_timeout(PATIENCE).unwrap();
    assert_eq!((&wait["name"], &wait["parentSpanId"]), (&"token wait".into(), &run["spanId"]));
    let (waited, ran) = (took(&wait), took(run));
    println!(
        "{names:?}: {:?} ns, of which {waited} ns are a token wait",
        phases.iter().map(took).collect::<Vec<_>>()
    );
    assert!(0 < waited && waited <= ran, "{waited} of {ran}");

    // The function's place is below the host's span; a bad header begins another trace.
    let (_, said) = get(provider.address, "/function/cold/headers", "00-0-0-01");
    let (root, phases) = next(&spans);
    assert_ne!(root["traceId"], trace);
    assert_eq!(root["parentSpanId"], "");
    let run = &phases[phases.len() - 1];
    let place = format!("00-{}-{}-01", root["traceId"].as_str().unwrap(), run["spanId"].as_str().unwrap());
    assert_eq!(said["traceparent"], place.as_str(), "{said}");
}

/// One measured point, to avoid a measurement here.
const POINTS: &str = r#"{"points":[{"sm_basis_points":2500,"quota_basis_points":2000,"batch":1,"throughput_milli_rps":20000,
    "p50_ns":13000000,"p95_ns":28000000}]}"#;

#[test]
fn a_request_that_wakes_a_function_from_parked_or_from_zero_shows_the_load_and_its_phases_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let points = dir.path().join("points.json");
    std::fs::write(&points, POINTS).unwrap();
    let (collector, spans) = collector();
    let url = format!("http://{collector}");
    let provider =
        Provider::start(&dir.path().join("state"), &["--sim=v100", "--set", &format!("host.otlp={url}")]);
    // Two of them do not fit the 16 GiB: each function parks the other.
    let wishes = format!(
        r#","annotations":{{"gshare/slo":"60s","fastgshare/gpu_mem":"9GiB","gshare/profile":"{}"}}"#,
        points.display()
    );
    provider.deploy("first", &wishes);
    provider.deploy("second", &wishes);
    // The way of the load that a request waited for, if it waited for one; its phases are looked at.
    let load = |name: &str| {
        let (head, _) = get(provider.address, &format!("/function/{name}"), "");
        let (root, phases) = next(&spans);
        assert_eq!(root["name"], format!("function {name}"));
        assert_eq!(phases.iter().map(took).sum::<u64>(), took(&root), "to the ns: {phases:?}");
        for (one, following) in phases.iter().zip(&phases[1..]) {
            assert_eq!(one["endTimeUnixNano"], following["startTimeUnixNano"], "no gap: {phases:?}");
        }
        let told =
            head.split("load;dur=").nth(1).map(|rest| rest.split([',', '\r']).next().unwrap().to_owned());
        let span = phases.iter().find(|span| span["name"] == "load");
        // The header and the span agree, in ms and in ns.
        assert_eq!(told.is_some(), span.is_some(), "{head}{phases:?}");
        span.map(|span| {
            let us = (told.unwrap().parse::<f64>().unwrap() * 1e3).round();
            #[expect(clippy::cast_precision_loss, reason = "some milliseconds in ns")]
            let said = took(span) as f64 / 1e3;
            assert!(took(span) > 0 && (us - said).abs() <= 1.0, "{us} us is not {said} us");
            span["attributes"][0]["value"]["stringValue"].as_str().unwrap().to_owned()
        })
    };
    assert_eq!(load("first").as_deref(), Some("cold start"));
    assert_eq!(load("first"), None, "it was ready before the request came");
    assert_eq!(load("second").as_deref(), Some("cold start"));
    assert_eq!(load("first").as_deref(), Some("return from parked"));
    let scaled = provider.call("POST", "/system/scale-function/first", r#"{"replicas":0}"#);
    assert_eq!(scaled.0, 202, "{}", scaled.1);
    crate::common::within(|| {
        provider.call("GET", "/system/function/first", "").1.contains("\"instances\":[]")
    });
    assert_eq!(load("first").as_deref(), Some("cold start"), "from zero");
}
