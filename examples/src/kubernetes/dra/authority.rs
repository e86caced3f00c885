//! Connections of a kubelet, which names the socket it dials by a path.
//!
//! The kubelet dials a registration socket by its path, and gRPC for Go makes an `:authority` of it: `%2Fvar%2Flib%2F...`.
//! No authority of RFC 3986 looks like that to the HTTP library under tonic, which resets the stream. A server on a UNIX
//! socket does not need the authority, so [`tolerant`] replaces it before the library reads it.
//!
//! # Algorithm
//! HTTP/2 (RFC 9113) is cut into its frames. In the header block of a `HEADERS` frame, each literal field named
//! `:authority` gets the value `PLAIN`; all else passes unchanged. A block is parsed without its dynamic table, because a
//! reference to an earlier field finds the replaced entry.
//!
//! # Invariants
//! - HPACK (RFC 7541) evicts by size and counts entries from the newest. `PLAIN` is not longer than the replaced value, so
//!   the reader's table holds at least the writer's entries, and every reference finds its entry.
//! - An unreadable block passes unchanged, such as a block over several frames or a truncated field. The library handles it
//!   as usual.

use std::future::pending;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, copy, duplex};
use tokio::net::UnixStream;

/// The authority that the library sees, as a string of HPACK: its length, and one letter.
const PLAIN: [u8; 2] = [1, b'k'];
/// Length of the client's preface before its first frame.
const PREFACE: usize = 24;
/// Length, type, flags, stream.
const HEAD: usize = 9;
/// Bytes of a frame that a server which has not asked for more may be sent.
const LARGEST: usize = 16_384;
/// Type of the frame that opens a header block.
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
const PRIORITY: u8 = 32;
/// Index of `:authority` in the static table.
const AUTHORITY: usize = 1;
/// The same name in the Huffman code of HPACK.
const HUFFMAN: [u8; 8] = [0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// A connection that accepts any authority from its client.
pub fn tolerant(stream: UnixStream) -> DuplexStream {
    let (near, far) = duplex(LARGEST);
    tokio::spawn(async move {
        let (mut from, mut to) = stream.into_split();
        let (mut answers, mut asked) = tokio::io::split(far);
        let ask = async {
            // The end of the connection, or an error that ends it for the server too.
            let _ = pass(&mut from, &mut asked).await;
            let _ = asked.shutdown().await;
            pending::<()>().await;
        };
        tokio::select! {
            _ = copy(&mut answers, &mut to) => {}
            () = ask => {}
        }
    });
    near
}

/// Passes a client's frames on, until the client ends.
async fn pass(from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    let (mut preface, mut head) = ([0; PREFACE], [0; HEAD]);
    from.read_exact(&mut preface).await?;
    to.write_all(&preface).await?;
    loop {
        from.read_exact(&mut head).await?;
        let [a, b, c, kind, flags, ..] = head;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        if length > LARGEST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an HTTP/2 frame above 16384 bytes"));
        }
        let mut payload = vec![0; length];
        from.read_exact(&mut payload).await?;
        let payload = rewrite(kind, flags, &payload).unwrap_or(payload);
        let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
        to.write_all(&[&length[1..], &head[3..], &payload].concat()).await?;
    }
}

