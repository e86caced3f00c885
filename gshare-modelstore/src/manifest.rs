//! The manifest of a model: the places of its tensors in an arena.
//!
//! # Problem
//! A client needs names, types, shapes and offsets of hundreds of tensors, but the answer to a request should stay small.
//! So the store writes one manifest per arena into a sealed memory file, behind the arena or on its own. A client maps the
//! manifest and reads it in place.
//!
//! # Format
//! Little-endian. A head of 64 bytes, then one entry of 80 bytes per tensor in the order of the names, then the dimensions
//! (8 bytes each), then the names:
//!
//! ```text
//! head   0 "GSMF"  4 version u32  8 tensors u64  16 dimensions u64  24 arena bytes u64  32 root hash
//! entry  0 offset u64  8 bytes u64  16 first dimension u32  20 rank u8  21 dtype u8  22 0u16
//!        24 name begins u64  32 name bytes u32  36 0u32  40 hash  72 0u64
//! ```
//!
//! # Invariants
//! `Manifest::get` and `Manifest::tensor` give only entries with a place in the arena, a known type, a shape of their size and a name in
//! UTF-8; the names are sorted.
//!
//! # Cost
//! `open` checks only the head. A look-up is a binary search that checks each entry it reads. Neither copies.

use crate::content::Root;
use crate::safetensors::{Dtype, Header, MAX_NAME, MAX_RANK, MAX_TENSORS};
use crate::store::ContentHash;

/// Version of the format.
pub const VERSION: u32 = 1;
/// Alignment of tensors, suited to vector loads and GPU copies.
pub const TENSOR_ALIGNMENT: u64 = 256;
/// Arenas are multiples of this: a huge page, and the granularity of GPU memory.
pub const ARENA_ALIGNMENT: u64 = 2 << 20;

const HEAD: usize = 64;
const ENTRY: usize = 80;

/// A tensor's place in an arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// First byte in the arena.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// First byte in the data of its source file.
    pub source: u64,
}

/// The layout of a model, known before the load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Places of the tensors, by name.
    pub places: Vec<Place>,
    /// Bytes of the arena, a multiple of [`ARENA_ALIGNMENT`].
    pub arena_bytes: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
}

impl AsRef<Self> for Layout {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Layout {
    /// Tensors in the order of their data, each at the next aligned offset. `None` if an offset overflows.
    pub fn new(header: &Header) -> Option<Self> {
        let mut places = Vec::with_capacity(header.tensors.len());
        let mut end = 0u64;
        for tensor in &header.tensors {
            let offset = end.checked_next_multiple_of(TENSOR_ALIGNMENT)?;
            end = offset.checked_add(tensor.bytes)?;
            let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype, tensor.shape.clone());
            places.push(Place { name, dtype, shape, offset, bytes: tensor.bytes, source: tensor.begin });
        }
        places.sort_by(|a, b| a.name.cmp(&b.name));
        let arena_bytes = end.checked_next_multiple_of(ARENA_ALIGNMENT)?;
        Some(Self { places, arena_bytes, tensor_bytes: header.data_bytes })
    }

    /// Upper bound of the memory for the layout and its manifest, in bytes: each name and each shape has its own
    /// allocation.
    pub(crate) fn footprint(&self) -> u64 {
        const ALLOCATION: usize = 32;
        let of = |place: &Place| {
            let (name, shape) = (place.name.len(), place.shape.len() * 8);
            size_of::<Place>() + ENTRY + 2 * (ALLOCATION + name + shape)
        };
        (HEAD + self.places.iter().map(of).sum::<usize>()) as u64
    }

