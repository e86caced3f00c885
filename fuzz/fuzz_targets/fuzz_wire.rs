//! Any bytes: no decoder panics, and each decoded message encodes to the same bytes.
#![no_main]

use gshare_core::wire::{ToClient, ToDaemon};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut again = Vec::new();
    if let Ok((sequence, message)) = ToDaemon::decode(bytes) {
        message.encode(sequence, &mut again);
        assert_eq!(again, bytes, "{message:?}");
    }
    again.clear();
    if let Ok((sequence, message)) = ToClient::decode(bytes) {
        message.encode(sequence, &mut again);
        assert_eq!(again, bytes, "{message:?}");
    }
});
