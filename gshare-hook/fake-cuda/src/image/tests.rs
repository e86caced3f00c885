//! Images made by hand, and the effect of a cut or a change in them.

use std::ffi::c_void;

use proptest::prelude::*;

use super::raw::{Lifetime, image_at};
use super::*;

/// A symbol: name, `st_info` type, `st_other`, section number, size.
type Symbol = (&'static str, u8, u8, u16, u64);

const FUNC: u8 = 2;
const OBJECT: u8 = 1;
/// Sections of [`elf`] by number.
const TEXT: u16 = 1;
const GLOBAL: u16 = 2;
const CONSTANT: u16 = 3;
const SHARED: u16 = 4;

const SYMBOLS: [Symbol; 6] = [
    ("kernel", FUNC, 16, TEXT, 128),
    ("device_function", FUNC, 0, TEXT, 64),
    ("table", OBJECT, 0, GLOBAL, 4096),
    ("constants", OBJECT, 0, CONSTANT, 512),
    ("tile", OBJECT, 0, SHARED, 1024),
    ("undefined", OBJECT, 0, 0, 8),
];

/// A cubin with symbols: header, then names of sections, names of symbols, symbols, and the table of sections.
fn elf(symbols: &[Symbol]) -> Vec<u8> {
    // A value, and the most threads: 128 by 2 by 1.
    let info: &[u8] = &[3, 27, 255, 0, 4, 5, 12, 0, 128, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0];
    let sections: [&[u8]; 9] = [
        b"",
        b".text.kernel",
        b".nv.global",
        b".nv.constant3",
        b".nv.shared.kernel",
        b".shstrtab",
        b".strtab",
        b".symtab",
        b".nv.info.kernel",
    ];
    let mut section_names = Vec::new();
    let mut name_at = Vec::new();
    for name in sections {
        name_at.push(section_names.len() as u32);
        section_names.extend(name);
        section_names.push(0);
    }
    let mut strings = vec![0];
    let mut table = vec![0; 24];
    for (name, kind, other, section, size) in symbols {
        table.extend((strings.len() as u32).to_le_bytes());
        table.extend([(1 << 4) | kind, *other]);
        table.extend(section.to_le_bytes());
        table.extend(0_u64.to_le_bytes());
        table.extend(size.to_le_bytes());
        strings.extend(name.as_bytes());
        strings.push(0);
    }
    let names_at = 64;
    let strings_at = names_at + section_names.len();
    let symbols_at = strings_at + strings.len();
    let info_at = symbols_at + table.len();
    let sections_at = info_at + info.len();
    let mut out = b"\x7fELF\x02\x01\x01\x33\x07".to_vec();
    out.resize(16, 0);
    out.extend(2_u16.to_le_bytes());
    out.extend(190_u16.to_le_bytes());
    out.extend(1_u32.to_le_bytes());
    for at in [0, 0, sections_at as u64] {
        out.extend(at.to_le_bytes());
    }
    out.extend(80_u32.to_le_bytes());
    for field in [64_u16, 56, 0, 64, sections.len() as u16, 5] {
        out.extend(field.to_le_bytes());
    }
    out.extend(&section_names);
    out.extend(&strings);
    out.extend(&table);
    out.extend(info);
    for (i, name) in name_at.iter().enumerate() {
        let (kind, at, size, link, each): (u32, usize, usize, u32, u64) = match i {
            0 => (0, 0, 0, 0, 0),
            5 => (3, names_at, section_names.len(), 0, 0),
            6 => (3, strings_at, strings.len(), 0, 0),
            7 => (2, symbols_at, table.len(), 6, 24),
            8 => (1, info_at, info.len(), 0, 0),
            // Without bytes in the file.
            4 => (8, 0, 3072, 0, 0),
            _ => (8, 0, 1 << 40, 0, 0),
        };
        out.extend(name.to_le_bytes());
        out.extend(kind.to_le_bytes());
        for field in [0, 0, at as u64, size as u64] {
            out.extend(field.to_le_bytes());
        }
        out.extend(link.to_le_bytes());
        out.extend(0_u32.to_le_bytes());
        for field in [1, each] {
            out.extend(field.to_le_bytes());
        }
    }
    out
}

/// How a test stores an entry.
#[derive(Clone, Copy, Debug)]
enum How {
    Plain,
    Lz4,
    Zstd,
}

/// An entry of a container.
fn packed(kind: u16, architecture: u32, how: How, content: &[u8]) -> Vec<u8> {
    let (payload, flags) = match how {
        How::Plain => (content.to_vec(), 0x11),
        How::Lz4 => (lz4_flex::block::compress(content), 0x2011),
        How::Zstd => {
            let level = ruzstd::encoding::CompressionLevel::Fastest;
            (ruzstd::encoding::compress_to_vec(content, level), 0x8011)
        }
    };
    let padded = payload.len().next_multiple_of(8);
    let mut out = Vec::new();
    out.extend(kind.to_le_bytes());
    out.extend(0x101_u16.to_le_bytes());
    for field in [72, padded as u32, 0, payload.len() as u32, 0, 0, architecture, 0, 0] {
        out.extend(field.to_le_bytes());
    }
    out.extend(u64::to_le_bytes(flags));
    out.extend(0_u64.to_le_bytes());
    out.extend((content.len() as u64).to_le_bytes());
    out.resize(72, 0);
    out.extend(&payload);
    out.resize(72 + padded, 0);
    out
}

fn container(entries: &[Vec<u8>]) -> Vec<u8> {
    let body = entries.concat();
    let mut out = container::MAGIC.to_le_bytes().to_vec();
    out.extend([1, 0, 16, 0]);
    out.extend((body.len() as u64).to_le_bytes());
    out.extend(body);
    out
}

const PTX: &str = ".version 8.0\n.visible .entry from_text(\n)\n{ret;}\n.global .u64 counter;\n";

/// An image in memory, as a C program passes it. The bytes are leaked: a test's image is small.
fn image(bytes: Vec<u8>, architecture: u32) -> Image {
    let bytes: &'static [u8] = bytes.leak();
    // SAFETY: an image that is whole, and stays.
    unsafe { image_at(bytes.as_ptr().cast(), architecture, Lifetime::Kept) }.expect("an image begins there")
}

fn check_cubin(image: &Image) {
    assert_eq!(image.kernel("kernel"), Found::Yes(Shape { threads: 256, shared: 3072 }));
    assert_eq!(image.kernel("device_function"), Found::No);
    assert_eq!(image.kernel("table"), Found::No);
    assert_eq!(image.global("table"), Found::Yes(4096));
    assert_eq!(image.global("constants"), Found::Yes(512));
    for name in ["tile", "undefined", "kernel", "absent", ""] {
        assert_eq!(image.global(name), Found::No, "{name}");
    }
    assert_eq!(image.kernels(), Some(vec!["kernel"]));
}

#[test]
fn kernels_and_variables_of_a_cubin_are_told_from_its_other_symbols() {
    check_cubin(&image(elf(&SYMBOLS), 80));
}

#[test]
fn each_way_to_store_an_entry_gives_the_same_names() {
    for how in [How::Plain, How::Lz4, How::Zstd] {
        check_cubin(&image(container(&[packed(2, 80, how, &elf(&SYMBOLS))]), 80));
        let text = image(container(&[packed(1, 75, how, PTX.as_bytes())]), 80);
        assert_eq!(text.kernel("from_text"), Found::Yes(Shape::default()), "{how:?}");
        assert_eq!(text.global("counter"), Found::Yes(8), "{how:?}");
        assert_eq!(text.kernel("kernel"), Found::No, "{how:?}");
    }
}

#[test]
fn a_device_runs_the_closest_cubin_of_its_major_version_or_compiles_the_newest_text() {
    let named = |name: &'static str| elf(&[(name, FUNC, 16, TEXT, 1)]);
    let text = |name: &str| format!(".version 8.0\n.entry {name}() {{ret;}}\n");
    let all = container(&[
        packed(2, 75, How::Plain, &named("sm_75")),
        packed(2, 80, How::Lz4, &named("sm_80")),
        packed(2, 86, How::Zstd, &named("sm_86")),
        packed(1, 52, How::Plain, text("compute_52").as_bytes()),
        packed(1, 89, How::Plain, text("compute_89").as_bytes()),
        packed(8, 75, How::Plain, b"for another compiler"),
    ]);
    let expected = [
        (70, Some("compute_52")),
        (75, Some("sm_75")),
        (80, Some("sm_80")),
        (86, Some("sm_86")),
        (89, Some("sm_86")),
        (90, Some("compute_89")),
        (50, None),
    ];
    for (architecture, name) in expected {
        let image = image(all.clone(), architecture);
        assert_eq!(image.kernels(), Some(name.into_iter().collect()), "{architecture}");
        assert_eq!(image.is_empty(), name.is_none(), "{architecture}");
    }
}

#[test]
fn what_cannot_be_read_accepts_every_name_and_keeps_those_it_knows() {
    let broken = packed(2, 80, How::Plain, b"\x7fELF, but no more than that");
    let image_ = image(container(&[packed(2, 80, How::Plain, &elf(&SYMBOLS)), broken]), 80);
    assert_eq!(image_.kernel("kernel"), Found::Yes(Shape { threads: 256, shared: 3072 }));
    assert_eq!(image_.kernel("absent"), Found::Unknown);
    assert_eq!(image_.global("absent"), Found::Unknown);
    assert_eq!(image_.kernels(), None);
}

#[test]
fn a_wrapper_leads_to_its_container_or_to_several() {
    #[repr(C)]
    struct Wrapper {
        magic: u32,
        version: u32,
        container: *const u8,
        linked: *const *const u8,
    }
    let first = container(&[packed(2, 80, How::Zstd, &elf(&SYMBOLS))]);
    let second = container(&[packed(2, 80, How::Lz4, &elf(&[("second", FUNC, 16, TEXT, 1)]))]);
    let list = [first.as_ptr(), second.as_ptr(), std::ptr::null()];
    let read = |wrapper: &Wrapper| {
        let at: *const c_void = std::ptr::from_ref(wrapper).cast();
        // SAFETY: the wrapper and its containers outlive the image.
        unsafe { image_at(at, 80, Lifetime::Call) }.expect("a wrapper is an image")
    };
    let single =
        read(&Wrapper { magic: 0x4662_43b1, version: 1, container: first.as_ptr(), linked: list.as_ptr() });
    check_cubin(&single);
    let linked =
        read(&Wrapper { magic: 0x4662_43b1, version: 2, container: first.as_ptr(), linked: list.as_ptr() });
    assert_eq!(linked.kernels(), Some(vec!["kernel", "second"]));
    let newer =
        read(&Wrapper { magic: 0x4662_43b1, version: 3, container: first.as_ptr(), linked: list.as_ptr() });
    assert_eq!(newer.kernel("kernel"), Found::Unknown);
}

#[test]
fn an_image_that_goes_with_the_call_is_copied() {
    let mut bytes = container(&[packed(2, 80, How::Zstd, &elf(&SYMBOLS))]);
    // SAFETY: a whole image.
    let image = unsafe { image_at(bytes.as_ptr().cast(), 80, Lifetime::Call) }.unwrap();
    bytes.fill(0);
    check_cubin(&image);
}

#[test]
fn where_no_image_begins_none_is_made() {
    // SAFETY: a text that ends.
    assert!(unsafe { image_at(c"nothing of that kind".as_ptr().cast(), 80, Lifetime::Call) }.is_none());
}

#[test]
fn what_the_linker_gives_out_is_read_back() {
    let cubin = elf(&SYMBOLS);
    let made = container::of_inputs([(Kind::Cubin, cubin.as_slice()), (Kind::Ptx, PTX.as_bytes())]);
    let image = image(made, 90);
    assert_eq!(image.kernels(), Some(vec!["kernel", "from_text"]));
}

#[test]
fn more_than_declared_or_may_be_decompressed_is_refused() {
    let declare = |how: How, declared: u64| {
        let mut entry = packed(2, 80, how, &elf(&SYMBOLS));
        entry[56..64].copy_from_slice(&declared.to_le_bytes());
        let bytes = container(&[entry]);
        let entries = container::entries(&bytes).unwrap();
        container::content(&entries[0]).map(|content| content.len()).unwrap_err()
    };
    let true_size = elf(&SYMBOLS).len() as u64;
    for how in [How::Lz4, How::Zstd] {
        for declared in [0, 1, true_size - 1, true_size + 1, MOST_BYTES] {
            assert!(matches!(declare(how, declared), ImageError::Compressed { .. }), "{how:?} {declared}");
        }
        for declared in [MOST_BYTES + 1, u64::MAX] {
            assert_eq!(declare(how, declared), ImageError::TooLarge { declared });
        }
    }
}

/// A container with entries of every kind and compression.
fn everything() -> Vec<u8> {
    let mut entries = Vec::new();
    for how in [How::Plain, How::Lz4, How::Zstd] {
        entries.push(packed(2, 80, how, &elf(&SYMBOLS)));
        entries.push(packed(1, 80, how, PTX.as_bytes()));
    }
    container(&entries)
}

/// Reads everything readable; the test is the end of this, within the slice and without a panic.
fn read_all(bytes: &[u8]) {
    for entry in container::entries(bytes).into_iter().flatten() {
        if entry.declared < 1 << 20 {
            let _ = entry.names();
        }
    }
}

#[test]
fn a_cut_container_says_what_does_not_fit() {
    let whole = everything();
    assert_eq!(container::entries(&whole).unwrap().len(), 6);
    for end in 0..whole.len() {
        let error = container::entries(&whole[..end]).unwrap_err();
        assert!(matches!(error, ImageError::Truncated { .. }), "{end}: {error}");
    }
}

#[test]
fn a_cut_cubin_is_refused() {
    let whole = elf(&SYMBOLS);
    for end in 0..whole.len() {
        let refused = matches!(cubin::names(&whole[..end]), Err(ImageError::Elf(_)));
        assert!(refused, "{end}");
    }
}

proptest! {
    #[test]
    fn changed_containers_are_read_without_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = everything();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        read_all(&bytes);
    }

    #[test]
    fn changed_cubins_are_read_without_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = elf(&SYMBOLS);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = cubin::names(&bytes);
        let _ = cubin::size(&bytes);
    }

    #[test]
    fn arbitrary_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        read_all(&bytes);
        let _ = cubin::names(&bytes);
        let _ = container::entries(&bytes);
    }
}
