//! Containers of fat binaries, and the compression of their entries.
//!
//! A container is a header (magic, version, its own size, size of the entries) and a row of entries. An entry is a header of at least 64
//! bytes, with a declared size, and a payload. All numbers are little-endian.

use std::borrow::Cow;
use std::io::Read;

use super::{Entry, ImageError, Kind, MOST_BYTES, Stored};

pub(crate) const MAGIC: u32 = 0xba55_ed50;
const VERSION: u16 = 1;
/// Size in bytes of a container's header.
pub(crate) const HEADER: usize = 16;

const ENTRY_VERSION: u16 = 0x101;
const ENTRY_HEADER: usize = 64;
const KIND_PTX: u16 = 1;
const KIND_CUBIN: u16 = 2;
const FLAG_LZ4: u64 = 1 << 13;
const FLAG_ZSTD: u64 = 1 << 15;

/// Offsets of the fields in an entry's header.
mod at {
    pub(super) const KIND: usize = 0;
    pub(super) const VERSION: usize = 2;
    pub(super) const HEADER_SIZE: usize = 4;
    pub(super) const PAYLOAD_SIZE: usize = 8;
    pub(super) const COMPRESSED_SIZE: usize = 16;
    pub(super) const ARCHITECTURE: usize = 28;
    pub(super) const FLAGS: usize = 40;
    pub(super) const DECOMPRESSED_SIZE: usize = 56;
}

/// `size` bytes at `at`, or an error with the structure's name.
fn part<'a>(bytes: &'a [u8], at: usize, size: usize, what: &'static str) -> Result<&'a [u8], ImageError> {
    let truncated = ImageError::Truncated { what, at: at as u64, size: size as u64, end: bytes.len() as u64 };
    at.checked_add(size).and_then(|end| bytes.get(at..end)).ok_or(truncated)
}

/// A number of `N` bytes in a header of checked size.
fn number<const N: usize>(header: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    if let Some(field) = header.get(at..at + N) {
        value[..N].copy_from_slice(field);
    }
    u64::from_le_bytes(value)
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A field's value, if it is known.
fn known(field: &'static str, value: u64, is: impl FnOnce(u64) -> bool) -> Result<u64, ImageError> {
    if is(value) { Ok(value) } else { Err(ImageError::Unknown { field, value }) }
}

/// Size in bytes of the container behind `header`, header included.
pub(crate) fn size(header: &[u8]) -> Result<u64, ImageError> {
    known("magic number of a container", number::<4>(header, 0), |magic| magic == u64::from(MAGIC))?;
    known("version of a container", number::<2>(header, 4), |version| version == u64::from(VERSION))?;
    let size = number::<2>(header, 6);
    let header_size = known("header size of a container", size, |size| size >= HEADER as u64)?;
    Ok(header_size.saturating_add(number::<8>(header, 8)))
}

/// The entries of a container; bytes behind the container are ignored.
pub(crate) fn entries(bytes: &[u8]) -> Result<Vec<Entry<'_>>, ImageError> {
    let header = part(bytes, 0, HEADER, "a container's header")?;
    let all = part(bytes, 0, to_usize(size(header)?), "a container")?;
    let mut found = Vec::new();
    let mut next = to_usize(number::<2>(header, 6));
    while next < all.len() {
        let (entry, end) = entry(all, next)?;
        found.push(entry);
        next = end;
    }
    Ok(found)
}

