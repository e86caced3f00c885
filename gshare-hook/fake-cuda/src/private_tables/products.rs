//! `PRODUCTS`, a name of ours: cuBLASLt asks for it while it plans a matrix product on a device of compute capability 9.0.
//!
//! Facts: none are public. Observed: cuBLASLt 13.1 asks for the table for each product, ignores whether it was given, and calls slot 4.
//! After the answer `CUDA_ERROR_NOT_SUPPORTED` it goes on, and launches its kernels for the device. The table's size is unknown; cuBLASLt
//! reads none.

use super::*;

table!(8 "PRODUCTS"
    [0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45, 0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca],
    32 words);
