//! The page at `/ui` of the daemon and of the host of functions, and its protection from pages of other sites.
//!
//! The page is one document and loads nothing from elsewhere. It shows each part that the program's state has: functions,
//! pipelines and models for a host, GPUs and processes for both.

use hyper::HeaderMap;
use hyper::header::{HOST, HeaderName, HeaderValue, ORIGIN};
use std::sync::LazyLock;

/// Content security policy of a page. The page reads from its own endpoint, and no other site may frame it or feed it scripts.
pub const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                          connect-src 'self'; frame-ancestors 'none'; base-uri 'none'";

/// A program that serves the page, and the paths below its address from which the page reads.
#[derive(Debug, serde::Serialize)]
pub struct About {
    /// Name of the program.
    pub title: &'static str,
    /// The state at this moment: a [`Snapshot`](crate::Snapshot), or a host's functions and devices.
    pub state: &'static str,
    /// Samples of the last minutes, if the program keeps them. Without them the page keeps samples of its own while it is open.
    pub history: Option<&'static str>,
    /// Output of functions, if the program has functions.
    pub logs: Option<&'static str>,
}

/// The page of a program.
pub fn of(about: &About) -> String {
    // Plain paths and a name: their JSON has no `<`, and so no end of the script.
    let about = serde_json::to_string(about).unwrap_or_default();
    include_str!("page/page.html")
        .replacen("/* style */", include_str!("page/page.css"), 1)
        .replacen("/* script */", include_str!("page/page.js"), 1)
        .replacen("/* about */", &about, 1)
        .replacen("/* docs */", concat!(env!("CARGO_PKG_REPOSITORY"), "/tree/main/docs"), 1)
}

/// The daemon's page.
pub(crate) fn daemon() -> &'static str {
    static PAGE: LazyLock<String> =
        LazyLock::new(|| of(&About { title: "gshared", state: "/status", history: None, logs: None }));
    &PAGE
}

/// Accepts a request from a program or from this endpoint's own page.
///
/// A page of another site can send requests to a loopback address. The page cannot leave out `Origin` or `Sec-Fetch-Site`, and
/// its `Host` is always the name in its address. If this name leads to 127.0.0.1 (DNS rebinding), it is still no loopback name.
///
/// # Errors
/// The offending header and its value. On a `loopback` address, the `Host` must be a loopback name.
pub fn check(headers: &HeaderMap, loopback: bool) -> Result<(), String> {
    let text = |name: HeaderName| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or("?"));
    let host = text(HOST).unwrap_or_default();
    if loopback && !is_loopback(host) {
        return Err(format!("Host: `{host}` is no name of this machine's loopback address"));
    }
    if let Some(origin) = text(ORIGIN)
        && origin.split_once("://").map(|(_, rest)| rest) != Some(host)
    {
        return Err(format!("Origin: `{origin}` is not this host"));
    }
    let site = text(HeaderName::from_static("sec-fetch-site"));
    if site.is_some_and(|site| !["same-origin", "none"].contains(&site)) {
        return Err("Sec-Fetch-Site: the request is a page's of another site".to_owned());
    }
    Ok(())
}

fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_loads_nothing_from_elsewhere() {
        let page = daemon();
        for part in [include_str!("page/page.css"), r#"{"title":"gshared","state":"/status""#, "follow();"] {
            assert!(page.contains(part), "{part}");
        }
        for outside in ["/* ", "src=", "@import", "url(", "innerHTML"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
