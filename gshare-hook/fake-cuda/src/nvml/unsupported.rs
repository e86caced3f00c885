//! Every other name of NVML: exported, because a driver of this release has them all and clients look several up at once, and
//! answered with `NVML_ERROR_NOT_SUPPORTED`, as a card without the function does. The names are in `unsupported.txt`.

use super::*;

macro_rules! unsupported {
    // The arguments that a caller passes are not read.
    ($($name:ident)*) => {
        nvml! { $(fn $name () { device().and(Err(NOT_SUPPORTED)) })* }
    };
}

include!(concat!(env!("OUT_DIR"), "/unsupported.rs"));
