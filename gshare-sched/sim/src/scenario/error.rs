//! The error of a refused scenario.

use crate::arrivals::ArrivalError;
use crate::load_trace::TraceError;
use gshare_core::dag::DagError;
use gshare_core::profile::ProfileError;
use std::path::PathBuf;

/// A scenario was refused. Each variant names the field and its bound, or the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScenarioError {
    /// The file is not readable.
    #[error("{}: {cause}", path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The text is not a scenario: an unknown key, an unknown name, or a value of the wrong form.
    #[error(transparent)]
    Toml(#[from] toml::de::Error),
    /// The key cannot be set to another value.
    #[error("cannot set `{key}`: {why}")]
    Set {
        /// The given key.
        key: String,
        /// The fault in the key.
        why: String,
    },
    /// The value is out of its bounds.
    #[error("{field} is {value}: {bound}")]
    Field {
        /// The name of the field.
        field: String,
        /// The value of the field.
        value: String,
        /// The allowed values, in words.
        bound: String,
    },
    /// The profile is not valid.
    #[error("function `{function}`: {cause}")]
    Profile {
        /// The name of the function.
        function: String,
        /// The fault in the profile.
        cause: ProfileError,
    },
    /// The DAG is not valid.
    #[error("function `{function}`: {cause}")]
    Dag {
        /// The name of the function.
        function: String,
        /// The fault in the DAG.
        cause: DagError,
    },
    /// The load is not valid.
    #[error("function `{function}`, load: {cause}")]
    Load {
        /// The name of the function.
        function: String,
        /// The fault in the load.
        cause: ArrivalError,
    },
    /// A file of a function is malformed.
    #[error("function `{function}`, {}: {why}", path.display())]
    Malformed {
        /// The name of the function.
        function: String,
        /// The path of the file.
        path: PathBuf,
        /// The fault in the file.
        why: String,
    },
    /// The trace is not readable.
    #[error("function `{function}`, {}: {cause}", path.display())]
    Trace {
        /// The name of the function.
        function: String,
        /// The path of the file.
        path: PathBuf,
        /// The fault in the trace.
        cause: TraceError,
    },
}

impl ScenarioError {
    pub(super) fn field(field: &str, value: &str, bound: &str) -> Self {
        Self::Field { field: field.to_owned(), value: value.to_owned(), bound: bound.to_owned() }
    }
}