/// The payload with another authority, if it is a whole header block that can be read.
fn rewrite(kind: u8, flags: u8, payload: &[u8]) -> Option<Vec<u8>> {
    if kind != HEADERS || flags & END_HEADERS == 0 {
        return None;
    }
    let (mut start, mut padding) = (0, 0);
    if flags & PADDED != 0 {
        (start, padding) = (1, usize::from(*payload.first()?));
    }
    if flags & PRIORITY != 0 {
        start += 5;
    }
    let end = payload.len().checked_sub(padding)?;
    let block = payload.get(start..end)?;
    let mut new = payload[..start].to_vec();
    let mut at = 0;
    while let Some(&first) = block.get(at) {
        let field = at;
        // RFC 7541, section 6: the meaning of the first bits, and the number of bits left for a number.
        let (bits, literal) = match first {
            0x80.. => (7, false),
            0x40..0x80 => (6, true),
            0x20..0x40 => (5, false),
            0x00..0x20 => (4, true),
        };
        let index = number(block, &mut at, bits)?;
        if literal {
            let named = match index {
                0 => [(true, &HUFFMAN[..]), (false, b":authority")].contains(&string(block, &mut at)?),
                index => index == AUTHORITY,
            };
            let value = at;
            if named && !string(block, &mut at)?.1.is_empty() {
                new.extend(&block[field..value]);
                new.extend(PLAIN);
                continue;
            } else if !named {
                string(block, &mut at)?;
            }
        }
        new.extend(&block[field..at]);
    }
    new.extend(&payload[end..]);
    Some(new)
}

/// Section 5.1: a number in the last `bits` of a byte, and the bytes after it if they do not hold it.
fn number(block: &[u8], at: &mut usize, bits: u32) -> Option<usize> {
    let mask = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(*at)?) & mask;
    *at += 1;
    if value < mask {
        return Some(value);
    }
    for shift in [0, 7, 14] {
        let byte = *block.get(*at)?;
        *at += 1;
        value += usize::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// Section 5.2: whether a string is in the Huffman code, and its bytes.
fn string<'a>(block: &'a [u8], at: &mut usize) -> Option<(bool, &'a [u8])> {
    let huffman = *block.get(*at)? & 0x80 != 0;
    let length = number(block, at, 7)?;
    let bytes = block.get(*at..*at + length)?;
    *at += length;
    Some((huffman, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_is_replaced_in_each_form_and_all_else_stays() {
        let path = [&[0x04, 4][..], b"/a/b"].concat();
        let value = [&[9][..], b"%2Fvar%2F"].concat();
        let coded = vec![0x83, 1, 2, 3];
        let named = [&[0x40, 10][..], b":authority"].concat();
        let named_coded = [&[0x00, 0x88][..], &HUFFMAN].concat();
        let heads = [vec![0x41], vec![0x01], vec![0x11], named, named_coded];
        for (head, value) in heads.iter().flat_map(|head| [(head, &value), (head, &coded)]) {
            let block = |value: &[u8]| [&[0x83, 0x3f, 0xe1, 0x1f, 0x86], &path[..], head, value].concat();
            assert_eq!(rewrite(HEADERS, END_HEADERS, &block(value)), Some(block(&PLAIN)));
            // Padding and a priority stay around it.
            let around = |block: Vec<u8>| [&[2, 0, 0, 0, 0, 7][..], &block, &[0, 0]].concat();
            let flags = END_HEADERS | PADDED | PRIORITY;
            assert_eq!(rewrite(HEADERS, flags, &around(block(value))), Some(around(block(&PLAIN))));
            assert_eq!(rewrite(HEADERS, 0, &block(value)), None, "goes on in another frame");
            assert_eq!(rewrite(0, END_HEADERS, &block(value)), None, "data");
            let cut = block(value);
            assert_eq!(rewrite(HEADERS, END_HEADERS, &cut[..cut.len() - 1]), None);
        }
        for odd in [&[][..], &[0x41, 0], &[0xbe], &[0x0f, 0x00, 1, b'x']] {
            assert_eq!(rewrite(HEADERS, END_HEADERS, odd).as_deref(), Some(odd));
        }
        for bad in [&[0x41][..], &[0x41, 0x7f], &[0x7f, 0xff, 0xff, 0xff, 0xff], &[0x00, 0x7f]] {
            assert_eq!(rewrite(HEADERS, END_HEADERS, bad), None);
        }
        assert_eq!(rewrite(HEADERS, END_HEADERS | PADDED, &[9, 0]), None);
    }
}
