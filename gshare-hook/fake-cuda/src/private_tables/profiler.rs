//! `PROFILER`, a name of ours: CUPTI asks for it when a profiler starts.
//!
//! Facts: none are public. Observed: without the table, CUPTI 12 and 13 ask again and again until the stack ends, and the program with it.
//! Where the table has no function, CUPTI gives its caller an error. The simulated driver has no profiler.

use super::*;

table!(9 "PROFILER"
    [0x7c, 0xb6, 0x3f, 0x9b, 0x9c, 0xa4, 0x8e, 0x42, 0xa4, 0x84, 0xbe, 0xb6, 0x6e, 0x6a, 0xed, 0x7f],
    1 words);
