//! Arrays and mipmapped arrays.

use super::core::Kind;

/// An array: pitched device memory.
#[derive(Debug)]
pub(crate) struct Array {
    pub(crate) address: u64,
    pub(crate) pitch: u64,
    pub(crate) height: u64,
}

impl Kind for Array {
    const MAGIC: u64 = 0x6773_6861_7265_4152;
}
