//! The log of a run: a hash of all of it, and its last lines for a reader.

use core::fmt::Display;
use std::collections::VecDeque;

/// The log of a run. Runs with equal hashes were the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    hash: u64,
    keeps: usize,
    lines: VecDeque<String>,
}

impl Log {
    /// A log that keeps this many of its last lines.
    pub(crate) fn keeping(keeps: usize) -> Self {
        Self { keeps, ..Self::default() }
    }

    /// Mixes numbers into the hash.
    pub(crate) fn mix(&mut self, numbers: &[u64]) {
        for number in numbers {
            self.hash = (self.hash ^ number).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
        }
    }

    /// Mixes bytes into the hash.
    pub(crate) fn mix_bytes(&mut self, bytes: &[u8]) {
        for bytes in bytes.chunks(8) {
            let word = bytes.iter().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
            self.mix(&[word]);
        }
    }

    /// Adds a line, which does not count for the hash. A log that keeps no lines does not write it.
    pub(crate) fn line(&mut self, at: impl Display, line: impl FnOnce() -> String) {
        if self.keeps == 0 {
            return;
        }
        if self.lines.len() == self.keeps {
            self.lines.pop_front();
        }
        self.lines.push_back(format!("{at}: {}", line()));
    }

    /// The hash of the run so far.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// The last lines, oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}
