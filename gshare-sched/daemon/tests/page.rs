//! The page: it shows what `gshare status --json` says, in a headless Chromium where there is one; and it is for browsers of
//! this machine alone.

use crate::common::{Client, DEVICE_MEMORY, Local, attach_to, attached, spec};
use gshare_core::{Bytes, ClientId, DeviceUuid, Duration, ResourceSpec};
use gshared::Snapshot;
use gshared::config::MetricsAddress;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The names that distributions give the browser.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let all = std::env::split_paths(&path).flat_map(|dir| BROWSERS.map(|name| dir.join(name)));
    all.into_iter().find(|file| file.is_file())
}

/// A daemon with its endpoint on a free port.
fn daemon() -> (Local, SocketAddr) {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let daemon = Local::with(|config| {
        config.metrics = Some(MetricsAddress::Tcp(address));
        // No token is taken away while the browser looks.
        config.grace = Duration::from_secs(60);
    });
    (daemon, address)
}

fn get(address: SocketAddr, path: &str, headers: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\n{headers}\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_lowercase(), body.to_owned())
}

fn status(address: SocketAddr) -> Snapshot {
    serde_json::from_str(&get(address, "/status", "Host: localhost").1).unwrap()
}

/// Hands connections on to the daemon, and counts the questions for its status.
fn counted(daemon: SocketAddr) -> (SocketAddr, Arc<AtomicU32>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (address, count) = (listener.local_addr().unwrap(), Arc::new(AtomicU32::new(0)));
    let questions = Arc::clone(&count);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, questions) = (stream.unwrap(), Arc::clone(&questions));
            // A browser opens connections ahead of time.
            std::thread::spawn(move || {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    if !matches!(stream.read(&mut byte), Ok(1)) {
                        return;
                    }
                    request.push(byte[0]);
                }
                if request.starts_with(b"GET /status ") {
                    questions.fetch_add(1, Ordering::Relaxed);
                }
                let mut daemon = TcpStream::connect(daemon).unwrap();
                daemon.write_all(&request).unwrap();
                let _ = std::io::copy(&mut daemon, &mut stream);
            });
        }
    });
    (address, count)
}

