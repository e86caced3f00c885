//! Filling an arena, and hashing what is in it.
//!
//! The data is cut into pieces of 1 MiB. Each thread reads a piece into a buffer that stays in its core's cache, hashes it
//! there, and writes it to the arena; so a byte crosses the memory bus as often as in a plain copy. Writing to a memory file
//! rather than to a map of it spares the kernel from clearing each page first.
//!
//! Files come from clients, so they are read, never mapped: a file that is cut short while it is read gives an error, where a
//! map would kill the store.

use crate::backend::ArenaMemory;
use crate::content::{self, PIECE};
use crate::manifest::Layout;
use crate::safetensors::{Header, HeaderError, header_length};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Why a file is not loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Its header is refused.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// It is no plain file.
    #[error("not a regular file")]
    NotAFile,
    /// It is too large for any arena.
    #[error("the model is too large")]
    TooLarge,
    /// It cannot be read, or the arena cannot be written.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// A file whose header was checked.
#[derive(Debug)]
pub struct Source {
    file: File,
    data_begin: u64,
    /// Where its tensors go.
    pub layout: Arc<Layout>,
}

/// Where the bytes of a load come from.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Origin {
    /// A file.
    File(Arc<Source>),
    /// An arena of another tier.
    Arena {
        /// What is in it.
        layout: Arc<Layout>,
        /// Its memory.
        memory: Arc<dyn ArenaMemory>,
    },
}

impl Origin {
    /// Where the tensors go.
    pub fn layout(&self) -> &Arc<Layout> {
        match self {
            Self::File(source) => &source.layout,
            Self::Arena { layout, .. } => layout,
        }
    }

    /// The file that the bytes are in, and where each tensor begins in it; `None` where they are in no file.
    #[cfg(feature = "cuda")]
    pub(crate) fn descriptor(&self) -> Option<(Arc<rustix::fd::OwnedFd>, Vec<u64>)> {
        let file = match self {
            Self::File(source) => Arc::new(source.file.try_clone().ok()?.into()),
            Self::Arena { memory, .. } => memory.export()?.1?,
        };
        let begin = |place: &crate::manifest::Place| match self {
            Self::File(source) => source.data_begin + place.source,
            Self::Arena { .. } => place.offset,
        };
        Some((file, self.layout().places.iter().map(begin).collect()))
    }

    /// Reads bytes of a tensor, the `place`-th by name.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn read(&self, place: usize, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(source) => {
                let begin = source.data_begin + source.layout.places[place].source;
                source.file.read_exact_at(out, begin + offset)
            }
            Self::Arena { layout, memory } => memory.read_at(layout.places[place].offset + offset, out),
        }
    }
}

impl Source {
    /// Reads and checks the header.
    ///
    /// # Errors
    /// What is wrong with the file or its header.
    pub fn open(file: File) -> Result<Self, LoadError> {
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(LoadError::NotAFile);
        }
        let bytes = about.len();
        let mut first = [0; 8];
        if bytes < 8 {
            return Err(HeaderError::TooShort { bytes }.into());
        }
        file.read_exact_at(&mut first, 0)?;
        let length = header_length(first, bytes)?;
        let header = read_header(&file, length, 8, bytes - 8 - length)?;
        let layout = Layout::new(&header).ok_or(LoadError::TooLarge)?;
        Ok(Self { file, data_begin: header.data_begin, layout: Arc::new(layout) })
    }
}

/// Reads `length` bytes of JSON at `offset` and checks them for a model with `data` bytes.
fn read_header(file: &File, length: u64, offset: u64, data: u64) -> Result<Header, LoadError> {
    // At most MAX_HEADER and the length of the file: both were checked.
    let mut json = vec![0; usize::try_from(length).map_err(|_| LoadError::TooLarge)?];
    file.read_exact_at(&mut json, offset)?;
    Ok(Header::parse(&json, data)?)
}

/// The layout of a model that is to be written, from a file that holds its header's JSON alone.
///
/// # Errors
/// As [`Source::open`].
pub fn layout_of_header(file: &File, length: u64) -> Result<Layout, LoadError> {
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(LoadError::NotAFile);
    }
    let limit = crate::safetensors::MAX_HEADER.min(about.len());
    if length > limit {
        return Err(HeaderError::BadLength { bytes: length, limit }.into());
    }
    let mut json = vec![0; usize::try_from(length).map_err(|_| LoadError::TooLarge)?];
    file.read_exact_at(&mut json, 0)?;
    let header = Header::parse_unsized(&json)?;
    Layout::new(&header).ok_or(LoadError::TooLarge)
}

