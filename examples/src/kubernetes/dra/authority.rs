//! Connections of a kubelet, which names the socket it dials by a path.
//!
//! The kubelet dials a registration socket by its path, and gRPC for Go makes an `:authority` of it: `%2Fvar%2Flib%2F...`.
//! No authority of RFC 3986 looks like that to the HTTP library under tonic, which resets the stream. A server on a UNIX
//! socket does not need the authority, so [`Tolerant`] replaces it before the library reads it.
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

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

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
#[derive(Debug)]
pub struct Tolerant {
    stream: UnixStream,
    /// Received bytes that were not passed on: at most a frame and a read.
    raw: Vec<u8>,
    /// Bytes ready to be read, from `at` on.
    out: Vec<u8>,
    at: usize,
    greeted: bool,
}

impl From<UnixStream> for Tolerant {
    fn from(stream: UnixStream) -> Self {
        Self { stream, raw: Vec::new(), out: Vec::new(), at: 0, greeted: false }
    }
}

impl Tolerant {
    /// Moves whole frames from `raw` to `out`.
    fn pass(&mut self) -> io::Result<()> {
        let mut done = 0;
        if !self.greeted && self.raw.len() >= PREFACE {
            done = PREFACE;
            self.greeted = true;
            self.out.extend(&self.raw[..done]);
        }
        while let Some(head @ &[a, b, c, kind, flags, ..]) =
            self.raw.get(done..done + HEAD).filter(|_| self.greeted)
        {
            let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            if length > LARGEST {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "an HTTP/2 frame above 16384 bytes"));
            }
            let Some(payload) = self.raw.get(done + HEAD..done + HEAD + length) else { break };
            match rewrite(kind, flags, payload) {
                Some(payload) => {
                    let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
                    self.out.extend(&length[1..]);
                    self.out.extend(&head[3..]);
                    self.out.extend(payload);
                }
                None => self.out.extend(&self.raw[done..done + HEAD + length]),
            }
            done += HEAD + length;
        }
        self.raw.drain(..done);
        Ok(())
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
                0 => is_authority(string(block, &mut at)?),
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

fn is_authority((huffman, name): (bool, &[u8])) -> bool {
    name == if huffman { &HUFFMAN[..] } else { b":authority" }
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

impl AsyncRead for Tolerant {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.at == this.out.len() {
            (this.at, this.out) = (0, Vec::new());
            let mut bytes = [0; 4096];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                // The end, perhaps within a frame.
                this.out = std::mem::take(&mut this.raw);
                break;
            }
            this.raw.extend(read.filled());
            this.pass()?;
        }
        let length = buffer.remaining().min(this.out.len() - this.at);
        buffer.put_slice(&this.out[this.at..this.at + length]);
        this.at += length;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tolerant {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Tolerant {
    type ConnectInfo = ();

    fn connect_info(&self) {}
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
