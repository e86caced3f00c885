//! Content hashes: BLAKE3 per tensor, and one root per model.
//!
//! A tensor's hash is the plain BLAKE3 of its bytes, as `b3sum` prints it. BLAKE3 is a tree, so several threads hash pieces
//! of a large tensor, each while its piece is still in the cache, and the hashes are merged at the end. A model's hash
//! covers (name, type, shape, hash) of its tensors in the order of their names. So it depends on the content that readers
//! see, not on the order of the data in a file.

use crate::safetensors::Dtype;
use crate::store::ContentHash;
use blake3::Hasher;
use blake3::hazmat::{self, ChainingValue, HasherExt as _, Mode};

/// Bytes of a piece: a whole subtree, and small enough for a core's cache.
pub const PIECE: u64 = 1 << 20;

/// Hash of a piece of a tensor of `whole` bytes that begins at `offset`, a multiple of [`PIECE`].
///
/// For a tensor of one piece this is the tensor's hash.
pub fn piece(offset: u64, bytes: &[u8], whole: u64) -> [u8; 32] {
    if whole <= PIECE {
        return *blake3::hash(bytes).as_bytes();
    }
    Hasher::new().set_input_offset(offset).update(bytes).finalize_non_root()
}

/// Hash of a tensor of `whole` bytes from the hashes of its pieces, in order.
///
/// # Panics
/// If there are fewer pieces than `whole` has.
pub fn merge(pieces: &[[u8; 32]], whole: u64) -> [u8; 32] {
    if whole <= PIECE {
        return pieces[0];
    }
    let (left, right) = halves(pieces, whole);
    *hazmat::merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()
}

fn halves(pieces: &[[u8; 32]], bytes: u64) -> (ChainingValue, ChainingValue) {
    let left = hazmat::left_subtree_len(bytes);
    let (before, after) = pieces.split_at(usize::try_from(left / PIECE).unwrap_or(usize::MAX));
    (subtree(before, left), subtree(after, bytes - left))
}

fn subtree(pieces: &[[u8; 32]], bytes: u64) -> ChainingValue {
    if bytes <= PIECE {
        return pieces[0];
    }
    let (left, right) = halves(pieces, bytes);
    hazmat::merge_subtrees_non_root(&left, &right, Mode::Hash)
}

/// The root hash of a model; takes its tensors in the order of their names.
#[derive(Debug)]
pub struct Root(Hasher);

impl Default for Root {
    fn default() -> Self {
        Self(Hasher::new_derive_key("gshare model store: content of a model, version 1"))
    }
}

impl Root {
    /// Adds a tensor. Lengths precede texts, so that no two models give the same bytes.
    pub fn tensor(&mut self, name: &str, dtype: Dtype, shape: &[u64], hash: &[u8; 32]) {
        self.0.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        self.0.update(&[dtype.code()]).update(&(shape.len() as u64).to_le_bytes());
        for size in shape {
            self.0.update(&size.to_le_bytes());
        }
        self.0.update(hash);
    }

    /// The hash of the model.
    pub fn finish(self) -> ContentHash {
        ContentHash(*self.0.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_merge_to_the_plain_hash_of_the_whole() {
        let bytes: Vec<u8> = (0..5 * PIECE + 777).map(|at| (at >> 2) as u8 ^ (at >> 13) as u8).collect();
        for whole in
            [1, 1_024, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE, 4 * PIECE + 1, 5 * PIECE + 777]
        {
            let bytes = &bytes[..whole as usize];
            let parts = bytes.chunks(PIECE as usize).zip((0..).step_by(PIECE as usize));
            let pieces: Vec<[u8; 32]> = parts.map(|(part, offset)| piece(offset, part, whole)).collect();
            assert_eq!(merge(&pieces, whole), *blake3::hash(bytes).as_bytes(), "{whole} bytes");
        }
    }

    #[test]
    fn a_model_differs_by_name_type_shape_or_bytes() {
        let root = |name: &str, dtype, shape: &[u64], hash| {
            let mut root = Root::default();
            root.tensor(name, dtype, shape, &[hash; 32]);
            root.finish()
        };
        let base = root("a", Dtype::F32, &[2, 3], 0);
        for other in [
            root("b", Dtype::F32, &[2, 3], 0),
            root("a", Dtype::I32, &[2, 3], 0),
            root("a", Dtype::F32, &[3, 2], 0),
            root("a", Dtype::F32, &[2, 3], 1),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(base, root("a", Dtype::F32, &[2, 3], 0));
    }
}