/// Fills the arena; the hashes of the tensors in the order of their names. `progress` is told how many bytes are there,
/// from several threads.
///
/// # Errors
/// The first error of reading or writing.
pub fn fill(
    origin: &Origin,
    arena: &dyn ArenaMemory,
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> io::Result<Vec<[u8; 32]>> {
    let layout = origin.layout();
    if let Origin::File(source) = origin {
        // Only advice: what it says is no reason not to load.
        let _ = rustix::fs::fadvise(&source.file, 0, None, rustix::fs::Advice::Sequential);
    }
    let read = |place: usize, offset: u64, out: &mut [u8]| {
        origin.read(place, offset, out)?;
        arena.write_at(layout.places[place].offset + offset, out)
    };
    pieces(layout, threads, progress, &read)
}

/// The hashes of what the arena holds, in the order of the names.
///
/// # Errors
/// When it cannot be read.
pub fn hash(
    layout: &Layout,
    arena: &dyn ArenaMemory,
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> io::Result<Vec<[u8; 32]>> {
    let read =
        |place: usize, offset: u64, out: &mut [u8]| arena.read_at(layout.places[place].offset + offset, out);
    pieces(layout, threads, progress, &read)
}

/// Position of the tensor, first byte of the piece, its hash.
type Hashed = (usize, u64, [u8; 32]);
pub(crate) type Read<'a> = dyn Fn(usize, u64, &mut [u8]) -> io::Result<()> + Sync + 'a;

pub(crate) fn pieces(
    layout: &Layout,
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
    read: &Read<'_>,
) -> io::Result<Vec<[u8; 32]>> {
    let mut work: Vec<(usize, u64)> = Vec::new();
    let mut order: Vec<usize> = (0..layout.places.len()).collect();
    // As the data lies, so that a disk reads ahead.
    order.sort_by_key(|&place| layout.places[place].source);
    for place in order {
        let offsets =
            (0..layout.places[place].bytes.max(1)).step_by(usize::try_from(PIECE).unwrap_or(1 << 20));
        work.extend(offsets.map(|offset| (place, offset)));
    }
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let found: Mutex<io::Result<Vec<Hashed>>> = Mutex::new(Ok(Vec::with_capacity(work.len())));
    let run = || {
        let mut buffer = vec![0; usize::try_from(PIECE).unwrap_or(1 << 20)];
        let mut mine = Vec::new();
        let result = loop {
            let Some(&(place, offset)) = work.get(next.fetch_add(1, Ordering::Relaxed)) else { break Ok(()) };
            let whole = layout.places[place].bytes;
            let bytes = (whole - offset).min(PIECE);
            let part = &mut buffer[..usize::try_from(bytes).unwrap_or(0)];
            if let Err(error) = read(place, offset, part) {
                // The others stop at their next piece.
                next.store(work.len(), Ordering::Relaxed);
                break Err(error);
            }
            mine.push((place, offset, content::piece(offset, part, whole)));
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes);
        };
        let mut found = found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match (result, found.as_mut()) {
            (Ok(()), Ok(all)) => all.extend(mine),
            (Err(error), Ok(_)) => *found = Err(error),
            (_, Err(_)) => {}
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, work.len().max(1)) {
            scope.spawn(run);
        }
        run();
    });
    let mut found = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)?;
    found.sort_unstable_by_key(|&(place, offset, _)| (place, offset));
    let mut hashes = Vec::with_capacity(layout.places.len());
    for group in found.chunk_by(|a, b| a.0 == b.0) {
        let pieces: Vec<[u8; 32]> = group.iter().map(|&(_, _, hash)| hash).collect();
        hashes.push(content::merge(&pieces, layout.places[group[0].0].bytes));
    }
    Ok(hashes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{HostBackend, ModelBackend as _};
    use crate::manifest::Manifest;
    use crate::safetensors::Dtype;
    use std::io::Write as _;

    #[test]
    fn what_is_in_the_file_is_in_the_arena_with_the_plain_hash_of_each_tensor() {
        let shapes: [(&str, u64); 4] = [("big", 3_333_333), ("empty", 0), ("one", 1), ("mib", 1 << 20)];
        let listed: Vec<(&str, Dtype, [u64; 1])> = shapes.iter().map(|&(n, b)| (n, Dtype::U8, [b])).collect();
        let listed: Vec<(&str, Dtype, &[u64])> = listed.iter().map(|(n, d, s)| (*n, *d, &s[..])).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&Header::encode(&listed)).unwrap();
        let data: Vec<Vec<u8>> =
            shapes.iter().map(|&(n, b)| (0..b).map(|at| (at >> 3) as u8 ^ n.len() as u8).collect()).collect();
        data.iter().for_each(|data| file.write_all(data).unwrap());
        let source = Arc::new(Source::open(file.try_clone().unwrap()).unwrap());
        let origin = Origin::File(source.clone());
        for threads in [1, 3] {
            let arena = HostBackend.create(source.layout.arena_bytes).unwrap();
            let hashes = fill(&origin, &*arena, threads, &|_| {}).unwrap();
            assert_eq!(hash(&source.layout, &*arena, threads, &|_| {}).unwrap(), hashes);
            let (manifest, _) = source.layout.manifest(&hashes);
            let manifest = Manifest::parse(&manifest).unwrap();
            for ((name, _), data) in shapes.iter().zip(&data) {
                let entry = manifest.tensor(name).unwrap();
                assert_eq!(entry.hash, *blake3::hash(data).as_bytes(), "{name}");
                let mut out = vec![0; data.len()];
                arena.read_at(entry.offset, &mut out).unwrap();
                assert_eq!(out, *data, "{name}");
            }
        }
        // Cut short after its header was read: an error, not a crash.
        file.set_len(1_000_000).unwrap();
        let arena = HostBackend.create(source.layout.arena_bytes).unwrap();
        assert!(fill(&origin, &*arena, 2, &|_| {}).is_err());
        assert!(matches!(Source::open(file), Err(LoadError::Header(HeaderError::WrongSize { .. }))));
    }
}
