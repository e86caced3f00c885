//! The output of commands on standard output: nothing, once its reader is gone.
//!
//! The standard macros panic when a pipe is closed, as in `gshare engine token --schema | head`. To let `SIGPIPE` end the
//! process is no cure for a command that also writes to sockets and to its children, who may go away at any time, and
//! stops what it started on its way out. So output without a reader is dropped, and the command ends as it would have.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// [`std::println`] that is quiet when no process reads.
macro_rules! println {
    ($($text:tt)*) => { $crate::commands::out::print(format_args!("{}\n", format_args!($($text)*))) };
}

/// [`std::print`] that is quiet when no process reads.
macro_rules! print {
    ($($text:tt)*) => { $crate::commands::out::print(format_args!($($text)*)) };
}

/// Writes all of it at once; false when no process reads, for commands that then have nothing left to do.
///
/// # Errors
/// Another reason not to write.
pub(crate) fn write(to: &mut impl Write, bytes: &[u8]) -> std::io::Result<bool> {
    match to.write_all(bytes).and_then(|()| to.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true),
    }
}

/// Prints on standard output.
///
/// # Panics
/// When that fails for another reason than that no process reads, as the standard macros do.
pub(crate) fn print(text: Arguments<'_>) {
    match std::io::stdout().lock().write_fmt(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => panic!("standard output: {error}"),
        _ => {}
    }
}
