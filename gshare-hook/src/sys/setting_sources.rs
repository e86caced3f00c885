//! The sources of settings: the file `share.env` beside the library, which no program clears, or else the environment.
#![allow(unsafe_code)] // random numbers of the kernel

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::OnceLock;

use gshare_core::RunId;

use crate::sys::config::{self, Config};
use crate::sys::driver;

/// The name of the file beside the library.
const FILE: &str = "share.env";

/// The facts of the file system at the time the library is loaded, since the program may have another root later.
struct AtLoad {
    /// The text of the file.
    text: String,
    /// The root, if a daemon's socket was there.
    root: Option<(u64, u64)>,
}

/// Looks at the file system for what the program's first launch needs to know.
pub(crate) fn look_at_load() {
    at_load();
}

fn at_load() -> &'static AtLoad {
    static FOUND: OnceLock<AtLoad> = OnceLock::new();
    FOUND.get_or_init(|| {
        let own = driver::library_of(variable as *const core::ffi::c_void).unwrap_or_default();
        let file = Path::new(OsStr::from_bytes(&own)).with_file_name(FILE);
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let socket = config::socket(value(&text, "GSHARE_SOCKET"));
        let root = if is_there(&socket) { root() } else { None };
        AtLoad { text, root }
    })
}

/// Device and inode of the process's root.
fn root() -> Option<(u64, u64)> {
    std::fs::metadata("/").ok().map(|root| (root.dev(), root.ino()))
}

fn is_there(socket: &OsStr) -> bool {
    std::fs::metadata(socket).is_ok()
}

/// Whether a daemon's socket was there when the library was loaded, and the program's new root hides it.
pub(crate) fn root_hides_daemon(config: &Config) -> bool {
    let before = at_load().root;
    before.is_some() && !is_there(&config.socket) && root() != before
}

fn value(text: &str, key: &str) -> Option<OsString> {
    config::line(text, key).map(OsString::from).or_else(|| std::env::var_os(key))
}

/// The value of a variable, from the file or else from the environment.
pub(crate) fn variable(key: &str) -> Option<OsString> {
    value(&at_load().text, key)
}

/// The settings, as they are now.
pub(crate) fn read() -> Config {
    Config::read(variable)
}

/// Whether the process must wait for an absent daemon.
pub(crate) fn names_a_daemon(config: &Config) -> bool {
    config.name.is_some() || variable("GSHARE_SOCKET").is_some()
}

/// Whether a limit is asked for, by the settings or by the presence of a daemon.
pub(crate) fn ask_for_a_limit(config: &Config) -> bool {
    config.limited || names_a_daemon(config) || is_there(&config.socket) || root_hides_daemon(config)
}

/// The limit `GSHARE_MEM`, read once, for questions before any device is in use.
pub(crate) fn memory_limit() -> Option<u64> {
    static LIMIT: OnceLock<Option<u64>> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let config = read();
        config.spec.memory().filter(|_| !config.disabled).map(|bytes| bytes.0)
    })
}

/// A number that no other process can compute. Where the kernel gives no random numbers it is [`RunId::NONE`], and the daemon goes
/// by the process.
pub(crate) fn own_run() -> RunId {
    let mut bits = [0; 16];
    // SAFETY: a buffer with its length.
    let filled = unsafe { libc::getrandom(bits.as_mut_ptr().cast(), bits.len(), 0) };
    if filled == 16 { RunId::new(u128::from_ne_bytes(bits)) } else { RunId::NONE }
}
