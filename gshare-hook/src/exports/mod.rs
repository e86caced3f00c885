//! The C functions that programs see in place of the driver's.
//!
//! A wrapper does its part and calls the real function of *the same variant*, with the caller's arguments and in the caller's
//! thread, so result and order are the driver's own. [`table::wrapper`] tells which variants have a wrapper. The table of the
//! driver's symbols is walked at compile time, so a wrapper with a wrong signature does not compile.
//!
//! # Waived
//!
//! These functions of class launch and alloc are not wrapped, for these reasons:
//!
//! | function | why |
//! |---|---|
//! | `cuMemAllocHost`, `cuMemHostAlloc`, `cuMemHostRegister` | host memory is not the device's |

mod array;
mod blocks;
mod context;
mod copies;
mod launch;
mod load;
mod macros;
mod memory;
mod nvml_view;
mod pools;
mod resolve;
mod served;
mod table;
mod waits;
