//! Fills arenas and hashes their content.
//!
//! The data is cut into pieces of 1 MiB. Each thread reads a piece into a buffer that fits its core's cache, hashes it
//! there, and writes it to the arena. So a byte crosses the memory bus as often as in a plain copy. Writes to a memory
//! file, unlike writes through a map, spare the kernel from clearing each page first.
//!
//! Bytes in the page cache are copied from there. Other bytes are read past it (`O_DIRECT`), by more threads than CPUs: the
//! model is then in memory once, and the disk always has work. A probe per 16 MiB decides between the two. It asks for the
//! last byte (`RWF_NOWAIT`), since readahead often brings the first. If a file or its file system does not allow direct
//! reads, everything goes through the page cache.
//!
//! Files come from clients, so they are read, never mapped: a file that is truncated during the read gives an error, but
//! through a map it would kill the store.

use crate::backend::ArenaMemory;
use crate::bounds::Exceeded;
use crate::content::{self, PIECE};
use crate::manifest::Layout;
use crate::safetensors::{Header, HeaderError, header_length};
use memmap2::{Advice, MmapMut, MmapOptions};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Mode, OFlags};
use rustix::io::ReadWriteFlags;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

/// Why a file cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The header is invalid.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The path names no regular file.
    #[error("not a regular file")]
    NotAFile,
    /// The model is too large for any arena.
    #[error("the model is too large")]
    TooLarge,
    /// The client is at one of its bounds.
    #[error(transparent)]
    Bound(#[from] Exceeded),
    /// The file cannot be read, or the arena cannot be written.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// A file with a checked header.
#[derive(Debug)]
pub struct Source {
    file: File,
    data_begin: u64,
    /// Places of the tensors in the arena.
    pub layout: Arc<Layout>,
}

/// Source of the bytes of a load.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Origin {
    /// A file.
    File(Arc<Source>),
    /// An arena of another tier.
    Arena {
        /// Tensors of that arena and their places.
        layout: Arc<Layout>,
        /// Memory of that arena.
        memory: Arc<dyn ArenaMemory>,
    },
}

impl Origin {
    /// Places of the tensors in the new arena.
    pub fn layout(&self) -> &Arc<Layout> {
        match self {
            Self::File(source) => &source.layout,
            Self::Arena { layout, .. } => layout,
        }
    }

    /// The file with the bytes, and the begin of each tensor in it; `None` for a source without a file.
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
    /// If they cannot be read.
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
    /// The fault of the file or its header.
    pub fn open(file: File) -> Result<Self, LoadError> {
        Self::open_within(file, |_| Ok(())).map(|(source, ())| source)
    }

    /// As [`Self::open`], if `admit` allows the header's bytes before they are read.
    ///
    /// # Errors
    /// As [`Self::open`], and the errors of `admit`.
    pub fn open_within<T>(
        file: File,
        admit: impl FnOnce(u64) -> Result<T, LoadError>,
    ) -> Result<(Self, T), LoadError> {
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
        let admitted = admit(length)?;
        let header = read_header(&file, length, 8, bytes - 8 - length)?;
        let layout = Layout::new(&header).ok_or(LoadError::TooLarge)?;
        Ok((Self { file, data_begin: header.data_begin, layout: Arc::new(layout) }, admitted))
    }
}

impl AsRef<Layout> for Source {
    fn as_ref(&self) -> &Layout {
        &self.layout
    }
}

/// Reads `length` bytes of JSON at `offset` and checks them for a model with `data` bytes.
fn read_header(file: &File, length: u64, offset: u64, data: u64) -> Result<Header, LoadError> {
    // At most MAX_HEADER and the length of the file: both were checked.
    let mut json = vec![0; usize::try_from(length).map_err(|_| LoadError::TooLarge)?];
    file.read_exact_at(&mut json, offset)?;
    Ok(Header::parse(&json, data)?)
}

/// The layout of a model to be written, from a file with only the header's JSON, if `admit` allows its bytes.
///
/// # Errors
/// As [`Source::open_within`].
pub fn layout_of_header<T>(
    file: &File,
    length: u64,
    admit: impl FnOnce(u64) -> Result<T, LoadError>,
) -> Result<(Layout, T), LoadError> {
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(LoadError::NotAFile);
    }
    let limit = crate::safetensors::MAX_HEADER.min(about.len());
    if length > limit {
        return Err(HeaderError::BadLength { bytes: length, limit }.into());
    }
    let admitted = admit(length)?;
    let mut json = vec![0; usize::try_from(length).map_err(|_| LoadError::TooLarge)?];
    file.read_exact_at(&mut json, 0)?;
    let header = Header::parse_unsized(&json)?;
    Ok((Layout::new(&header).ok_or(LoadError::TooLarge)?, admitted))
}