    /// The manifest and the model's hash, from the tensors' hashes in the order of [`Layout::places`].
    pub fn manifest(&self, hashes: &[[u8; 32]]) -> (Vec<u8>, ContentHash) {
        let mut root = Root::default();
        let dimensions: usize = self.places.iter().map(|place| place.shape.len()).sum();
        let mut entries = Vec::with_capacity(self.places.len() * ENTRY);
        let (mut shapes, mut names): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
        for (place, hash) in self.places.iter().zip(hashes) {
            root.tensor(&place.name, place.dtype, &place.shape, hash);
            let first = u32::try_from(shapes.len() / 8).unwrap_or(u32::MAX);
            entries.extend(place.offset.to_le_bytes());
            entries.extend(place.bytes.to_le_bytes());
            entries.extend(first.to_le_bytes());
            entries.push(u8::try_from(place.shape.len()).unwrap_or(u8::MAX));
            entries.extend([place.dtype.code(), 0, 0]);
            entries.extend((names.len() as u64).to_le_bytes());
            entries.extend(u32::try_from(place.name.len()).unwrap_or(u32::MAX).to_le_bytes());
            entries.extend([0; 4]);
            entries.extend(hash);
            entries.extend([0; 8]);
            place.shape.iter().for_each(|size| shapes.extend(size.to_le_bytes()));
            names.extend(place.name.as_bytes());
        }
        let content = root.finish();
        let mut bytes = Vec::with_capacity(HEAD + entries.len() + shapes.len() + names.len());
        bytes.extend(b"GSMF");
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.places.len() as u64).to_le_bytes());
        bytes.extend((dimensions as u64).to_le_bytes());
        bytes.extend(self.arena_bytes.to_le_bytes());
        bytes.extend(content.0);
        bytes.extend(entries);
        bytes.extend(shapes);
        bytes.extend(names);
        (bytes, content)
    }
}

/// Why bytes are not a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a manifest: {field} is {value}, {bound}")]
pub struct ManifestError {
    /// The field.
    pub field: &'static str,
    /// The value found.
    pub value: u64,
    /// The allowed values, in words.
    pub bound: &'static str,
}

/// A manifest, read in place.
#[derive(Debug, Clone, Copy)]
pub struct Manifest<'a> {
    entries: &'a [u8],
    shapes: &'a [u8],
    names: &'a [u8],
    arena_bytes: u64,
    content: ContentHash,
}

/// A tensor of a [`Manifest`].
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// Its name.
    pub name: &'a str,
    /// Type of its elements.
    pub dtype: Dtype,
    /// First byte in the arena.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// BLAKE3 of its bytes; zeros while it is being written.
    pub hash: [u8; 32],
    shape: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Its dimensions.
    pub fn shape(&self) -> impl ExactSizeIterator<Item = u64> + 'a {
        self.shape.chunks_exact(8).map(|size| le64(size, 0))
    }
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn hash(bytes: &[u8], at: usize) -> [u8; 32] {
    bytes.get(at..at + 32).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default()
}

impl<'a> Manifest<'a> {
    /// Checks the head. Each tensor is checked at its access, and an invalid tensor counts as missing.
    ///
    /// # Errors
    /// The first field that cannot be.
    pub fn open(bytes: &'a [u8]) -> Result<Self, ManifestError> {
        let bad = |field, value, bound| Err(ManifestError { field, value, bound });
        if bytes.len() < HEAD || &bytes[..4] != b"GSMF" {
            return bad("head", bytes.len() as u64, "need 64 bytes that begin with GSMF");
        }
        if le32(bytes, 4) != VERSION {
            return bad("version", le32(bytes, 4).into(), "need 1");
        }
        let (tensors, dimensions, arena_bytes) = (le64(bytes, 8), le64(bytes, 16), le64(bytes, 24));
        if tensors > MAX_TENSORS as u64 {
            return bad("tensors", tensors, "at most 1000000");
        }
        if dimensions > tensors * MAX_RANK as u64 {
            return bad("dimensions", dimensions, "at most 32 for each tensor");
        }
        let entries_end = HEAD + usize::try_from(tensors).unwrap_or(usize::MAX) * ENTRY;
        let shapes_end = entries_end + usize::try_from(dimensions).unwrap_or(usize::MAX) * 8;
        let (Some(entries), Some(shapes), Some(names)) =
            (bytes.get(HEAD..entries_end), bytes.get(entries_end..shapes_end), bytes.get(shapes_end..))
        else {
            return bad("length", bytes.len() as u64, "need room for what the head says");
        };
        Ok(Self { entries, shapes, names, arena_bytes, content: ContentHash(hash(bytes, 32)) })
    }

