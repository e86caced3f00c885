//! The frames: their bytes are pinned, an encoded frame decodes to itself, and no other bytes decode.

use gshare_modelstore::frame::{
    Answer, Code, FrameError, Handle, MAX_FRAME, MAX_NAME, MAX_TEXT, Request, Wanted,
};
use gshare_modelstore::store::{Access, ContentHash, MemoryTier};
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A change of these bytes is a new version of the format.
#[test]
fn the_bytes_of_version_1_stay_what_they_are() {
    let name = || String::from("m");
    let (tier, access) = (MemoryTier::Host, Access::Group);
    let content = ContentHash([0xab; 32]);
    let ab = "ab".repeat(32);
    let cases = [
        (
            Request::Get { tier, timeout_ms: 500, wanted: Wanted::Name(name()) },
            "0101110007000000 01 f4010000 00 0100 6d".to_owned(),
        ),
        (
            Request::Get { tier: MemoryTier::Gpu, timeout_ms: 0, wanted: Wanted::Content(content) },
            format!("01012e0007000000 00 00000000 01 {ab}"),
        ),
        (Request::Release { arena: 3 }, "0102100007000000 0300000000000000".into()),
        (Request::PutFile { tier, access, name: name() }, "01030d0007000000 01 01 0100 6d".into()),
        (
            Request::PutBegin { tier, access, header_bytes: 9, name: name() },
            "0104150007000000 01 01 0900000000000000 0100 6d".into(),
        ),
        (Request::Commit { arena: 3 }, "0105100007000000 0300000000000000".into()),
        (Request::Abort { arena: 3 }, "0106100007000000 0300000000000000".into()),
        (Request::Pin { pinned: true, name: name() }, "01070c0007000000 01 0100 6d".into()),
        (Request::Evict { forget: false, name: name() }, "01080c0007000000 00 0100 6d".into()),
        (Request::Verify { name: name() }, "01090b0007000000 0100 6d".into()),
        (Request::List, "010a080007000000".into()),
        (Request::Stat, "010b080007000000".into()),
        (Request::Status, "010c080007000000".into()),
    ];
    for (request, expected) in cases {
        let mut bytes = Vec::new();
        request.encode(7, &mut bytes);
        assert_eq!(hex(&bytes), expected.replace(' ', ""), "{request:?}");
    }
    let served = |handle| Answer::Served { arena: 3, bytes: 4, manifest_bytes: 5, content, handle };
    let three = "0300000000000000 0400000000000000 0500000000000000";
    let cases = [
        (served(Handle::HostFile), format!("0181410007000000 {three} {ab} 00")),
        (served(Handle::HostFiles), format!("0181410007000000 {three} {ab} 03")),
        (served(Handle::CudaVmm), format!("0181410007000000 {three} {ab} 01")),
        (Answer::Writable { arena: 3, bytes: 4, manifest_bytes: 5 }, format!("0182200007000000 {three}")),
        (Answer::Stored { content, bytes: 4 }, format!("0183300007000000 {ab} 0400000000000000")),
        (Answer::Done, "0184080007000000".into()),
        (Answer::Progress { done: 3, total: 4 }, "0185180007000000 0300000000000000 0400000000000000".into()),
        (Answer::Document { bytes: 4 }, "0186100007000000 0400000000000000".into()),
        (
            Answer::Refused { code: Code::StoreFull, text: "no".into() },
            "01870e0007000000 0500 0200 6e6f".into(),
        ),
    ];
    for (answer, expected) in cases {
        let mut bytes = Vec::new();
        answer.encode(7, &mut bytes);
        assert_eq!(hex(&bytes), expected.replace(' ', ""), "{answer:?}");
        assert_eq!(Answer::decode(&bytes), Ok((7, answer)));
    }
}

#[test]
fn a_name_or_text_that_is_too_long_never_makes_a_frame_that_is() {
    let mut bytes = Vec::new();
    Request::Verify { name: "x".repeat(70_000) }.encode(1, &mut bytes);
    assert_eq!(bytes.len(), 8 + 2 + MAX_NAME);
    bytes.clear();
    Answer::Refused { code: Code::Io, text: "\u{e9}".repeat(5_000) }.encode(1, &mut bytes);
    assert!(bytes.len() <= 8 + 4 + MAX_TEXT && Answer::decode(&bytes).is_ok(), "cut between characters");
}

#[test]
fn an_error_names_what_is_wrong() {
    let mut bytes = Vec::new();
    Request::Pin { pinned: true, name: "m".into() }.encode(1, &mut bytes);
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        Request::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(0, 2), FrameError::Version { version: 2 });
    assert_eq!(with(1, 99), FrameError::Kind { kind: 99 });
    assert_eq!(with(2, 99), FrameError::Length { bytes: 12 });
    assert_eq!(with(8, 2), FrameError::Field { field: "pinned" });
    assert_eq!(with(9, 2), FrameError::Field { field: "name" });
    assert_eq!(with(11, 0xff), FrameError::Field { field: "name" });
    assert_eq!(with(11, b'\n'), FrameError::Field { field: "name" }, "no control characters in names");
    assert_eq!(Request::decode(&[0; MAX_FRAME + 1]).unwrap_err(), FrameError::Version { version: 0 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn what_decodes_encodes_to_the_same_bytes(kind in 1u8..13, mut bytes in prop::collection::vec(any::<u8>(), 8..120), text in any::<bool>()) {
        let length = u16::try_from(bytes.len()).unwrap();
        (bytes[0], bytes[1]) = (1, if text { kind | 128 } else { kind });
        bytes[2..4].copy_from_slice(&length.to_le_bytes());
        let mut again = Vec::new();
        if let Ok((request, message)) = Request::decode(&bytes) {
            message.encode(request, &mut again);
            prop_assert_eq!(&again, &bytes);
        }
        again.clear();
        if let Ok((request, message)) = Answer::decode(&bytes) {
            message.encode(request, &mut again);
            prop_assert_eq!(&again, &bytes);
        }
    }
}
