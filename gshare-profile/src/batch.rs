//! What a batch is on the wire: the bodies of its requests, one after the other, and a header with their lengths.
//!
//! ```text
//! POST / HTTP/1.1                    HTTP/1.1 200 OK
//! gshare-batch: 5,7                  gshare-batch: 3,3
//!
//! firstsecond!                       onetwo
//! ```
//! The answer has as many parts, in the same order. A batch of one may be answered without the header: its bytes are the request's.
//! `gshare-batch-status: 200,404` gives each part a status of its own; without it each has the status of the answer.

use core::ops::Range;

/// Lengths of the parts, in bytes, with commas between them.
pub const LENGTHS: &str = "gshare-batch";
/// Statuses of the parts of an answer, with commas between them.
pub const STATUSES: &str = "gshare-batch-status";

/// The header's text for parts of these lengths.
pub fn lengths(parts: impl IntoIterator<Item = usize>) -> String {
    parts.into_iter().map(|length| length.to_string()).collect::<Vec<_>>().join(",")
}

/// The parts of a body of `bytes` by its header; without the header the body is one part.
///
/// # Errors
/// What the header says and what there is.
pub fn split(header: Option<&str>, bytes: usize, parts: usize) -> Result<Vec<Range<usize>>, String> {
    let whole = bytes.to_string();
    let (text, mut at) = (header.unwrap_or(&whole), 0_usize);
    let mut found = Vec::new();
    for length in text.split(',') {
        let length =
            length.trim().parse().map_err(|_| format!("{LENGTHS}: `{text}`: need lengths in bytes"))?;
        let end = at.checked_add(length).filter(|end| *end <= bytes);
        let end = end.ok_or_else(|| format!("{LENGTHS}: `{text}`: need lengths of {bytes} bytes in all"))?;
        found.push(at..end);
        at = end;
    }
    match (found.len() == parts, at == bytes) {
        (false, _) => Err(format!("{LENGTHS}: `{text}`: need {parts} lengths, one for each request")),
        (_, false) => Err(format!("{LENGTHS}: `{text}`: need lengths of {bytes} bytes in all")),
        _ => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_split_as_its_header_says_and_refused_where_it_does_not_fit() {
        assert_eq!(split(Some(&lengths([5, 0, 7])), 12, 3).unwrap(), [0..5, 5..5, 5..12]);
        assert_eq!(split(None, 12, 1).unwrap(), vec![0..12]);
        for (header, parts, says) in [
            (Some("5,8"), 2, "12 bytes in all"),
            (Some("5"), 1, "12 bytes in all"),
            (Some("5,7"), 3, "need 3 lengths"),
            (None, 2, "need 2 lengths"),
            (Some("5,x"), 2, "`5,x`: need lengths in bytes"),
            (Some("18446744073709551615,1"), 2, "12 bytes in all"),
        ] {
            let refused = split(header, 12, parts).unwrap_err();
            assert!(refused.contains(says), "{header:?}: {refused}");
        }
    }
}
