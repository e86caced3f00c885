//! Why a scenario was refused.

use crate::arrivals::ArrivalError;
use crate::load_trace::TraceError;
use gshare_core::dag::DagError;
use gshare_core::profile::ProfileError;
use std::path::PathBuf;

/// Why a scenario was refused: the field and its bound, or the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScenarioError {
    /// A file that could not be read.
    #[error("{}: {cause}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// Text that is no scenario: a key that is not known, a name that is not, a value of the wrong form.
    #[error(transparent)]
    Toml(#[from] toml::de::Error),
    /// A key that cannot be set to another value.
    #[error("cannot set `{key}`: {why}")]
    Set {
        /// The key as it was given.
        key: String,
        /// The fault that was found in it.
        why: String,
    },
    /// A value that cannot be.
    #[error("{field} is {value}: {bound}")]
    Field {
        /// The field.
        field: String,
        /// The value of the field.
        value: String,
        /// The values that are allowed, in words.
        bound: String,
    },
    /// A profile that cannot be.
    #[error("function `{function}`: {cause}")]
    Profile {
        /// Name of the function.
        function: String,
        /// The fault that was found in it.
        cause: ProfileError,
    },
    /// A DAG that cannot be.
    #[error("function `{function}`: {cause}")]
    Dag {
        /// Name of the function.
        function: String,
        /// The fault that was found in it.
        cause: DagError,
    },
    /// A load that cannot be.
    #[error("function `{function}`, load: {cause}")]
    Load {
        /// Name of the function.
        function: String,
        /// The fault that was found in it.
        cause: ArrivalError,
    },
    /// A file of a function that is not of its form.
    #[error("function `{function}`, {}: {why}", path.display())]
    Malformed {
        /// Name of the function.
        function: String,
        /// The file.
        path: PathBuf,
        /// The fault that was found in it.
        why: String,
    },
    /// A trace that cannot be read.
    #[error("function `{function}`, {}: {cause}", path.display())]
    Trace {
        /// Name of the function.
        function: String,
        /// The file.
        path: PathBuf,
        /// The fault that was found in it.
        cause: TraceError,
    },
}

impl ScenarioError {
    pub(super) fn field(field: &str, value: &str, bound: &str) -> Self {
        Self::Field { field: field.to_owned(), value: value.to_owned(), bound: bound.to_owned() }
    }
}