/// Fills the arena, and returns the hashes of the tensors in the order of their names. Several threads report the number of
/// written bytes to `progress`.
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
    let reader = match origin {
        Origin::File(source) => Some(Reader::new(&source.file)),
        Origin::Arena { .. } => None,
    };
    let cold = reader.as_ref().is_some_and(|reader| !reader.cached(0));
    let threads = if cold { threads + threads.div_ceil(2) } else { threads };
    let turn = cold.then(Turn::default);
    let read = |place: usize, offset: u64, bytes: usize, buffer: &mut [u8]| {
        let begin = match (&reader, origin) {
            (Some(reader), Origin::File(source)) => {
                let from = source.data_begin + layout.places[place].source + offset;
                reader.read(from, bytes, buffer)?
            }
            _ => {
                origin.read(place, offset, &mut buffer[..bytes])?;
                0
            }
        };
        let _turn = turn.as_ref().and_then(Turn::take);
        arena.write_at(layout.places[place].offset + offset, &buffer[begin..begin + bytes])?;
        Ok(begin)
    };
    pieces(layout, threads, progress, &read)
}

/// Turns to write, for threads that read from a disk. An arena in host memory takes one writer at little cost and further
/// writers at twice that, so one thread waits for its turn while the others wait for the disk. More waiting threads would
/// leave CPUs idle on a large machine.
#[derive(Default)]
struct Turn {
    writing: Mutex<()>,
    waiting: Mutex<()>,
}

impl Turn {
    /// `None` for a thread that need not wait.
    fn take(&self) -> Option<MutexGuard<'_, ()>> {
        self.writing.try_lock().or_else(|| {
            let _waiting = self.waiting.try_lock()?;
            Some(self.writing.lock())
        })
    }
}

/// A huge page, large enough for a piece.
const LARGE_PAGE: usize = 2 << 20;
/// Alignment of direct reads, sufficient for every disk.
const BLOCK: usize = 4_096;
/// Bytes of a file that one probe of the page cache covers.
const STRETCH: u64 = 16 << 20;

/// A file, read by the faster of the two ways.
struct Reader<'a> {
    file: &'a File,
    past: Option<Past>,
}

/// Descriptors for direct reads and for probes.
struct Past {
    /// Without readahead, so that a probe does not bring more of the file into the page cache.
    probe: File,
    direct: File,
    bytes: u64,
    /// State by stretch: 0 unknown, 1 in the page cache, 2 not.
    stretches: Vec<AtomicU8>,
}

impl<'a> Reader<'a> {
    fn new(file: &'a File) -> Self {
        let past = Past::of(file).ok();
        if past.is_none() {
            // Only advice, so a failure does not stop the load.
            let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Sequential);
        }
        Self { file, past }
    }

    fn cached(&self, at: u64) -> bool {
        self.past.as_ref().is_none_or(|past| past.cached(at))
    }

    /// Reads `bytes` at `from` into `buffer`, and returns their position in it.
    fn read(&self, from: u64, bytes: usize, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(past) = self.past.as_ref().filter(|past| !past.cached(from))
            && let Ok(begin) = past_the_cache(&past.direct, from, bytes, buffer)
        {
            return Ok(begin);
        }
        self.file.read_exact_at(&mut buffer[..bytes], from)?;
        Ok(0)
    }
}

impl Past {
    /// The file is opened again, because a client's descriptor shares its flags with the client.
    fn of(file: &File) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let open = |flags| {
            rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC | flags, Mode::empty()).map(File::from)
        };
        let (probe, direct) = (open(OFlags::empty())?, open(OFlags::DIRECT)?);
        rustix::fs::fadvise(&probe, 0, None, rustix::fs::Advice::Random)?;
        let bytes = file.metadata()?.len();
        let stretches = (0..bytes.div_ceil(STRETCH)).map(|_| AtomicU8::new(0)).collect();
        Ok(Self { probe, direct, bytes, stretches })
    }

    fn cached(&self, at: u64) -> bool {
        let number = at / STRETCH;
        let stretch = usize::try_from(number).ok().and_then(|number| self.stretches.get(number));
        let Some(stretch) = stretch else { return true };
        match stretch.load(Ordering::Relaxed) {
            0 => {
                let last = self.bytes.min((number + 1) * STRETCH) - 1;
                let mut byte = [0];
                let parts = &mut [IoSliceMut::new(&mut byte)];
                let found = rustix::io::preadv2(&self.probe, parts, last, ReadWriteFlags::NOWAIT);
                let cached = found != Err(rustix::io::Errno::AGAIN);
                stretch.store(if cached { 1 } else { 2 }, Ordering::Relaxed);
                cached
            }
            known => known == 1,
        }
    }
}

