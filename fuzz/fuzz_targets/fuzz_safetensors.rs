//! Any bytes: the readers of a safetensors header and a manifest refuse them, or return a result within its promises.
#![no_main]

use gshare_modelstore::manifest::{Layout, Manifest};
use gshare_modelstore::safetensors::{Header, header_length};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(manifest) = Manifest::open(bytes) {
        assert!(manifest.iter().all(|entry| entry.offset + entry.bytes <= manifest.arena_bytes()));
    }
    if let Some(first) = bytes.first_chunk::<8>() {
        let _ = header_length(*first, bytes.len() as u64);
    }
    let Ok(header) = Header::parse_unsized(bytes) else { return };
    let mut end = 0;
    for tensor in &header.tensors {
        assert_eq!(tensor.begin, end, "no hole, no overlap");
        assert_eq!(tensor.dtype.bytes_of(&tensor.shape, tensor.bytes), Some(tensor.bytes));
        end += tensor.bytes;
    }
    assert_eq!(end, header.data_bytes);
    if let Some(layout) = Layout::new(&header) {
        let (bytes, content) = layout.manifest(&vec![[7; 32]; layout.places.len()]);
        let manifest = Manifest::open(&bytes).unwrap();
        assert_eq!((manifest.iter().count(), manifest.content()), (header.tensors.len(), content));
        for entry in manifest.iter() {
            assert_eq!(manifest.tensor(entry.name).map(|found| found.offset), Some(entry.offset));
        }
    }
});