/// The page's document after five seconds of the browser's own clock, which stands still while an answer is awaited.
fn render(browser: &Path, address: SocketAddr, width: u32, dark: bool) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--window-size={width},900"))
        .args(["--virtual-time-budget=5000", "--dump-dom", &format!("http://{address}/ui")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Compares the page with a snapshot of clients that do not run.
fn shows(page: &str, said: &Snapshot) {
    let sum =
        format!("{} GPUs, {} processes, {} clients", said.devices.len(), said.processes, said.clients.len());
    assert!(page.contains(&sum), "{sum} in {page}");
    assert!(page.contains("id=\"gone\" role=\"alert\" style=\"display: none;\""), "the daemon answers");
    for device in &said.devices {
        let caption = format!("GPU {}: {}", device.gpu.number(), device.uuid);
        assert!(page.contains(&caption), "{caption}");
    }
    let rows: Vec<&str> = page.split("<tr role=\"row\">").skip(1).collect();
    assert_eq!(rows.len(), said.clients.len());
    for client in &said.clients {
        let name = format!("<span>{}</span>", escaped(&client.name));
        let row = rows.iter().find(|row| row.contains(&name)).expect(&name);
        let asked = format!("{} to {}", percent(client.quota_request), percent(client.quota_limit));
        let token = match (client.holds_token, client.waiting_ns) {
            (true, _) => "▶ holds",
            (false, Some(_)) => "… waits ",
            (false, None) => "",
        };
        let why = escaped(client.why.as_ref().map_or("", |why| &why.text));
        for wanted in [asked.as_str(), token, &why, &format!("pid {}", client.pid)] {
            assert!(row.contains(wanted), "{wanted} in {row}");
        }
    }
    for decision in &said.decisions {
        assert!(
            page.contains(&escaped(&format!("{}: {}", decision.finding.name, decision.finding.text))),
            "{decision:?}"
        );
    }
}

#[test]
fn the_page_shows_what_the_status_says() {
    let (daemon, address) = daemon();
    let path = daemon.socket();
    let (mut holder, first) = attached(&path, 1, "holder", spec("0.4:0.9", 60, Some(512)));
    let (mut waiter, second) = attached(&path, 2, "<i>waiter</i>", spec("0.3:0.5", 50, Some(512)));
    let (_idle, _) = attached(&path, 3, "idle", ResourceSpec::UNLIMITED);
    holder.ask(first);
    holder.granted();
    waiter.ask(second);
    waiter.reserve(second, Bytes::from_gib(1), Bytes::ZERO).unwrap_err();
    let said = status(address);
    let names: Vec<&str> = said.clients.iter().map(|client| client.name.as_str()).collect();
    assert_eq!(names, ["holder", "<i>waiter</i>", "idle"]);
    let why = said.clients[1].why.as_ref().map(|why| why.text.as_str());
    let holder = "others hold tokens, and its SMs do not fit beside theirs: tokens are held by holder (60%), and it needs 50% of the SMs";
    assert_eq!(why, Some(holder));
    assert!(said.clients[0].why.is_none() && said.clients[2].why.is_none());
    assert_eq!(said.decisions.len(), 1);
    assert_eq!(
        said.decisions[0].finding.text,
        "the memory limit of its instance leaves less: 1 GiB asked, 512 MiB free, 0 B of 512 MiB are held; \
         for good: the instance has no more than 512 MiB"
    );
    let Some(browser) = browser() else {
        println!("skipped: no chromium");
        return;
    };
    for (width, dark) in [(1280, false), (1280, true), (400, false), (400, true)] {
        let (counting, questions) = counted(address);
        let page = render(&browser, counting, width, dark);
        shows(&page, &status(address));
        let questions = questions.load(Ordering::Relaxed);
        assert!(questions >= 5, "{questions} questions in 5 s: what is shown is older than a second");
    }
}

#[test]
fn a_page_of_five_hundred_clients_on_sixty_four_devices_is_whole() {
    let Some(browser) = browser() else {
        println!("skipped: no chromium");
        return;
    };
    let (daemon, address) = daemon();
    let mut clients: Vec<(Client, ClientId)> = Vec::new();
    for n in 0..500u16 {
        let mut client = Client::connect(&daemon.socket());
        client.enter(n.into(), &format!("client-{n}"), spec("0.1:0.5", 50, Some(64)));
        let [high, low] = (n % 64).to_be_bytes();
        let device = DeviceUuid::gpu([high, low, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        client.send(&attach_to(0, device, DEVICE_MEMORY, Bytes::ZERO));
        let id = client.until(|message| match message {
            gshare_core::wire::ToClient::Attached { client, .. } => Some(*client),
            _ => None,
        });
        client.ask(id);
        clients.push((client, id));
    }
    let said = status(address);
    assert_eq!((said.devices.len(), said.clients.len()), (64, 500));
    let page = render(&browser, address, 1280, false);
    assert_eq!(page.matches("<figure>").count(), 64);
    assert_eq!(page.matches("<tr role=\"row\">").count(), 500);
    assert!(page.contains(": tokens are held by client-"), "{page}");
}

#[test]
fn pages_of_other_sites_read_nothing() {
    let (_daemon, address) = daemon();
    let own = format!("Host: {address}");
    for (path, headers, wanted) in [
        ("/status", own.clone(), "200"),
        ("/status", format!("{own}\r\nOrigin: http://{address}\r\nSec-Fetch-Site: same-origin"), "200"),
        ("/status", "Host: evil.example:80".to_owned(), "403"),
        ("/status", format!("{own}\r\nOrigin: http://evil.example"), "403"),
        ("/status", format!("{own}\r\nSec-Fetch-Site: cross-site"), "403"),
        ("/", own.clone(), "307"),
        ("/elsewhere", own.clone(), "404"),
    ] {
        let (head, body) = get(address, path, &headers);
        assert!(head.starts_with(&format!("http/1.1 {wanted}")), "{path} with {headers}: {head}");
        assert!(wanted == "200" || !body.contains("epoch"), "{body}");
    }
    let (head, page) = get(address, "/ui", &own);
    assert!(head.contains("content-security-policy: default-src 'none';"), "{head}");
    assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    assert!(page.starts_with("<!doctype html>") && page.contains("</script>"));
}
