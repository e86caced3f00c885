//! Cubins: ELF files for a device.
//!
//! A kernel is a function symbol with the bit `STO_CUDA_ENTRY` (16) in `st_other`; other function symbols are device functions. A global or
//! constant variable is an object symbol in a section `.nv.global*` or `.nv.constant*`; objects in other sections, such as shared memory,
//! have no address outside of a kernel.
//!
//! A kernel's own shared memory is the section `.nv.shared.NAME`. Its section `.nv.info.NAME` is a list of attributes, as `cuobjdump -elf`
//! prints them: a byte for the form, one for the attribute, and two for a value or, in form 4, for the size of the value behind them.
//! `EIATTR_MAX_THREADS` (5) holds the most threads by dimension, three integers.

use object::LittleEndian;
use object::elf::{EM_CUDA, FileHeader64, SHT_NOBITS, SHT_SYMTAB, STT_FUNC, STT_OBJECT};
use object::read::elf::{FileHeader, SectionHeader, Sym};

use super::{ImageError, Names};

type Header = FileHeader64<LittleEndian>;
const LE: LittleEndian = LittleEndian;
const STO_CUDA_ENTRY: u8 = 16;

/// Size in bytes of an ELF file's header.
pub(crate) const HEADER: usize = 64;

fn refuse(error: impl std::fmt::Display) -> ImageError {
    ImageError::Elf(error.to_string())
}

fn header(bytes: &[u8]) -> Result<&Header, ImageError> {
    let header = Header::parse(bytes).map_err(refuse)?;
    match header.e_machine(LE) {
        EM_CUDA => Ok(header),
        other => Err(ImageError::Unknown { field: "machine of an ELF file", value: other.into() }),
    }
}

/// The declared end of the table of sections: [`size`] needs all bytes before it.
pub(crate) fn table_end(bytes: &[u8; HEADER]) -> Result<u64, ImageError> {
    let header = header(bytes)?;
    let size = u64::from(header.e_shnum(LE)) * u64::from(header.e_shentsize(LE));
    Ok(header.e_shoff(LE).saturating_add(size).max(HEADER as u64))
}

/// Size in bytes of a file; `bytes` reach to the end of its table of sections.
pub(crate) fn size(bytes: &[u8]) -> Result<u64, ImageError> {
    let sections = header(bytes)?.section_headers(LE, bytes).map_err(refuse)?;
    let ends = sections.iter().filter(|section| section.sh_type(LE) != SHT_NOBITS);
    let ends = ends.map(|section| section.sh_offset(LE).saturating_add(section.sh_size(LE)));
    Ok(ends.max().unwrap_or(0).max(bytes.len() as u64))
}

/// The names in a cubin.
pub(super) fn names(bytes: &[u8]) -> Result<Names, ImageError> {
    let sections = header(bytes)?.sections(LE, bytes).map_err(refuse)?;
    let symbols = sections.symbols(LE, bytes, SHT_SYMTAB).map_err(refuse)?;
    let mut names = Names::default();
    for symbol in symbols.iter() {
        let kind = symbol.st_type();
        let is_kernel = kind == STT_FUNC && symbol.st_other() & STO_CUDA_ENTRY != 0;
        if !is_kernel && kind != STT_OBJECT {
            continue;
        }
        let name = symbol.name(LE, symbols.strings()).map_err(refuse)?;
        let name = String::from_utf8_lossy(name).into_owned();
        if is_kernel {
            names.kernels.entry(name).or_default();
        } else if let Ok(section) = sections.section(object::SectionIndex(symbol.st_shndx(LE).into())) {
            let of = sections.section_name(LE, section).map_err(refuse)?;
            if of.starts_with(b".nv.global") || of.starts_with(b".nv.constant") {
                names.globals.insert(name, symbol.st_size(LE));
            }
        }
    }
    for section in sections.iter() {
        let of = String::from_utf8_lossy(sections.section_name(LE, section).map_err(refuse)?);
        if let Some(shape) = of.strip_prefix(".nv.shared.").and_then(|name| names.kernels.get_mut(name)) {
            shape.shared = u32::try_from(section.sh_size(LE)).unwrap_or(u32::MAX);
        } else if let Some(shape) = of.strip_prefix(".nv.info.").and_then(|name| names.kernels.get_mut(name))
        {
            let attributes = section.data(LE, bytes).map_err(refuse)?;
            if let Some(threads) = most_threads(attributes) {
                shape.limit(threads);
            }
        }
    }
    Ok(names)
}

/// Most threads by dimension in a list of attributes; `None` if the attribute is missing or cut short.
fn most_threads(mut list: &[u8]) -> Option<[u32; 3]> {
    const SIZED: u8 = 4;
    const MAX_THREADS: u8 = 5;
    while let [form, attribute, low, high, rest @ ..] = list {
        let size = if *form == SIZED { usize::from(u16::from_le_bytes([*low, *high])) } else { 0 };
        let value = rest.get(..size)?;
        if (*form, *attribute) == (SIZED, MAX_THREADS) {
            let words =
                value.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            return <[u32; 3]>::try_from(words.collect::<Vec<_>>()).ok();
        }
        list = rest.get(size..)?;
    }
    None
}
