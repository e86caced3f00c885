//! Every other name of NVML. A driver of this release exports them all, and clients look up several at once, so each answers
//! `NVML_ERROR_NOT_SUPPORTED`, as on a card without the function. The names are in `unsupported.txt`.

use super::*;

macro_rules! unsupported {
    // These functions ignore their arguments.
    ($($name:ident)*) => {
        nvml! { $(fn $name () { device().and(Err(NOT_SUPPORTED)) })* }
    };
}

include!(concat!(env!("OUT_DIR"), "/unsupported.rs"));
