//! The end of [spare blocks](crate::device::pools), and the functions in front of the driver's synchronising calls, after which pools shrink.
#![allow(unsafe_code)] // calls to the driver

use gshare_cuda_abi::types::{CUresult, sys};

use crate::device::blocks::Blocks;
use crate::device::book::{Key, Kind};
use crate::device::context::relaxed;
use crate::device::pools::{Mark, Pool};
use crate::process::runtime::{PROCESS, Runtime};
use crate::sys::driver::{self, beneath};

impl Runtime {
    /// Ends spare blocks: see [`Blocks::take_idle`]. Returns whether there were any.
    pub(crate) fn end_spare(
        &self,
        blocks: &Blocks,
        keeps: impl Fn(&Pool) -> u64,
        is_over: impl Fn(&Mark) -> bool,
    ) -> bool {
        let idle = blocks.take_idle(keeps, is_over);
        let any = !idle.is_empty();
        for (address, block) in idle {
            // Struck out first, because another thread may get the address at once.
            let record = self.book.remove(Key(Kind::Pointer, address));
            relaxed(|| blocks.end(address, block));
            if let Some(record) = record {
                self.release(record.device, record.bytes);
            }
        }
        any
    }
}

/// Shrinks the pools that serve blocks to their release thresholds, after a call that has waited for the device.
fn waited(result: CUresult) -> CUresult {
    if result.is_ok()
        && let Some(runtime) = PROCESS.runtime()
        && let Some(blocks) = runtime.blocks()
        && blocks.pools.any_spare()
    {
        runtime.end_spare(blocks, Pool::kept, Mark::is_passed);
    }
    result
}

macro_rules! synchronising {
    ($($name:ident($($arg:ident: $type:ty)?);)*) => {
        mod in_front {
            use super::*;
            $(
                #[allow(non_snake_case)]
                pub(super) unsafe extern "C" fn $name($($arg: $type)?) -> CUresult {
                    let Some(real) = beneath!($name) else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
                    // SAFETY: the caller's own argument.
                    waited(unsafe { real($($arg)?) })
                }
            )*
        }

        /// Puts a function in front of each synchronising call.
        pub(crate) fn install() {
            $(driver::put_in_front(gshare_cuda_abi::index::$name, in_front::$name as *mut core::ffi::c_void);)*
        }
    };
}

synchronising! {
    cuCtxSynchronize();
    cuCtxSynchronize_v2(context: sys::CUcontext);
    cuStreamSynchronize(stream: sys::CUstream);
    cuStreamSynchronize_ptsz(stream: sys::CUstream);
    cuEventSynchronize(event: sys::CUevent);
}
