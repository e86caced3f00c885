//! Any bytes: no decoder of the store's frames panics, and each decoded frame encodes to the same bytes.
#![no_main]

use gshare_modelstore::frame::{Answer, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut again = Vec::new();
    if let Ok((request, message)) = Request::decode(bytes) {
        message.encode(request, &mut again);
        assert_eq!(again, bytes, "{message:?}");
    }
    again.clear();
    if let Ok((request, message)) = Answer::decode(bytes) {
        message.encode(request, &mut again);
        assert_eq!(again, bytes, "{message:?}");
    }
});
