//! Names in images of device code: the kernels and the global variables of a binary or a text.
//!
//! # Forms
//!
//! | form | begins with | read by |
//! |---|---|---|
//! | wrapper of a fat binary (in the program's data; points to containers) | `0x466243b1` | [`raw`] |
//! | container of a fat binary: entries by kind, architecture and compression | `0xba55ed50` | [`container`] |
//! | cubin: an ELF file | `\x7fELF` | [`cubin`] |
//! | PTX text | white space, `/` or `.` | [`ptx`] |
//!
//! An image is outside input: every size and offset is checked against the declared size of its container, and a misfit is an
//! [`ImageError`]. Only a look-up of a name reads an image, and only its entries for the device; the names are kept, the decompressed bytes
//! are not.
//!
//! # Sources
//!
//! The forms of wrapper, container and entry are public in ZLUDA's `dark_api` and `cuda_types` and were confirmed on the fat binaries of
//! cuBLAS 12.9, cuDNN 9.26 and cuFFT 12. ELF is a standard; [`cubin`] tells its kernel symbols from the others.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::call_trace;

pub(crate) mod container;
mod cubin;
mod ptx;
pub(crate) mod raw;
#[cfg(test)]
mod tests;

/// Most decompressed bytes of one entry. The largest seen is below 200 MB.
const MOST_BYTES: u64 = 1 << 30;

/// Why an image cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ImageError {
    /// A structure of `size` bytes at `at`, from its container's start, reaches beyond the container's `end`.
    #[error("{what} at {at} needs {size} bytes, but its container ends at {end}")]
    Truncated { what: &'static str, at: u64, size: u64, end: u64 },
    /// A field has an unknown value.
    #[error("{field} is {value:#x}, which is not known")]
    Unknown { field: &'static str, value: u64 },
    /// An entry declares more bytes than the limit for decompression.
    #[error("an entry declares {declared} bytes; at most {MOST_BYTES} are decompressed")]
    TooLarge { declared: u64 },
    /// An entry's LZ4 or zstd data do not decompress to its declared size.
    #[error("{method} data do not decompress to the {declared} bytes declared: {reason}")]
    Compressed { method: &'static str, declared: u64, reason: String },
    /// A cubin is not a readable ELF file.
    #[error("not a readable ELF file: {0}")]
    Elf(String),
}

/// Bounds of a kernel's code on its launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Most threads of a block.
    pub(crate) threads: u32,
    /// Shared memory of every block, in bytes.
    pub(crate) shared: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self { threads: 1024, shared: 0 }
    }
}

impl Shape {
    /// The bounds with a limit of threads by dimension, as the code declares it.
    fn limit(&mut self, by_dimension: impl IntoIterator<Item = u32>) {
        let threads = by_dimension.into_iter().fold(1, u32::saturating_mul);
        self.threads = threads.clamp(1, 1024);
    }
}

/// Names in one cubin or PTX text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    /// Names of the kernels, with the bounds on their launches.
    pub(crate) kernels: BTreeMap<String, Shape>,
    /// Global and constant variables with their sizes in bytes.
    pub(crate) globals: BTreeMap<String, u64>,
}

/// The kind of an entry's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ptx,
    Cubin,
    /// Code for a compiler missing in the simulator, such as the input of link-time optimisation.
    Other(u16),
}

/// How an entry's bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    Plain,
    Lz4,
    Zstd,
}

/// A cubin or a PTX text, perhaps compressed.
#[derive(Clone, Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) kind: Kind,
    pub(crate) stored: Stored,
    /// Ten times the major plus the minor compute capability of the target; 0 for any.
    pub(crate) architecture: u32,
    pub(crate) bytes: Cow<'a, [u8]>,
    /// Size in bytes once decompressed.
    pub(crate) declared: u64,
}

impl Entry<'_> {
    /// The same with bytes of its own.
    fn into_owned(self) -> Entry<'static> {
        Entry { bytes: Cow::Owned(self.bytes.into_owned()), ..self }
    }

    /// The names in the entry.
    fn names(&self) -> Result<Names, ImageError> {
        let bytes = container::content(self)?;
        match self.kind {
            Kind::Ptx => Ok(ptx::names(&String::from_utf8_lossy(&bytes))),
            Kind::Cubin => cubin::names(&bytes),
            Kind::Other(kind) => Err(ImageError::Unknown { field: "kind of an entry", value: kind.into() }),
        }
    }
}

/// A part of an image, read when its names are first asked for.
struct Part {
    entry: Entry<'static>,
    names: OnceLock<Option<Names>>,
}

impl Part {
    /// The part's names, or `None` if it cannot be read; the reason is traced once.
    fn names(&self) -> Option<&Names> {
        let read = || self.entry.names().inspect_err(|error| call_trace::image(error)).ok();
        self.names.get_or_init(read).as_ref()
    }
}

/// The result of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found<T> {
    Yes(T),
    No,
    /// An unreadable part of the image may hold the name.
    Unknown,
}

/// The code of a module or library: an image's entries for one device.
pub(crate) struct Image {
    parts: Vec<Part>,
    /// Part of the image has an unknown form.
    opaque: bool,
}

impl Image {
    pub(crate) fn new(entries: Vec<Entry<'static>>, opaque: bool) -> Self {
        let parts = entries.into_iter().map(|entry| Part { entry, names: OnceLock::new() }).collect();
        Self { parts, opaque }
    }

    /// Whether no code in the image can run on the device.
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty() && !self.opaque
    }

    fn find<T>(&self, pick: impl Fn(&Names) -> Option<T>) -> Found<T> {
        let opaque = || self.opaque || self.parts.iter().any(|part| part.names().is_none());
        match self.parts.iter().filter_map(Part::names).find_map(pick) {
            Some(found) => Found::Yes(found),
            None if opaque() => Found::Unknown,
            None => Found::No,
        }
    }

    pub(crate) fn kernel(&self, name: &str) -> Found<Shape> {
        self.find(|names| names.kernels.get(name).copied())
    }

    /// Looks up a global variable: its size in bytes.
    pub(crate) fn global(&self, name: &str) -> Found<u64> {
        self.find(|names| names.globals.get(name).copied())
    }

    /// Every kernel, or `None` if part of the image cannot be read.
    pub(crate) fn kernels(&self) -> Option<Vec<&str>> {
        let mut all = Vec::new();
        for part in &self.parts {
            all.extend(part.names()?.kernels.keys().map(String::as_str));
        }
        (!self.opaque).then_some(all)
    }
}

/// The entries for a device of an architecture: the closest cubins able to run on it, else the newest PTX which it can compile, and all
/// entries for any device. A cubin runs on devices of its major version with at least its minor version.
pub(crate) fn chosen<'a>(entries: &[Entry<'a>], architecture: u32) -> Vec<Entry<'a>> {
    let runs = |entry: &&Entry<'_>| {
        entry.architecture != 0
            && entry.architecture <= architecture
            && (entry.kind == Kind::Ptx || entry.architecture / 10 == architecture / 10)
    };
    let is_cubin = |entry: &&Entry<'_>| entry.kind == Kind::Cubin;
    let able = || entries.iter().filter(runs);
    let best_cubin = able().filter(is_cubin).map(|entry| entry.architecture).max();
    let best = best_cubin.or_else(|| able().filter(|e| !is_cubin(e)).map(|entry| entry.architecture).max());
    entries
        .iter()
        .filter(|entry| {
            entry.architecture == 0
                || (Some(entry.architecture) == best && is_cubin(entry) == best_cubin.is_some())
        })
        .cloned()
        .collect()
}
