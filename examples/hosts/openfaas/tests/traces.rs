//! Traces: a collector on loopback gets the spans of a slow request, and its function the request's place in the trace.

mod common;

use common::{PATIENCE, Provider};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};

/// A collector, and the spans that it gets.
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

/// The spans of the next request: the whole one, and those of its phases.
fn next(spans: &Receiver<Value>) -> (Value, Vec<Value>) {
    let next = || spans.recv_timeout(PATIENCE).expect("a span");
    let root = next();
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
    let provider = Provider::start(dir.path(), &["--sim=v100", "--otlp", &url]);
    // 120 ms of kernels, of which a window of 100 ms has room for 20.
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
