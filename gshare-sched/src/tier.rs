//! The place of a function's weights before a start.

/// The place from which an instance loads its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Tier {
    /// Host memory of the device's node.
    Host,
    /// Disk, or anything as slow.
    Disk,
}
