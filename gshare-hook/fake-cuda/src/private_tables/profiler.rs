//! `PROFILER`, a name of ours: CUPTI asks for it when a profiler starts.
//!
//! Facts: none of NVIDIA's. Observed: without the table CUPTI 13 asks again until its stack ends, and CUPTI 12 calls slot 32 all the same.
//! With 64 words CUPTI 13 calls no slot, CUPTI 12 takes the answer `CUDA_ERROR_NOT_SUPPORTED`, and both give their caller an error. With 80
//! words CUPTI 13 calls slot 67, and ends the program at this answer. The simulated driver has no profiler.

use super::*;

table!(9 "PROFILER"
    [0x7c, 0xb6, 0x3f, 0x9b, 0x9c, 0xa4, 0x8e, 0x42, 0xa4, 0x84, 0xbe, 0xb6, 0x6e, 0x6a, 0xed, 0x7f],
    64 words);
