//! `PROFILER`, a name of ours: CUPTI asks for it when a profiler starts.
//!
//! Facts: none of NVIDIA's. Observed: without the table CUPTI 13 asks again until its stack ends, and CUPTI 12 calls slot 32 all the same.
//! Where a slot answers `CUDA_ERROR_NOT_SUPPORTED`, or is never called, CUPTI gives its caller an error: the simulated driver has no profiler.
//! The table's size is unknown; CUPTI 12 reads none.

use super::*;

table!(9 "PROFILER"
    [0x7c, 0xb6, 0x3f, 0x9b, 0x9c, 0xa4, 0x8e, 0x42, 0xa4, 0x84, 0xbe, 0xb6, 0x6e, 0x6a, 0xed, 0x7f],
    96 words);
