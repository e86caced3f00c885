//! Images as C programs pass them: an address without a size.
//!
//! The image declares its extent: in a container's header, an ELF file's table of sections, or a text's final zero. The caller vouches for
//! those bytes, as it does to the driver.

use std::borrow::Cow;
use std::ffi::{CStr, c_void};

use super::container::{self, HEADER, MAGIC};
use super::{Entry, Image, ImageError, Kind, Stored, chosen, cubin};
use crate::call_trace;

const WRAPPER_MAGIC: u32 = 0x4662_43b1;
/// A wrapper with one container.
const WRAPPER_SINGLE: u32 = 1;
/// A wrapper with a list of linked containers; a null address ends the list.
const WRAPPER_LINKED: u32 = 2;

/// Name of the first bytes in an error.
const START: &str = "start of an image";

/// Most declared bytes of a file or container at an address.
const MOST_AT_ADDRESS: u64 = 1 << 32;

#[repr(C)]
struct Wrapper {
    magic: u32,
    version: u32,
    container: *const u8,
    linked: *const *const u8,
}

/// Whether the bytes at an address stay unchanged while the code is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// The bytes stay, and nothing is copied.
    Kept,
    /// The bytes may go when the call returns, so the entries for the device are copied.
    Call,
}

/// `size` bytes at an address.
///
/// # Safety
///
/// The bytes are readable, and stay unchanged while the result is in use.
unsafe fn slice(at: *const u8, size: u64, what: &'static str) -> Result<&'static [u8], ImageError> {
    if size > MOST_AT_ADDRESS {
        return Err(ImageError::Truncated { what, at: 0, size, end: MOST_AT_ADDRESS });
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(at, size as usize) })
}

unsafe fn container_at(at: *const u8) -> Result<&'static [u8], ImageError> {
    // SAFETY: a container has a header, and the size declared in it.
    unsafe {
        let header = at.cast::<[u8; HEADER]>().read_unaligned();
        slice(at, container::size(&header)?, "a container")
    }
}

unsafe fn cubin_at(at: *const u8) -> Result<&'static [u8], ImageError> {
    // SAFETY: an ELF file has a header, and its table and sections at the declared places.
    unsafe {
        let [_, _, _, _, class, order, ..] = at.cast::<[u8; 16]>().read_unaligned();
        if (class, order) != (2, 1) {
            return Err(ImageError::Elf("not of 64 bits and little-endian".to_owned()));
        }
        let header = at.cast::<[u8; cubin::HEADER]>().read_unaligned();
        let table = slice(at, cubin::table_end(&header)?, "a table of sections")?;
        slice(at, cubin::size(table)?, "an ELF file")
    }
}

unsafe fn wrapped_at(at: *const u8) -> Result<Vec<&'static [u8]>, ImageError> {
    // SAFETY: the magic number was seen, so a wrapper lies here, and its containers at the declared places.
    unsafe {
        let wrapper = at.cast::<Wrapper>().read_unaligned();
        match wrapper.version {
            WRAPPER_SINGLE => Ok(vec![container_at(wrapper.container)?]),
            WRAPPER_LINKED => {
                let mut all = Vec::new();
                let mut next = wrapper.linked;
                while !next.is_null() && !next.read_unaligned().is_null() {
                    all.push(container_at(next.read_unaligned())?);
                    next = next.add(1);
                }
                Ok(all)
            }
            other => Err(ImageError::Unknown { field: "version of a wrapper", value: other.into() }),
        }
    }
}

fn whole(kind: Kind, bytes: &'static [u8]) -> Entry<'static> {
    let declared = bytes.len() as u64;
    Entry { kind, stored: Stored::Plain, architecture: 0, bytes: Cow::Borrowed(bytes), declared }
}

/// The entries at an address for a device.
unsafe fn entries_at(at: *const u8, architecture: u32) -> Result<Vec<Entry<'static>>, ImageError> {
    // SAFETY: the caller's promise of an image here; each form has at least four bytes.
    unsafe {
        let start = at.cast::<[u8; 4]>().read_unaligned();
        let containers = match u32::from_le_bytes(start) {
            WRAPPER_MAGIC => wrapped_at(at)?,
            MAGIC => vec![container_at(at)?],
            _ if start == *b"\x7fELF" => return Ok(vec![whole(Kind::Cubin, cubin_at(at)?)]),
            _ if start[0].is_ascii_whitespace() || matches!(start[0], b'/' | b'.') => {
                return Ok(vec![whole(Kind::Ptx, CStr::from_ptr(at.cast()).to_bytes())]);
            }
            value => return Err(ImageError::Unknown { field: START, value: value.into() }),
        };
        let mut all = Vec::new();
        for container in containers {
            all.extend(chosen(&container::entries(container)?, architecture));
        }
        Ok(all)
    }
}

/// The image at an address, for a device of an architecture (ten times the major plus the minor compute capability). An image in a partly
/// known form holds unknown names; the reason is traced. `None` if no image begins there.
///
/// # Safety
///
/// `at` is the address of an image, readable to its declared end, during the call or as `lifetime` says.
pub(crate) unsafe fn image_at(at: *const c_void, architecture: u32, lifetime: Lifetime) -> Option<Image> {
    // SAFETY: the caller's promise.
    match unsafe { entries_at(at.cast(), architecture) } {
        Ok(entries) if lifetime == Lifetime::Kept => Some(Image::new(entries, false)),
        Ok(entries) => Some(Image::new(entries.into_iter().map(Entry::into_owned).collect(), false)),
        Err(error) => {
            call_trace::image(&error);
            let begins = !matches!(error, ImageError::Unknown { field: START, .. });
            begins.then(|| Image::new(Vec::new(), true))
        }
    }
}

/// The kind of a linker input. Kinds other than text and cubin stay unread.
pub(crate) fn input_kind(bytes: &[u8]) -> Kind {
    match bytes.first() {
        Some(first) if first.is_ascii_whitespace() || matches!(first, b'/' | b'.') => Kind::Ptx,
        _ if bytes.starts_with(b"\x7fELF") => Kind::Cubin,
        _ => Kind::Other(0),
    }
}