/// The entry at `start`, and the start of the next.
fn entry(all: &[u8], start: usize) -> Result<(Entry<'_>, usize), ImageError> {
    let header = part(all, start, ENTRY_HEADER, "an entry's header")?;
    known("version of an entry", number::<2>(header, at::VERSION), |n| n == u64::from(ENTRY_VERSION))?;
    let header_size = number::<4>(header, at::HEADER_SIZE);
    let header_size = to_usize(known("header size of an entry", header_size, |n| n >= ENTRY_HEADER as u64)?);
    part(all, start, header_size, "an entry's header")?;
    let payload_start = start + header_size;
    let payload_size = to_usize(number::<4>(header, at::PAYLOAD_SIZE));
    let payload = part(all, payload_start, payload_size, "an entry's payload")?;
    let flags = number::<8>(header, at::FLAGS);
    let stored = match (flags & FLAG_LZ4 != 0, flags & FLAG_ZSTD != 0) {
        (_, true) => Stored::Zstd,
        (true, false) => Stored::Lz4,
        (false, false) => Stored::Plain,
    };
    let (bytes, declared) = if stored == Stored::Plain {
        (payload, payload.len() as u64)
    } else {
        let size = to_usize(number::<4>(header, at::COMPRESSED_SIZE));
        (part(payload, 0, size, "compressed data")?, number::<8>(header, at::DECOMPRESSED_SIZE))
    };
    let kind = match u16::try_from(number::<2>(header, at::KIND)).unwrap_or(u16::MAX) {
        KIND_PTX => Kind::Ptx,
        KIND_CUBIN => Kind::Cubin,
        other => Kind::Other(other),
    };
    let architecture = u32::try_from(number::<4>(header, at::ARCHITECTURE)).unwrap_or(u32::MAX);
    let entry = Entry { kind, stored, architecture, bytes: Cow::Borrowed(bytes), declared };
    Ok((entry, payload_start + payload_size))
}

/// An entry's bytes, decompressed.
pub(crate) fn content<'a>(entry: &'a Entry<'_>) -> Result<Cow<'a, [u8]>, ImageError> {
    let declared = entry.declared;
    if entry.stored != Stored::Plain && declared > MOST_BYTES {
        return Err(ImageError::TooLarge { declared });
    }
    let method = if entry.stored == Stored::Lz4 { "LZ4" } else { "zstd" };
    let refuse = |reason: String| ImageError::Compressed { method, declared, reason };
    let out = match entry.stored {
        Stored::Plain => return Ok(Cow::Borrowed(&entry.bytes)),
        Stored::Lz4 => lz4_flex::block::decompress(&entry.bytes, to_usize(declared))
            .map_err(|e| refuse(e.to_string()))?,
        Stored::Zstd => {
            let mut out = Vec::with_capacity(to_usize(declared));
            let decoder = ruzstd::decoding::StreamingDecoder::new(&entry.bytes[..]);
            let decoder = decoder.map_err(|e| refuse(e.to_string()))?;
            // One byte beyond the declared size reveals excess data.
            decoder.take(declared + 1).read_to_end(&mut out).map_err(|e| refuse(e.to_string()))?;
            out
        }
    };
    let other = || refuse(format!("there are {} bytes or more", out.len()));
    if out.len() as u64 == declared { Ok(Cow::Owned(out)) } else { Err(other()) }
}

/// A container with unchanged entries for any device: the output of the simulated linker.
pub(crate) fn of_inputs<'a>(inputs: impl IntoIterator<Item = (Kind, &'a [u8])>) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, bytes) in inputs {
        let kind = match kind {
            Kind::Ptx => KIND_PTX,
            Kind::Cubin => KIND_CUBIN,
            Kind::Other(kind) => kind,
        };
        let padded = bytes.len().next_multiple_of(8);
        let mut header = [0; ENTRY_HEADER];
        header[at::KIND..][..2].copy_from_slice(&kind.to_le_bytes());
        header[at::VERSION..][..2].copy_from_slice(&ENTRY_VERSION.to_le_bytes());
        header[at::HEADER_SIZE..][..4].copy_from_slice(&(ENTRY_HEADER as u32).to_le_bytes());
        header[at::PAYLOAD_SIZE..][..4].copy_from_slice(&(padded as u32).to_le_bytes());
        body.extend(header);
        body.extend(bytes);
        body.resize(body.len() + padded - bytes.len(), 0);
    }
    let (magic, version, header) =
        (MAGIC.to_le_bytes(), VERSION.to_le_bytes(), (HEADER as u16).to_le_bytes());
    [&magic[..], &version, &header, &(body.len() as u64).to_le_bytes(), &body].concat()
}
