//! The page: it shows what `gshare status --json` says, in a headless Chromium where there is one; and it is for browsers of
//! this machine alone.

mod browser;

use crate::common::{Client, DEVICE_MEMORY, Local, attach_to, attached, spec};
use browser::{WINDOWS, browser, look};
use gshare_core::{Bytes, ClientId, DeviceUuid, Duration, ResourceSpec};
use gshared::Snapshot;
use gshared::config::MetricsAddress;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

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

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Compares the page with a snapshot of clients that do not run.
fn shows(page: &str, said: &Snapshot) {
    let sum = format!("{} GPU · {} processes ·", said.devices.len(), said.processes);
    assert!(page.contains(&sum), "{sum} in {page}");
    for device in &said.devices {
        let caption = format!("GPU {}: {}", device.gpu.number(), device.uuid);
        assert!(page.contains(&caption), "{caption}");
    }
    let rows: Vec<&str> = page.split("<div role=\"row\">").skip(1).collect();
    assert_eq!(rows.len(), said.clients.len());
    for client in &said.clients {
        let name = format!("<b>{}</b>", escaped(&client.name));
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
    let Some(browser) = browser() else { return };
    for window in WINDOWS {
        shows(&look(&browser, address, &[], window).html, &status(address));
    }
}

#[test]
fn a_page_of_five_hundred_clients_on_sixty_four_devices_is_whole() {
    let Some(browser) = browser() else { return };
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
    let page = look(&browser, address, &[], WINDOWS[0]).html;
    assert_eq!(page.matches("<article>").count(), 64);
    assert_eq!(page.matches("<div role=\"row\">").count(), 500);
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
