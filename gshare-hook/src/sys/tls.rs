//! One word per thread, at the price of two instructions.
//!
//! `thread_local!` in a shared library goes through a function call and a lazy-state check, and a launch that costs 3 ns can afford
//! neither. A preloaded library is part of the program's initial set, so its thread-local block has a fixed place (the
//! *initial-exec* model). Rust cannot ask for this model yet, so the word is declared and addressed in assembly: one load of its
//! offset, and one addition of the thread pointer.
#![allow(unsafe_code)] // a thread-local declared in assembly

use core::arch::{asm, global_asm};

global_asm!(
    ".pushsection .tbss.gshare_thread_word, \"awT\", @nobits",
    ".balign 8",
    ".hidden gshare_thread_word",
    ".globl gshare_thread_word",
    ".type gshare_thread_word, @object",
    ".size gshare_thread_word, 8",
    "gshare_thread_word:",
    ".zero 8",
    ".popsection",
);

/// The calling thread's own word, which is 0 in a new thread, and which no other thread reads or writes.
#[inline(always)]
pub(crate) fn word() -> *mut usize {
    let address: *mut usize;
    // SAFETY: reads the GOT entry that holds the word's offset from the thread pointer and the thread pointer itself,
    // which the x86-64 ABI keeps at fs:0. No memory is written, no flag matters afterwards.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + gshare_thread_word@gottpoff]",
            "add {0}, qword ptr fs:[0]",
            out(reg) address,
            options(pure, readonly, nostack),
        );
    }
    address
}
