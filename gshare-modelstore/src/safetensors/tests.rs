use super::*;

fn parse(json: &str, data: u64) -> Result<Header, HeaderError> {
    Header::parse(json.as_bytes(), data)
}

#[test]
fn tensors_come_in_the_order_of_their_data() {
    let json = r#"{"b":{"dtype":"F32","shape":[2,2],"data_offsets":[2,18]},"__metadata__":{"format":"pt"},
        "a":{"dtype":"F16","shape":[],"data_offsets":[0,2]},"empty":{"dtype":"I64","shape":[0,7],"data_offsets":[2,2]}}"#;
    let header = parse(json, 18).unwrap();
    let names: Vec<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["a", "empty", "b"]);
    assert_eq!(header.data_begin, 8 + json.len() as u64);
    let again = Header::encode(&[("a", Dtype::F16, &[]), ("b", Dtype::F32, &[2, 2])]);
    assert_eq!(Header::parse(&again[8..], 18).unwrap().data_bytes, 18);
}

#[test]
fn types_of_less_than_a_byte_and_types_that_come_later_are_taken() {
    let json = |dtype: &str, bytes: u64| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":[8,3],"data_offsets":[0,{bytes}]}}}}"#)
    };
    for (dtype, bytes) in [("F4", 12), ("F6_E2M3", 18), ("F6_E3M2", 18), ("F8_E4M3", 24), ("INT3_BLOCK", 11)]
    {
        let header = parse(&json(dtype, bytes), bytes).unwrap();
        assert_eq!(header.tensors[0].bytes, bytes, "{dtype}");
        assert_eq!(Dtype::from_code(header.tensors[0].dtype.code()), Some(header.tensors[0].dtype));
    }
    assert!(matches!(parse(&json("F4", 24), 24), Err(HeaderError::BadOffsets { need: 12, .. })));
    assert!(parse(&json("INT3_BLOCK", 11), 10).is_err(), "more than the file has");
}

#[test]
fn a_header_that_lies_is_refused_with_what_is_wrong() {
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let refused = |shape: &str, offsets: &str| parse(&tensor(shape, offsets), 4).unwrap_err();
    assert!(parse(&tensor("[4]", "[0,4]"), 4).is_ok());
    assert!(matches!(refused("[3]", "[0,4]"), HeaderError::BadOffsets { need: 3, .. }));
    assert!(matches!(refused("[4]", "[4,0]"), HeaderError::BadOffsets { .. }));
    assert!(matches!(refused("[4]", "[1,5]"), HeaderError::HoleOrOverlap { expected: 0, .. }));
    assert!(matches!(refused("[5]", "[0,5]"), HeaderError::WrongSize { data: 5, file: 4 }));
    assert!(matches!(refused("[4294967296,4294967296]", "[0,4]"), HeaderError::BadShape { .. }));
    assert!(matches!(refused("[0,4294967296,4294967296]", "[0,0]"), HeaderError::BadShape { .. }));
    assert!(matches!(refused(&format!("[{}1]", "1,".repeat(32)), "[0,4]"), HeaderError::BadShape { .. }));
    for bad in ["[NaN]", "[-1]", "[1.5]", "[1e30]", "null", "[\"4\"]", "[18446744073709551616]"] {
        assert!(matches!(refused(bad, "[0,4]"), HeaderError::Malformed { .. }), "{bad}");
    }
    assert!(matches!(refused("[4]", "[0,1000000000000]"), HeaderError::BadOffsets { .. }));
    let two = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    assert!(matches!(parse(two, 4), Err(HeaderError::Malformed { why }) if why.contains("two tensors")));
    let overlap = two.replacen("\"a\"", "\"b\"", 1);
    assert!(matches!(parse(&overlap, 4), Err(HeaderError::HoleOrOverlap { expected: 4, .. })));
    let odd = tensor("[3]", "[0,2]").replace("U8", "F4");
    assert!(matches!(parse(&odd, 2), Err(HeaderError::BadShape { .. })), "one and a half bytes");
    assert_eq!(parse("{}", 0), Err(HeaderError::Empty));
    assert_eq!(parse("{}", 4), Err(HeaderError::Empty));
    assert!(matches!(parse("{} x", 0), Err(HeaderError::Malformed { .. })));
    assert_eq!(header_length([0xff; 8], 100), Err(HeaderError::BadLength { bytes: u64::MAX, limit: 92 }));
    assert_eq!(header_length([0; 8], 7), Err(HeaderError::TooShort { bytes: 7 }));
    assert_eq!(
        header_length((1u64 << 40).to_le_bytes(), u64::MAX).unwrap_err().to_string(),
        "header length is 1099511627776: at most 100000000 here (file or format)"
    );
}

#[test]
fn more_tensors_than_allowed_are_refused_before_the_rest_is_read() {
    let mut json = String::from("{");
    for index in 0..=MAX_TENSORS {
        json.push_str(&format!("\"{index}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}},"));
    }
    assert_eq!(parse(&json, 0), Err(HeaderError::TooManyTensors { limit: MAX_TENSORS }));
}
