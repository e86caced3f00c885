//! The page at `/ui`, and the common style and protection from other sites' pages for every page about a node.
//!
//! A page is one document and loads nothing from elsewhere. The host of functions has its own page with the same style and the
//! same small library.

use hyper::HeaderMap;
use hyper::header::{HOST, HeaderName, HeaderValue, ORIGIN};
use std::sync::LazyLock;

/// Content security policy of a page. The page reads from its own endpoint, and no other site may frame it or feed it scripts.
pub const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                          connect-src 'self'; frame-ancestors 'none'; base-uri 'none'";

/// A page with the common style in place of `/* style */`, and the common library in place of `/* library */`.
pub fn whole(page: &str) -> String {
    page.replacen("/* style */", include_str!("page/common.css"), 1).replacen(
        "/* library */",
        include_str!("page/common.js"),
        1,
    )
}

/// The daemon's page.
pub(crate) fn daemon() -> &'static str {
    static PAGE: LazyLock<String> = LazyLock::new(|| whole(include_str!("page/daemon.html")));
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
    fn a_page_has_its_style_and_its_library() {
        let page = daemon();
        assert!(!page.contains("/* style */") && !page.contains("/* library */"));
        assert!(
            page.contains(include_str!("page/common.css")) && page.contains(include_str!("page/common.js"))
        );
        // Each of these could load a part from elsewhere.
        for outside in ["http://", "https://", "src=", "@import", "innerHTML"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
