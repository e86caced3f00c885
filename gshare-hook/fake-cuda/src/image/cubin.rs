//! Cubins: ELF files for a device.
//!
//! A kernel is a function symbol whose `st_other` has the bit `STO_CUDA_ENTRY` (16); other function symbols are device
//! functions. A global or constant variable is an object symbol in a section `.nv.global*` or `.nv.constant*`; objects in
//! other sections, such as shared memory, have no address outside of a kernel.

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

/// Where the table of sections ends, as the header declares: so many bytes must be read for [`size`].
pub(crate) fn table_end(bytes: &[u8; HEADER]) -> Result<u64, ImageError> {
    let header = header(bytes)?;
    let size = u64::from(header.e_shnum(LE)) * u64::from(header.e_shentsize(LE));
    Ok(header.e_shoff(LE).saturating_add(size).max(HEADER as u64))
}

/// Size in bytes of the file that begins with `bytes`, which reach to the end of the table of sections.
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
            names.kernels.insert(name);
        } else if let Ok(section) = sections.section(object::SectionIndex(symbol.st_shndx(LE).into())) {
            let of = sections.section_name(LE, section).map_err(refuse)?;
            if of.starts_with(b".nv.global") || of.starts_with(b".nv.constant") {
                names.globals.insert(name, symbol.st_size(LE));
            }
        }
    }
    Ok(names)
}
