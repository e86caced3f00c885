//! Writing to standard output, or nowhere once its reader is gone.
//!
//! The standard macros panic when a pipe is closed, as in `gshare lab engine token --schema | head`. Letting `SIGPIPE` end the
//! process is no cure. A command also writes to sockets and to its children, which may go away at any time, and it stops its
//! children and services on its way out. So output without a reader is dropped, and the command ends as usual.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// [`std::println`] without a panic when no process reads.
macro_rules! println {
    ($($text:tt)*) => { $crate::commands::out::print(format_args!("{}\n", format_args!($($text)*))) };
}

/// [`std::print`] without a panic when no process reads.
macro_rules! print {
    ($($text:tt)*) => { $crate::commands::out::print(format_args!($($text)*)) };
}

/// Writes all bytes at once. Gives false when no process reads, for commands with nothing left to do then.
///
/// # Errors
/// Any other failure to write.
pub(crate) fn write(to: &mut impl Write, bytes: &[u8]) -> std::io::Result<bool> {
    match to.write_all(bytes).and_then(|()| to.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true),
    }
}

/// Rows of cells as lines, with each column as wide as its widest cell: the first column begins at the left, the others end at the
/// right.
pub(crate) fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Prints on standard output.
///
/// # Panics
/// At any other failure to write, as the standard macros do.
pub(crate) fn print(text: Arguments<'_>) {
    match std::io::stdout().lock().write_fmt(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => panic!("standard output: {error}"),
        _ => {}
    }
}
