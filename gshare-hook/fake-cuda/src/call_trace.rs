//! Calls of programs to the simulated driver, one line per event: `GSHARE_TRACE`.
//!
//! | word | lines |
//! |---|---|
//! | `calls` | each driver and NVML call at its return: name, arguments that are numbers or names, result |
//! | `lookups` | each `cuGetProcAddress`: name, version, flags and the variant given; unknown and too new names are marked |
//! | `tables` | each `cuGetExportTable`: identifier and outcome; each call of a slot that a table does not fill; images that cannot be read |
//!
//! Words are separated by commas. Lines go to stderr, or to the end of the file in `GSHARE_TRACE_FILE` (`%p` is the process id):
//!
//! ```text
//! [4711.4713 52.048112] call cuMemAlloc_v2(dptr=0x7ffd10 -> 0x302000000, bytesize=1048576) = 0 CUDA_SUCCESS
//! [4711.4713 52.048190] lookup cuFoo version=12080 flags=0: UNKNOWN NAME
//! ```
//!
//! In brackets: process, thread, seconds of the monotonic clock. The loader answers `dlsym`, so such a look-up leaves no line
//! (`LD_DEBUG=symbols` shows it); the calls of the found function do.
//!
//! Each line is one `write(2)` of at most 4 KiB, without a lock, and a file is opened for each line: the trace continues in a child of
//! `fork` and in a program which closes all its files.
#![allow(unsafe_code)] // reads what programs pass to the driver

use std::ffi::{CStr, OsString, c_char, c_uint, c_void};
use std::fmt::{Display, Write as _};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::driver::CUresult;
use crate::driver::visible::uuid;
use crate::sim::device_file::now_ns;

const CALLS: u8 = 1;
const LOOKUPS: u8 = 2;
const TABLES: u8 = 4;
/// The environment has not been read.
const UNREAD: u8 = 0x80;
const WORDS: [(&str, u8); 3] = [("calls", CALLS), ("lookups", LOOKUPS), ("tables", TABLES)];
/// Words of the hook, which reads the same variable.
const OF_THE_HOOK: [&str; 4] = ["gate", "memory", "link", "none"];
/// Longest line, in bytes.
const LONGEST: usize = 4096;
/// Longest text argument shown, in characters.
const LONGEST_TEXT: usize = 200;

static ON: AtomicU8 = AtomicU8::new(UNREAD);

/// Whether calls may be traced: the one load paid by an untraced launch. The answer is yes until the environment has been read.
#[inline(always)]
pub(crate) fn calls() -> bool {
    ON.load(Relaxed) & (CALLS | UNREAD) != 0
}

/// Threads which arrive at the same time read the same environment.
#[cold]
fn read_environment() -> u8 {
    let text = std::env::var("GSHARE_TRACE").unwrap_or_default();
    let (on, unknown) = parse(&text);
    let first = ON.swap(on, Relaxed) == UNREAD;
    if first && !unknown.is_empty() {
        say(&format!("GSHARE_TRACE: {} unknown; known are {}", unknown.join(", "), known()));
    }
    if first
        && on != 0
        && let Some(Err(error)) = file()
    {
        say(&format!("GSHARE_TRACE_FILE: {error}; the trace goes to stderr"));
    }
    on
}

fn known() -> String {
    let words = WORDS.iter().map(|(word, _)| *word).chain(OF_THE_HOOK);
    words.collect::<Vec<_>>().join(", ")
}

/// The known words of the variable, and the unknown ones.
fn parse(text: &str) -> (u8, Vec<&str>) {
    let (mut on, mut unknown) = (0, Vec::new());
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        match WORDS.iter().find(|(name, _)| *name == word) {
            Some((_, bit)) => on |= bit,
            None if OF_THE_HOOK.contains(&word) => {}
            None => unknown.push(word),
        }
    }
    (on, unknown)
}

/// An argument of a driver call, as the generated export passes it after the call.
pub(crate) enum Value<'a> {
    Number(&'a dyn Display),
    Address(usize),
    Text(*const c_char),
    /// Memory written by the call, and the function which formats it.
    Out(*const c_void, unsafe fn(*const c_void) -> String),
    /// A structure, or a function.
    Other,
}

impl Value<'_> {
    /// # Safety
    /// A text ends with 0. If `ok`, the driver's interface let the successful call write the value through this pointer, or the pointer is
    /// null.
    unsafe fn show(&self, ok: bool, line: &mut String) -> std::fmt::Result {
        match *self {
            Self::Number(value) => write!(line, "{value}"),
            Self::Address(value) => write!(line, "{value:#x}"),
            Self::Other => write!(line, ".."),
            Self::Text(text) if text.is_null() => write!(line, "null"),
            Self::Text(text) => {
                // SAFETY: by this function's contract.
                let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
                let cut = text.char_indices().nth(LONGEST_TEXT).map_or(text.len(), |(at, _)| at);
                write!(line, "{:?}{}", &text[..cut], if cut < text.len() { ".." } else { "" })
            }
            Self::Out(at, _) if at.is_null() => write!(line, "null"),
            // SAFETY: by this function's contract.
            Self::Out(at, shown) if ok => write!(line, "{at:p} -> {}", unsafe { shown(at) }),
            Self::Out(at, _) => write!(line, "{at:p}"),
        }
    }
}

/// # Safety
/// A number of this type lies there.
pub(crate) unsafe fn number<T: Display>(at: *const c_void) -> String {
    // SAFETY: by this function's contract.
    unsafe { at.cast::<T>().read_unaligned() }.to_string()
}

