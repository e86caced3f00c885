//! Example hosts that embed gshare. Each is a binary or example of this package.
#![forbid(unsafe_code)]

pub mod openfaas;
