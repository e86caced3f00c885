//! Example hosts that embed gshare. Each is a binary or example of this package.
#![forbid(unsafe_code)]

#[cfg(feature = "kubernetes")]
pub mod knative;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;

/// Prefixes of the annotations that are shares (FaST-GShare, Figure 4, and its code).
pub(crate) const SHARE_PREFIXES: [&str; 2] = ["fastgshare/", "faasshare/"];