    /// One entry, if it is valid.
    fn read(&self, entry: &'a [u8]) -> Option<Entry<'a>> {
        let (offset, bytes) = (le64(entry, 0), le64(entry, 8));
        let begins = usize::try_from(le64(entry, 24)).ok()?;
        let name = self.names.get(begins..begins.checked_add(le32(entry, 32) as usize)?)?;
        let name = core::str::from_utf8(name).ok().filter(|name| name.len() <= MAX_NAME)?;
        let first = le32(entry, 16) as usize * 8;
        let rank = usize::from(entry[20]);
        let shape = self.shapes.get(first..first + rank * 8)?;
        let found =
            Entry { name, dtype: Dtype::from_code(entry[21])?, offset, bytes, hash: hash(entry, 40), shape };
        let fits = offset.checked_add(bytes)? <= self.arena_bytes && offset.is_multiple_of(TENSOR_ALIGNMENT);
        let sizes: Vec<u64> = found.shape().take(MAX_RANK).collect();
        let size = found.dtype.bytes_of(&sizes, bytes);
        (fits && rank <= MAX_RANK && size == Some(bytes)).then_some(found)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len() / ENTRY
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The tensor at a position in the order of the names.
    pub fn get(&self, at: usize) -> Option<Entry<'a>> {
        self.read(self.entries.chunks_exact(ENTRY).nth(at)?)
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<Entry<'a>> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let entry = self.get(middle)?;
            match entry.name.cmp(name) {
                core::cmp::Ordering::Equal => return Some(entry),
                core::cmp::Ordering::Less => low = middle + 1,
                core::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    /// All tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = Entry<'a>> + use<'a> {
        let this = *self;
        (0..self.len()).filter_map(move |at| this.get(at))
    }

    /// Bytes of the arena.
    pub const fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// Hash of the model.
    pub const fn content(&self) -> ContentHash {
        self.content
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let json =
            Header::encode(&[("w", Dtype::F32, &[300]), ("b", Dtype::F16, &[]), ("a", Dtype::U8, &[2, 3])]);
        Layout::new(&Header::parse(&json[8..], 1_208).unwrap()).unwrap()
    }

    #[test]
    fn tensors_are_aligned_and_found_by_name() {
        let layout = layout();
        assert_eq!(layout.arena_bytes, ARENA_ALIGNMENT);
        let (bytes, content) = layout.manifest(&[[1; 32], [2; 32], [3; 32]]);
        let manifest = Manifest::open(&bytes).unwrap();
        assert_eq!(manifest.content(), content);
        let seen: Vec<(&str, u64, u64)> = manifest.iter().map(|e| (e.name, e.offset, e.bytes)).collect();
        assert_eq!(seen, [("a", 1_536, 6), ("b", 1_280, 2), ("w", 0, 1_200)]);
        assert_eq!(manifest.tensor("a").unwrap().shape().collect::<Vec<_>>(), [2, 3]);
        assert!(manifest.tensor("c").is_none());
    }

    #[test]
    fn no_flipped_bit_of_a_manifest_leads_out_of_its_arena() {
        let (bytes, _) = layout().manifest(&[[1; 32], [2; 32], [3; 32]]);
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(manifest) = Manifest::open(&bytes) {
                assert!(manifest.iter().all(|entry| entry.offset + entry.bytes <= manifest.arena_bytes()));
            }
        }
        for length in 0..bytes.len() {
            let whole = Manifest::open(&bytes[..length]).is_ok_and(|cut| cut.iter().count() == 3);
            assert!(!whole, "cut to {length} bytes");
        }
    }
}
