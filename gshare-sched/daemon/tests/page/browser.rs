//! The page in a headless Chromium, with a script beside it that watches the page (`audit.js`).

use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// Distributions' names of the browser.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// The browser; without one the test says so and ends.
pub(crate) fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let all = std::env::split_paths(&path).flat_map(|dir| BROWSERS.map(|name| dir.join(name)));
    let found = all.into_iter().find(|file| file.is_file());
    if found.is_none() {
        println!("skipped: no chromium");
    }
    found
}

/// The window of a browser.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) width: u32,
    pub(crate) dark: bool,
}

/// A wide and a narrow window, light and dark.
pub(crate) const WINDOWS: [Window; 4] = [
    Window { width: 1280, dark: false },
    Window { width: 1280, dark: true },
    Window { width: 400, dark: false },
    Window { width: 400, dark: true },
];

/// What the script saw in some seconds.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct Seen {
    errors: Vec<String>,
    drawing_ms: Vec<f64>,
    /// Changed nodes, from each drawing to the next.
    changes: Vec<f64>,
    contrast: Vec<String>,
    labels: Vec<String>,
    spill: Vec<String>,
    width: u32,
    dark: bool,
    pub(crate) html: String,
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// A running browser, with its processes.
struct Browser(Child);

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Looks at the page of a program for some seconds. `answers` replace the program's own by their path.
pub(crate) fn look(
    browser: &PathBuf,
    program: SocketAddr,
    answers: &[(&str, Value)],
    window: Window,
) -> Seen {
    let (report, reports) = channel();
    let address = between(program, answers, report);
    let profile = tempfile::tempdir().unwrap();
    // The browser's own window is never narrower than 500 pixels, so the page is in a frame.
    let child = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!window.dark)))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(["--window-size=1400,900", "--remote-debugging-port=0"])
        .arg(format!("http://{address}/frame?{}", window.width))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let child = Browser(child);
    let mut seen: Seen = reports.recv_timeout(Duration::from_secs(120)).expect("a report of the page");
    drop(child);
    seen.html = seen.html.replace("&nbsp;", " ");
    assert_eq!((seen.width, seen.dark), (window.width, window.dark));
    assert!(seen.errors.is_empty(), "{window:?}: errors: {:?}", seen.errors);
    assert!(seen.contrast.is_empty(), "{window:?}: below 4.5 to 1 (WCAG AA): {:#?}", seen.contrast);
    assert!(seen.labels.is_empty(), "{window:?}: without a label: {:#?}", seen.labels);
    assert!(seen.spill.is_empty(), "{window:?}: spills: {:#?}", seen.spill);
    assert!(seen.html.contains(r#"role="alert" hidden="""#), "the program answers");
    // The first drawings make all nodes; later drawings change nodes in sight, and of these the ones with new data.
    let nodes = seen.html.matches("</").count();
    let changes = median(seen.changes.get(2..).expect("some drawings in six seconds"));
    println!(
        "{window:?}: {} drawings, {changes} changes of {nodes} nodes in {:.1} ms",
        seen.drawing_ms.len(),
        median(&seen.drawing_ms)
    );
    assert!(changes < nodes as f64 / 4.0, "{window:?}: {nodes} nodes, {:?}", seen.changes);
    seen
}

/// A server between the browser and the program.
fn between(program: SocketAddr, answers: &[(&str, Value)], report: Sender<Seen>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let answers: Vec<(String, String)> =
        answers.iter().map(|(path, value)| ((*path).to_owned(), value.to_string())).collect();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, answers, report) = (stream.unwrap(), answers.clone(), report.clone());
            // A browser opens connections ahead of time.
            std::thread::spawn(move || serve(stream, program, &answers, &report));
        }
    });
    address
}

fn serve(mut stream: TcpStream, program: SocketAddr, answers: &[(String, String)], report: &Sender<Seen>) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if !matches!(stream.read(&mut byte), Ok(1)) {
            return;
        }
        request.push(byte[0]);
    }
    let head = String::from_utf8(request).unwrap();
    let target = head.split(' ').nth(1).unwrap();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut policy = String::new();
    let (kind, body) = match path {
        "/frame" => {
            let style = format!("border:0;margin:0;width:{query}px;height:900px");
            ("text/html", format!("<!doctype html><iframe src=/ui style='{style}'></iframe>"))
        }
        "/ui" => {
            let page = pass(program, "GET /ui HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            let (head, page) = page.split_once("\r\n\r\n").unwrap();
            policy = head
                .lines()
                .find(|line| line.to_lowercase().starts_with("content-security"))
                .unwrap()
                .to_owned();
            // The frame is the test's.
            policy = format!("{}\r\n", policy.replace("frame-ancestors 'none'; ", ""));
            ("text/html", format!("{page}<script>{}</script>", include_str!("audit.js")))
        }
        "/audit" => {
            let length = head.to_lowercase().split("content-length: ").nth(1).map(|rest| rest.to_owned());
            let length = length.unwrap().split("\r\n").next().unwrap().parse().unwrap();
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            // The test may have ended.
            let _ = report.send(serde_json::from_slice(&body).unwrap());
            ("text/plain", String::new())
        }
        _ => match answers.iter().find(|(known, _)| known == path) {
            // The page has these samples already.
            Some(_) if query.starts_with("after_ns=") && query != "after_ns=0" => {
                ("application/json", "[]".to_owned())
            }
            Some((_, answer)) => ("application/json", answer.clone()),
            None => {
                let head = head.replace("Connection: keep-alive", "Connection: close");
                // The browser may have closed the connection.
                let _ = stream.write_all(pass(program, &head).as_bytes());
                return;
            }
        },
    };
    let length = body.len();
    let head =
        format!("Content-Type: {kind}; charset=utf-8\r\nContent-Length: {length}\r\nConnection: close");
    let _ = write!(stream, "HTTP/1.1 200 OK\r\n{policy}{head}\r\n\r\n{body}");
}

/// The program's whole answer to a request.
fn pass(program: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(program).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
