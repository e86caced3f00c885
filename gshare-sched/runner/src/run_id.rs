//! Numbers of runs.

use gshare_core::RunId;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;

/// A number for a new run: 128 random bits of the kernel, which no other process can compute.
///
/// # Errors
/// When the kernel gives none.
pub fn new_run() -> io::Result<RunId> {
    let mut bits = [0; 16];
    let filled = getrandom(&mut bits, GetRandomFlags::empty())?;
    if filled < bits.len() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "getrandom: fewer than 16 bytes"));
    }
    Ok(RunId::new(u128::from_ne_bytes(bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each bit is drawn: over 64 numbers each has been 0 and 1, or chance has failed once in 2^56 runs of this test.
    #[test]
    fn every_bit_of_a_number_is_drawn() {
        let numbers: Vec<u128> = (0..64).map(|_| new_run().unwrap().bits()).collect();
        assert_eq!(numbers.iter().fold(0, |all, bits| all | bits), u128::MAX);
        assert_eq!(numbers.iter().fold(u128::MAX, |all, bits| all & bits), 0);
    }
}
