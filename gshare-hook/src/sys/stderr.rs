//! Lines on stderr.

use std::io::Write as _;

/// One line on stderr, if there is one: a closed stderr must not become a panic.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "gshare: {line}");
}
