//! Virtual memory management.

/// Bytes in a file that several processes map.
#[derive(Clone, Debug)]
pub(crate) struct Backing {
    pub(crate) id: u32,
    pub(crate) generation: u32,
}
