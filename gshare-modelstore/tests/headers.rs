//! Our header parser beside the crate `safetensors`, on headers that are right and headers that are nearly so.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "small numbers"
)]

use gshare_modelstore::safetensors::{Dtype, Header};
use proptest::prelude::*;
use safetensors::SafeTensors;

const DTYPES: [Dtype; 4] = [Dtype::U8, Dtype::F16, Dtype::F32, Dtype::I64];

/// One tensor: name, index of its type, shape.
type Described = (String, usize, Vec<u64>);

/// The file, after one of its numbers was changed.
fn file(tensors: &[Described], change: Option<(usize, i64)>) -> Vec<u8> {
    let mut at = 0;
    let mut numbers: Vec<i64> = Vec::new();
    for (_, dtype, shape) in tensors {
        let bytes = shape.iter().product::<u64>() * DTYPES[*dtype].bits() / 8;
        numbers.extend(shape.iter().chain(&[at, at + bytes]).map(|&number| number as i64));
        at += bytes;
    }
    if let Some((index, by)) = change.filter(|_| !numbers.is_empty()) {
        let index = index % numbers.len();
        numbers[index] += by;
    }
    let mut numbers = numbers.into_iter();
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let shape: Vec<i64> = numbers.by_ref().take(shape.len()).collect();
            let offsets: Vec<i64> = numbers.by_ref().take(2).collect();
            let dtype = DTYPES[*dtype].text();
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":{offsets:?}}}"#)
        })
        .collect();
    let json = format!("{{{}}}", entries.join(","));
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    file.resize(file.len() + at as usize, 7);
    file
}

fn ours(file: &[u8]) -> Option<Header> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    Header::parse(&file[8..8 + length], (file.len() - 8 - length) as u64).ok()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_000) })]
    #[test]
    fn what_one_accepts_the_other_does_and_reads_alike(
        tensors in proptest::collection::vec(("[a-e]", 0..DTYPES.len(), proptest::collection::vec(0..4u64, 0..4)), 1..5),
        change in proptest::option::of((any::<prop::sample::Index>(), -2..3i64)),
    ) {
        let change = change.map(|(index, by)| (index.index(100), by));
        let file = file(&tensors, change);
        let (ours, theirs) = (ours(&file), SafeTensors::deserialize(&file).ok());
        let mut names: Vec<&String> = tensors.iter().map(|tensor| &tensor.0).collect();
        names.sort();
        names.dedup();
        let empty = tensors.iter().all(|(_, _, shape)| shape.contains(&0));
        if names.len() < tensors.len() || empty {
            // The crate keeps the last of two tensors of one name, and takes a model without a byte.
            prop_assert!(ours.is_none());
            return Ok(());
        }
        prop_assert_eq!(ours.is_some(), theirs.is_some(), "{}", String::from_utf8_lossy(&file));
        for tensor in ours.iter().flat_map(|header| &header.tensors) {
            let view = theirs.as_ref().unwrap().tensor(&tensor.name).unwrap();
            let shape: Vec<u64> = view.shape().iter().map(|&side| side as u64).collect();
            prop_assert_eq!((&tensor.shape, tensor.bytes), (&shape, view.data().len() as u64));
            prop_assert_eq!(tensor.dtype.text(), view.dtype().to_string());
            let begin = ours.as_ref().unwrap().data_begin + tensor.begin;
            prop_assert_eq!(&file[begin as usize..][..view.data().len()].as_ptr(), &view.data().as_ptr());
        }
    }
}