/// Reads the blocks around the wanted bytes, and returns their position in the buffer.
fn past_the_cache(file: &File, from: u64, bytes: usize, buffer: &mut [u8]) -> io::Result<usize> {
    let block = BLOCK as u64;
    let before = usize::try_from(from % block).unwrap_or(0);
    let aligned = buffer.as_ptr().align_offset(LARGE_PAGE);
    let wanted = before + bytes;
    let part = buffer.get_mut(aligned..aligned.saturating_add(wanted.next_multiple_of(BLOCK)));
    let part = part.ok_or(io::ErrorKind::InvalidInput)?;
    let mut done = 0;
    while done < wanted {
        match file.read_at(&mut part[done..], from - from % block + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(aligned + before)
}

/// The hashes of the tensors in an arena, in the order of their names.
///
/// # Errors
/// If the arena cannot be read.
pub fn hash(
    layout: &Layout,
    arena: &dyn ArenaMemory,
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> io::Result<Vec<[u8; 32]>> {
    let read = |place: usize, offset: u64, bytes: usize, buffer: &mut [u8]| {
        arena.read_at(layout.places[place].offset + offset, &mut buffer[..bytes]).map(|()| 0)
    };
    pieces(layout, threads, progress, &read)
}

/// Position of a tensor, first byte of a piece, hash of the piece.
type Hashed = (usize, u64, [u8; 32]);
/// Reads bytes of a tensor from an offset into a buffer with room for them and two blocks. Returns their position in it.
pub(crate) type Read<'a> = dyn Fn(usize, u64, usize, &mut [u8]) -> io::Result<usize> + Sync + 'a;

/// A buffer for a piece and two blocks, in one huge page if possible: the disk then fills it with one request instead of
/// many.
fn buffer() -> io::Result<MmapMut> {
    let buffer = MmapOptions::new().len(2 * LARGE_PAGE).map_anon()?;
    let _ = buffer.advise(Advice::HugePage);
    Ok(buffer)
}

pub(crate) fn pieces(
    layout: &Layout,
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
    read: &Read<'_>,
) -> io::Result<Vec<[u8; 32]>> {
    let mut work: Vec<(usize, u64)> = Vec::new();
    let mut order: Vec<usize> = (0..layout.places.len()).collect();
    // In the order of the data, so that the disk can read ahead.
    order.sort_by_key(|&place| layout.places[place].source);
    for place in order {
        let offsets =
            (0..layout.places[place].bytes.max(1)).step_by(usize::try_from(PIECE).unwrap_or(1 << 20));
        work.extend(offsets.map(|offset| (place, offset)));
    }
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let found: Mutex<io::Result<Vec<Hashed>>> = Mutex::new(Ok(Vec::with_capacity(work.len())));
    let run = || {
        let mut buffer = match buffer() {
            Ok(buffer) => buffer,
            Err(error) => {
                next.store(work.len(), Ordering::Relaxed);
                *found.lock() = Err(error);
                return;
            }
        };
        let mut mine = Vec::new();
        let result = loop {
            let Some(&(place, offset)) = work.get(next.fetch_add(1, Ordering::Relaxed)) else { break Ok(()) };
            let whole = layout.places[place].bytes;
            let bytes = (whole - offset).min(PIECE);
            let length = usize::try_from(bytes).unwrap_or(0);
            let begin = match read(place, offset, length, &mut buffer) {
                Ok(begin) => begin,
                Err(error) => {
                    // The others stop at their next piece.
                    next.store(work.len(), Ordering::Relaxed);
                    break Err(error);
                }
            };
            mine.push((place, offset, content::piece(offset, &buffer[begin..begin + length], whole)));
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes);
        };
        let mut found = found.lock();
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
    let mut found = found.into_inner()?;
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
        for (threads, cold) in [(1, false), (3, true)] {
            if cold {
                file.sync_all().unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
            let arena = HostBackend.create(source.layout.arena_bytes).unwrap();
            let hashes = fill(&origin, &*arena, threads, &|_| {}).unwrap();
            assert_eq!(hash(&source.layout, &*arena, threads, &|_| {}).unwrap(), hashes);
            let (manifest, _) = source.layout.manifest(&hashes);
            let manifest = Manifest::open(&manifest).unwrap();
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