/// # Safety
/// An address lies there.
pub(crate) unsafe fn address(at: *const c_void) -> String {
    // SAFETY: by this function's contract.
    format!("{:#x}", unsafe { at.cast::<usize>().read_unaligned() })
}

/// Traces a driver call at its return, and passes its result on.
///
/// # Safety
/// The arguments are those of the call, by the driver's interface; see [`Value::show`].
#[cold]
pub(crate) unsafe fn call(name: &str, result: c_uint, arguments: &[(&str, Value<'_>)]) {
    traced(CALLS, || {
        let mut line = format!("call {name}(");
        for (i, (name, value)) in arguments.iter().enumerate() {
            let _ = write!(line, "{}{name}=", if i > 0 { ", " } else { "" });
            // SAFETY: by this function's contract.
            let _ = unsafe { value.show(result == 0, &mut line) };
        }
        let error = CUresult(result).texts().map_or_else(Default::default, |texts| texts.0.to_string_lossy());
        let _ = write!(line, ") = {result} {error}");
        line
    });
}

/// Writes a line if lines of this kind are on.
fn traced(word: u8, line: impl FnOnce() -> String) {
    // A panic must not cross into C.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let on = match ON.load(Relaxed) {
            UNREAD => read_environment(),
            on => on,
        };
        if on & word != 0 {
            event(&line());
        }
    }));
}

/// Traces an NVML call at its return.
#[cold]
pub(crate) fn nvml_call(name: &str, result: c_uint) {
    traced(CALLS, || format!("call {name} = {result}"));
}

/// The answer of `cuGetProcAddress`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The variant found, and whether the simulator has a function for it.
    Variant(&'static str, bool),
    UnknownName,
    /// Every variant is newer than the requested release.
    TooNew,
    /// All variants are newer than the driver.
    TooNewForDriver,
}

pub(crate) fn lookup(name: &str, version: u32, flags: u64, found: Found) {
    traced(LOOKUPS, || {
        let outcome = match found {
            Found::Variant(variant, true) => variant.to_owned(),
            Found::Variant(variant, false) => format!("{variant} (NOT SIMULATED: answers 801)"),
            Found::UnknownName => "UNKNOWN NAME".to_owned(),
            Found::TooNew => "NEWER THAN ASKED FOR".to_owned(),
            Found::TooNewForDriver => "NEWER THAN THIS DRIVER".to_owned(),
        };
        format!("lookup {name} version={version} flags={flags}: {outcome}")
    });
}

/// Traces a `cuGetExportTable`; `name` is the table's, if known.
pub(crate) fn table(id: &[u8; 16], name: Option<&str>) {
    traced(TABLES, || format!("table {}: {}", uuid(id), name.unwrap_or("UNKNOWN TABLE")));
}

/// Traces a call of slot number `slot` (in pointers) without a function in its table.
#[cfg_attr(not(feature = "runtime-tables"), allow(dead_code))]
pub(crate) fn slot(table: &str, slot: usize) {
    traced(TABLES, || format!("table {table}: call of UNKNOWN SLOT {slot}"));
}

/// Traces an image with unreadable names.
pub(crate) fn image(error: &dyn Display) {
    traced(TABLES, || format!("image NOT READ, every name is accepted: {error}"));
}

/// The file to append to, if one is named.
fn file() -> Option<std::io::Result<File>> {
    static NAME: OnceLock<Option<OsString>> = OnceLock::new();
    let name = NAME.get_or_init(|| std::env::var_os("GSHARE_TRACE_FILE").filter(|name| !name.is_empty()));
    let path = with_pid(name.as_ref()?, std::process::id());
    Some(OpenOptions::new().append(true).create(true).mode(0o600).open(path))
}

fn with_pid(name: &OsString, pid: u32) -> OsString {
    let mut path = Vec::new();
    let mut rest = name.as_bytes();
    while let Some(at) = rest.windows(2).position(|pair| pair == b"%p") {
        path.extend_from_slice(&rest[..at]);
        path.extend_from_slice(pid.to_string().as_bytes());
        rest = &rest[at + 2..];
    }
    path.extend_from_slice(rest);
    OsString::from_vec(path)
}

fn event(text: &str) {
    let (pid, tid) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero());
    let now = now_ns();
    let mut line = format!("[{pid}.{tid} {}.{:06}] {text}", now / 1_000_000_000, now / 1_000 % 1_000_000);
    line = line.replace('\n', " ");
    let mut bytes = line.into_bytes();
    bytes.truncate(LONGEST - 1);
    bytes.push(b'\n');
    match file() {
        Some(Ok(mut file)) => drop(file.write(&bytes)),
        // The standard library's stderr has a lock; another thread may have held it at the time of a fork.
        None | Some(Err(_)) => drop(rustix::io::write(rustix::stdio::stderr(), &bytes)),
    }
}

fn say(text: &str) {
    let _ = rustix::io::write(
        rustix::stdio::stderr(),
        format!("gshare simulated CUDA driver: {text}\n").as_bytes(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_driver_and_of_the_hook_are_known() {
        assert_eq!(parse(""), (0, vec![]));
        assert_eq!(parse("calls, tables,gate"), (CALLS | TABLES, vec![]));
        assert_eq!(parse("lookup,lookups,,all"), (LOOKUPS, vec!["lookup", "all"]));
    }

    #[test]
    fn each_percent_p_of_a_file_name_is_the_process() {
        let with = |name: &str| with_pid(&OsString::from(name), 42);
        assert_eq!(with("/tmp/a.%p.b%p"), "/tmp/a.42.b42");
        assert_eq!(with("%%p%"), "%42%");
    }
}
