//! The cost of tracing for a request: `Server-Timing`, which each answer has, and the export of spans.
//!
//! An empty function is called through two hosts, one of them with `host.otlp` and a collector on loopback which accepts everything. Rounds of
//! both alternate, so the machine's other work meets both. Every answer has the header, so the header is timed by itself. Figures are times
//! in us; there is no threshold. `cargo bench -p gshare-openfaas`; with `--test` each runs a few times.

#[path = "../tests/common/mod.rs"]
mod common;

use axum::http::{HeaderMap, HeaderValue};
use common::Provider;
use gshare_core::Timestamp;
use gshare_openfaas::traces::{Load, Times};
use std::hint::black_box;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// A collector which answers each message, and drops its bytes.
fn collector() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok).map(BufReader::new) {
            let _ = take(&mut stream);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
            let _ = stream.get_mut().write_all(answer);
        }
    });
    address
}

/// Reads a head and the body after it; the head, in lower case.
fn take(stream: &mut BufReader<TcpStream>) -> std::io::Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    let head = head.to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    std::io::copy(&mut stream.take(length.unwrap_or(0)), &mut std::io::sink())?;
    Ok(head)
}

/// A host with a function that does nothing, and a connection to it.
struct Subject {
    name: &'static str,
    stream: BufReader<TcpStream>,
    times: Vec<Duration>,
    _provider: Provider,
    _dir: tempfile::TempDir,
}

impl Subject {
    fn start(name: &'static str, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let arguments: Vec<&str> = std::iter::once("--sim=v100").chain(more.iter().copied()).collect();
        let provider = Provider::start(dir.path(), &arguments);
        provider.deploy("plain", r#","envVars":{"KERNELS":"0"},"annotations":{"gshare/profile":"none"}"#);
        provider.replicas("plain", 1);
        let stream = TcpStream::connect(provider.address).expect("the host listens");
        stream.set_nodelay(true).expect("a TCP socket");
        Self { name, stream: BufReader::new(stream), times: Vec::new(), _provider: provider, _dir: dir }
    }

    fn ask(&mut self, count: usize) {
        for _ in 0..count {
            let began = Instant::now();
            let request =
                b"POST /function/plain/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nimage";
            self.stream.get_mut().write_all(request).expect("the host reads");
            let head = take(&mut self.stream).expect("an answer");
            self.times.push(began.elapsed());
            assert!(head.starts_with("http/1.1 200") && head.contains("server-timing: queue;dur="), "{head}");
        }
    }

    fn line(&mut self) -> String {
        self.times.sort_unstable();
        let at = |percent: usize| self.times[(self.times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
        format!("{:<34}{:>9.1}{:>9.1}{:>9.1}", self.name, at(50), at(95), at(99))
    }
}

/// The header of one answer, as the host makes it.
fn server_timing(rounds: u32) -> f64 {
    let at = Timestamp::from_millis;
    let load = Load { from: at(12), until: at(900), parked: false };
    let times = Times { arrived: at(10), load: Some(load), reached: Some(at(901)) };
    let began = Instant::now();
    for _ in 0..rounds {
        let mut headers = HeaderMap::new();
        let text = black_box(&times).server_timing(black_box(at(950)));
        headers.append("server-timing", HeaderValue::from_str(&text).expect("a header's characters"));
        black_box(headers);
    }
    began.elapsed().as_secs_f64() * 1e6 / f64::from(rounds)
}

fn main() {
    let (rounds, each, headers) =
        if std::env::args().any(|argument| argument == "--test") { (2, 5, 100) } else { (40, 250, 200_000) };
    let url = format!("http://{}", collector());
    let mut subjects = [
        Subject::start("host", &[]),
        Subject::start("host, spans exported", &["--set", &format!("host.otlp={url}")]),
    ];
    for subject in &mut subjects {
        subject.ask(each);
        subject.times.clear();
    }
    for _ in 0..rounds {
        for subject in &mut subjects {
            subject.ask(each);
        }
    }
    println!("{:<34}{:>9}{:>9}{:>9}", "us for a request", "p50", "p95", "p99");
    for subject in &mut subjects {
        println!("{}", subject.line());
    }
    println!(
        "{:<34}{:>9.2}  (mean; in both lines above)",
        "Server-Timing of an answer",
        server_timing(headers)
    );
}
