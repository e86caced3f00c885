//! Example hosts that embed gshare. Each is a binary or example of this package.
#![forbid(unsafe_code)]

#[cfg(feature = "kubernetes")]
pub mod kubernetes;
