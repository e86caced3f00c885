//! Lines on stderr.

use std::io::Write as _;

/// Writes one line to stderr, if it is open: a closed stderr must not become a panic.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "gshare: {line}");
}
