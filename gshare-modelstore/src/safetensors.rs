//! The header of a safetensors file, checked before use.
//!
//! # Problem
//! A model comes from outside, and its header states its size and the places of its tensors. It may be wrong: a length of
//! 2^60, overlapping tensors, shapes with an overflowing product. All of it is checked before memory for a tensor is
//! allocated, and an error names the tensor and the bound.
//!
//! # Format
//! 8 bytes of length (little-endian), as many bytes of JSON `{"name": {"dtype", "shape", "data_offsets": [begin, end]},
//! ..., "__metadata__": {text: text}}`, then the data, without holes; offsets count from its beginning.
//!
//! # Differences
//! The crate `safetensors` checks a header only in a fully mapped file, but a store must not map a file that another
//! process can truncate. It also keeps the last of two tensors with the same name, and has no limit on the number of
//! tensors. So the header is read here; `tests/headers.rs` compares the two on random headers.

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeSet;
use std::fmt;

/// Longest header. The reference implementation has the same bound.
pub const MAX_HEADER: u64 = 100_000_000;
/// Most tensors of a model.
pub const MAX_TENSORS: usize = 1_000_000;
/// Longest name of a tensor in bytes.
pub const MAX_NAME: usize = 4_096;
/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 32;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident $text:literal $code:literal $bits:literal,)*) => {
        /// Type of a tensor's elements.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(non_camel_case_types, missing_docs, reason = "the names that the format gives them")]
        #[non_exhaustive]
        pub enum Dtype { $($(#[$doc])* $name,)* }

        impl Dtype {
            /// All types.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The name of the type in the format.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The type with that name; [`Self::OTHER`] for an unknown name.
            pub fn from_text(text: &str) -> Self {
                match text { $($text => Self::$name,)* _ => Self::OTHER }
            }

            /// Number of the type in manifests and in the C interface.
            pub const fn code(self) -> u8 {
                match self { $(Self::$name => $code,)* }
            }

            /// The type with that number.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }

            /// Bits of one element; 0 if only the file knows.
            pub const fn bits(self) -> u64 {
                match self { $(Self::$name => $bits,)* }
            }
        }
    };
}
dtypes! {
    BOOL "BOOL" 0 8,
    U8 "U8" 1 8,
    I8 "I8" 2 8,
    F8_E5M2 "F8_E5M2" 3 8,
    F8_E4M3 "F8_E4M3" 4 8,
    F8_E8M0 "F8_E8M0" 5 8,
    I16 "I16" 6 16,
    U16 "U16" 7 16,
    F16 "F16" 8 16,
    BF16 "BF16" 9 16,
    I32 "I32" 10 32,
    U32 "U32" 11 32,
    F32 "F32" 12 32,
    C64 "C64" 13 64,
    F64 "F64" 14 64,
    I64 "I64" 15 64,
    U64 "U64" 16 64,
    F4 "F4" 17 4,
    F6_E2M3 "F6_E2M3" 18 6,
    F6_E3M2 "F6_E3M2" 19 6,
    /// Any other type: the format grows, and a store needs only sizes. The file states the bytes of such a tensor.
    OTHER "OTHER" 20 0,
}

impl Dtype {
    /// Bytes of a tensor of this type. `said` is the size in the file; `None` if its shape has another size.
    pub fn bytes_of(self, shape: &[u64], said: u64) -> Option<u64> {
        // A 0 must not hide an overflow: code that multiplies in another order would see it.
        let full = shape.iter().try_fold(self.bits().max(1), |bits, &size| bits.checked_mul(size.max(1)))?;
        if self.bits() == 0 {
            return Some(said);
        }
        let bits = if shape.contains(&0) { 0 } else { full };
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// One tensor of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its dimensions; none is a single element.
    pub shape: Vec<u64>,
    /// First byte of its data, from the beginning of the data.
    pub begin: u64,
    /// Length of the data in bytes.
    pub bytes: u64,
}

/// A checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// In the order of their data.
    pub tensors: Vec<TensorInfo>,
    /// Begin of the data in the file.
    pub data_begin: u64,
    /// Bytes of the data.
    pub data_bytes: u64,
}

/// Why a header is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is too short for a length.
    #[error("file of {bytes} bytes: too short for a safetensors header, need at least 8")]
    TooShort {
        /// Length of the file.
        bytes: u64,
    },
    /// The length of the header is invalid.
    #[error("header length is {bytes}: at most {limit} here (file or format)")]
    BadLength {
        /// The length in the file.
        bytes: u64,
        /// The bound.
        limit: u64,
    },
    /// The header is not JSON of the right form.
    #[error("header is not as it should be: {why}")]
    Malformed {
        /// The fault, and its place.
        why: String,
    },
    /// Too many tensors.
    #[error("more than {limit} tensors")]
    TooManyTensors {
        /// The bound.
        limit: usize,
    },
    /// No tensor, or none with any element.
    #[error("the model has no data")]
    Empty,
    /// Too many dimensions, or more elements than a file can have.
    #[error("tensor `{tensor}`: shape is too large: at most {MAX_RANK} dimensions, and a product that fits")]
    BadShape {
        /// Name of the tensor.
        tensor: String,
    },
    /// Offsets in the wrong order, or with another size than the shape.
    #[error("tensor `{tensor}`: data_offsets [{begin}, {end}] do not hold the {need} bytes of its shape")]
    BadOffsets {
        /// Name of the tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
        /// Bytes by the shape.
        need: u64,
    },
    /// Two tensors overlap, or there is a hole.
    #[error("tensor `{tensor}`: data begins at {begin}, but the data before it ends at {expected}")]
    HoleOrOverlap {
        /// Name of the tensor after the fault.
        tensor: String,
        /// Begin of its data.
        begin: u64,
        /// End of the data before it.
        expected: u64,
    },
    /// The data ends before or after the file does.
    #[error("data of {data} bytes, but the file has {file} after its header")]
    WrongSize {
        /// Bytes of data by the header.
        data: u64,
        /// Bytes of data in the file.
        file: u64,
    },
}

/// The length of the header from the first 8 bytes of a file of `file` bytes.
///
/// # Errors
/// A length of more than the file or [`MAX_HEADER`].
pub fn header_length(first: [u8; 8], file: u64) -> Result<u64, HeaderError> {
    let bytes = u64::from_le_bytes(first);
    let limit = MAX_HEADER.min(file.checked_sub(8).ok_or(HeaderError::TooShort { bytes: file })?);
    if bytes > limit { Err(HeaderError::BadLength { bytes, limit }) } else { Ok(bytes) }
}

impl Header {
    /// Checks the JSON of a header, for a file with `data` bytes after it.
    ///
    /// # Errors
    /// The first fault, with the tensor and the bound.
    pub fn parse(json: &[u8], data: u64) -> Result<Self, HeaderError> {
        let header = Self::parse_unsized(json)?;
        match header.data_bytes == data {
            true => Ok(header),
            false => Err(HeaderError::WrongSize { data: header.data_bytes, file: data }),
        }
    }

    /// As [`Header::parse`], without a file to compare the size with.
    ///
    /// # Errors
    /// As [`Header::parse`].
    pub fn parse_unsized(json: &[u8]) -> Result<Self, HeaderError> {
        let mut parser = serde_json::Deserializer::from_slice(json);
        let mut raw = Raw::default();
        let malformed = |error: serde_json::Error| HeaderError::Malformed { why: error.to_string() };
        let parsed = Tensors(&mut raw).deserialize(&mut parser);
        if raw.too_many {
            return Err(HeaderError::TooManyTensors { limit: MAX_TENSORS });
        }
        parsed.map_err(malformed)?;
        parser.end().map_err(malformed)?;
        let mut tensors = Vec::with_capacity(raw.tensors.len());
        for (name, entry) in raw.tensors {
            tensors.push(entry.check(name)?);
        }
        // Empty tensors come first if they begin at the same place as another tensor.
        tensors.sort_by(|a, b| (a.begin, a.bytes, &a.name).cmp(&(b.begin, b.bytes, &b.name)));
        let mut expected = 0;
        for TensorInfo { name, begin, bytes, .. } in &tensors {
            if *begin != expected {
                return Err(HeaderError::HoleOrOverlap { tensor: name.clone(), begin: *begin, expected });
            }
            expected += bytes;
        }
        if expected == 0 {
            return Err(HeaderError::Empty);
        }
        Ok(Self { tensors, data_begin: 8 + json.len() as u64, data_bytes: expected })
    }

    /// Bytes of a header for these tensors, with the length before it, padded so that the data begins at a multiple of 8.
    /// Each tensor gets a new begin, in the order of `tensors`.
    pub fn encode(tensors: &[(&str, Dtype, &[u64])]) -> Vec<u8> {
        let mut map = serde_json::Map::new();
        let mut begin = 0u64;
        for (name, dtype, shape) in tensors {
            let end = begin + shape.iter().product::<u64>() * dtype.bits() / 8;
            let entry =
                serde_json::json!({"dtype": dtype.text(), "shape": shape, "data_offsets": [begin, end]});
            map.insert((*name).to_owned(), entry);
            begin = end;
        }
        let mut json = serde_json::Value::Object(map).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        bytes
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Shape,
    data_offsets: [u64; 2],
}

impl Entry {
    fn check(self, name: String) -> Result<TensorInfo, HeaderError> {
        let Self { dtype, shape: Shape { dimensions: shape, too_many }, data_offsets: [begin, end] } = self;
        let dtype = Dtype::from_text(&dtype);
        let bytes = dtype.bytes_of(&shape, end.saturating_sub(begin)).filter(|_| !too_many);
        let Some(bytes) = bytes else { return Err(HeaderError::BadShape { tensor: name }) };
        if end.checked_sub(begin) != Some(bytes) {
            return Err(HeaderError::BadOffsets { tensor: name, begin, end, need: bytes });
        }
        Ok(TensorInfo { name, dtype, shape, begin, bytes })
    }
}

/// Dimensions, of which at most [`MAX_RANK`] are kept.
struct Shape {
    dimensions: Vec<u64>,
    too_many: bool,
}

impl<'de> serde::Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions, integers from 0")
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut shape = Shape { dimensions: Vec::new(), too_many: false };
                while let Some(size) = list.next_element::<u64>()? {
                    if shape.dimensions.len() < MAX_RANK {
                        shape.dimensions.push(size);
                    } else {
                        shape.too_many = true;
                    }
                }
                Ok(shape)
            }
        }
        from.deserialize_seq(Dimensions)
    }
}

#[derive(Default)]
struct Raw {
    tensors: Vec<(String, Entry)>,
    names: BTreeSet<String>,
    too_many: bool,
}

struct Tensors<'a>(&'a mut Raw);

impl<'de> DeserializeSeed<'de> for Tensors<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Tensors<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if self.0.tensors.len() == MAX_TENSORS {
                self.0.too_many = true;
                return Err(A::Error::custom("too many tensors"));
            }
            if name.len() > MAX_NAME {
                return Err(A::Error::custom(format!("a name of {} bytes, at most {MAX_NAME}", name.len())));
            }
            if !self.0.names.insert(name.clone()) {
                return Err(A::Error::custom(format!("two tensors `{name}`")));
            }
            let entry = map.next_value()?;
            self.0.tensors.push((name, entry));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
