//! The ring: how it is written, and how any bytes are read as one.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use super::{Event, Record};

/// The first word of a ring.
pub const MAGIC: u64 = u64::from_le_bytes(*b"gshtrace");
/// Version of the layout and of the events.
pub const VERSION: u64 = 1;
/// Length of a ring in words: some 160 KiB.
pub const WORDS: usize = HEADER + RECORD * (CAPACITY[0] + CAPACITY[1]);

const HEADER: usize = 16;
const RECORD: usize = 8;
const CAPACITY: [usize; 2] = [2048, 512];
const HEADS: usize = 6;

/// Where the slot of a record begins, in words.
#[allow(clippy::cast_possible_truncation)] // the remainder of a division by a capacity
fn slot(lane: usize, number: u64) -> usize {
    let before = if lane == 0 { 0 } else { CAPACITY[0] };
    HEADER + RECORD * (before + (number % CAPACITY[lane] as u64) as usize)
}

/// Every word counts, and no two words that change can be sure to cancel out.
fn check(words: &[u64; RECORD - 1]) -> u64 {
    let mix = |sum: u64, word: &u64| (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    words.iter().fold(0x6773_6861_7265, mix)
}

/// The writing side, used by all threads of a process at once.
#[derive(Debug)]
pub struct Recorder<'a> {
    words: &'a [AtomicU64; WORDS],
}

impl<'a> Recorder<'a> {
    /// Makes a ring of words that are 0. `traced` is the set of
    /// [`Category::bit`](super::Category::bit)s that it writes.
    pub fn new(words: &'a [AtomicU64; WORDS], process: u32, now_ns: u64, traced: u64) -> Self {
        let header = [VERSION, process.into(), traced, now_ns];
        for (to, word) in words[1..].iter().zip(header) {
            to.store(word, Relaxed);
        }
        // Last: before it is there, nothing is a ring.
        words[0].store(MAGIC, core::sync::atomic::Ordering::Release);
        Self { words }
    }

    /// Writes one record, over the oldest of its lane.
    pub fn record(&self, time_ns: u64, thread: u32, device: Option<u16>, event: Event) {
        let lane = event.lane() as usize;
        let (kind, [a, b, c, d]) = event.encode();
        let number = self.words[HEADS + lane].fetch_add(1, Relaxed);
        let device = u64::from(device.map_or(u16::MAX, |device| device.min(u16::MAX - 1)));
        let head = u64::from(kind) << 56 | device << 32 | u64::from(thread);
        let words = [number + 1, time_ns, head, a, b, c, d];
        let at = slot(lane, number);
        for (to, word) in self.words[at..].iter().zip(words.into_iter().chain([check(&words)])) {
            to.store(word, Relaxed);
        }
    }
}

/// Why something is not a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// Another file, or one that is being made.
    #[error("not a trace ring: it does not begin with the magic number")]
    Magic,
    /// Written by another version of gshare.
    #[error(
        "trace ring of version {version}, this gshare reads version {VERSION}: use the gshare that belongs to the process's hook"
    )]
    Version {
        /// The version found.
        version: u64,
    },
    /// A part of a ring, or more than one.
    #[error("trace ring of {have} bytes, one has {need}")]
    Length {
        /// Bytes found.
        have: usize,
        /// Bytes of a ring.
        need: usize,
    },
}

/// The content of a ring at some time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The process, as it numbers itself in its own namespace.
    pub process: u32,
    /// When the ring was made, ns of `CLOCK_MONOTONIC`.
    pub begun_ns: u64,
    /// The set of [`Category::bit`](super::Category::bit)s that it writes.
    pub traced: u64,
    /// The records that were readable, in the order of time.
    pub records: Vec<Record>,
    /// Records that were being written, or never finished.
    pub torn: u64,
    /// Records that were overwritten before they could be read.
    pub lost: u64,
    next: [u64; 2],
}

impl Snapshot {
    /// Reads the bytes of a ring.
    pub fn read(bytes: &[u8]) -> Result<Self, RingError> {
        Self::read_from(bytes, [0; 2])
    }

    /// Reads what is newer than this snapshot of the same ring.
    pub fn newer(&self, bytes: &[u8]) -> Result<Self, RingError> {
        Self::read_from(bytes, self.next)
    }

    fn read_from(bytes: &[u8], after: [u64; 2]) -> Result<Self, RingError> {
        let word = |at: usize| {
            let bytes = bytes.get(at * 8..)?.first_chunk()?;
            Some(u64::from_ne_bytes(*bytes))
        };
        if word(0) != Some(MAGIC) {
            return Err(RingError::Magic);
        }
        match word(1) {
            Some(VERSION) => {}
            Some(version) => return Err(RingError::Version { version }),
            None => return Err(RingError::Length { have: bytes.len(), need: WORDS * 8 }),
        }
        if bytes.len() != WORDS * 8 {
            return Err(RingError::Length { have: bytes.len(), need: WORDS * 8 });
        }
        let words: Vec<u64> =
            bytes.as_chunks().0.iter().map(|word: &[u8; 8]| u64::from_ne_bytes(*word)).collect();
        let mut snapshot = Self {
            process: u32::try_from(words[2]).unwrap_or(0),
            traced: words[3],
            begun_ns: words[4],
            records: Vec::new(),
            torn: 0,
            lost: 0,
            next: after,
        };
        for lane in 0..CAPACITY.len() {
            snapshot.read_lane(&words, lane);
        }
        snapshot.records.sort_by_key(|record| record.time_ns);
        Ok(snapshot)
    }

    fn read_lane(&mut self, words: &[u64], lane: usize) {
        let (after, head, capacity) = (self.next[lane], words[HEADS + lane], CAPACITY[lane] as u64);
        let first = after.max(head.saturating_sub(capacity));
        self.lost = self.lost.saturating_add(first - after);
        for number in first..head {
            let at = slot(lane, number);
            match words[at..].first_chunk().and_then(|words| decode(words, number, lane)) {
                Some(record) => self.records.push(record),
                None => self.torn += 1,
            }
        }
        self.next[lane] = head.max(after);
    }
}

fn decode(words: &[u64; RECORD], number: u64, lane: usize) -> Option<Record> {
    let content: &[u64; RECORD - 1] = words.first_chunk()?;
    if words[RECORD - 1] != check(content) || content[0] != number.wrapping_add(1) {
        return None;
    }
    let [_, time_ns, head, a, b, c, d] = *content;
    let [kind, zero, device_high, device_low, thread @ ..] = head.to_be_bytes();
    let device = u16::from_be_bytes([device_high, device_low]);
    let event =
        Event::decode(kind, [a, b, c, d]).filter(|event| event.lane() as usize == lane && zero == 0)?;
    Some(Record {
        number,
        time_ns,
        thread: u32::from_be_bytes(thread),
        device: Some(device).filter(|&device| device != u16::MAX),
        event,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Category, Denial, End, Why};
    use super::*;
    use proptest::prelude::*;

    fn empty() -> Box<[AtomicU64; WORDS]> {
        let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        words.into_boxed_slice().try_into().unwrap()
    }

    fn bytes(words: &[AtomicU64; WORDS]) -> Vec<u8> {
        words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect()
    }

    fn waited(n: u64) -> Event {
        Event::Waited { why: Why::Token { asked_ns: n }, waited_ns: n, cost_ns: n * 3, end: End::Launched }
    }

    const DENIED: Event = Event::Denied { bytes: 3, used: 2, limit: 4, denial: Denial::OverLimit };

    #[test]
    fn records_come_back_in_the_order_of_time_and_only_once() {
        let words = empty();
        let ring = Recorder::new(&words, 7, 9, Category::Gate.bit());
        ring.record(20, 1, Some(0), waited(1));
        ring.record(10, 2, None, DENIED);
        let first = Snapshot::read(&bytes(&words)).unwrap();
        assert_eq!((first.process, first.begun_ns, first.traced), (7, 9, 1));
        let expected = [
            Record { number: 0, time_ns: 10, thread: 2, device: None, event: DENIED },
            Record { number: 0, time_ns: 20, thread: 1, device: Some(0), event: waited(1) },
        ];
        assert_eq!(first.records, expected);
        assert_eq!((first.torn, first.lost), (0, 0));
        ring.record(30, 1, Some(0), waited(2));
        let second = first.newer(&bytes(&words)).unwrap();
        assert_eq!(second.records.iter().map(|record| record.time_ns).collect::<Vec<_>>(), [30]);
    }

    #[test]
    fn what_is_overwritten_is_counted_and_a_lane_leaves_the_other_alone() {
        let words = empty();
        let ring = Recorder::new(&words, 1, 0, 7);
        ring.record(0, 1, None, DENIED);
        for n in 0..CAPACITY[0] as u64 + 5 {
            ring.record(n, 1, Some(0), waited(n));
        }
        let snapshot = Snapshot::read(&bytes(&words)).unwrap();
        assert_eq!((snapshot.lost, snapshot.torn, snapshot.records.len()), (5, 0, CAPACITY[0] + 1));
        assert_eq!(snapshot.records[0].event, DENIED);
        assert_eq!(snapshot.records[1].event, waited(5));
    }

    #[test]
    fn other_files_parts_and_versions_are_told_apart() {
        let words = empty();
        Recorder::new(&words, 1, 0, 7);
        let good = bytes(&words);
        assert_eq!(Snapshot::read(b""), Err(RingError::Magic));
        assert_eq!(Snapshot::read(&[0; WORDS * 8]), Err(RingError::Magic));
        let short = RingError::Length { have: 20, need: WORDS * 8 };
        assert_eq!(Snapshot::read(&good[..20]), Err(short));
        let mut other = good;
        other[8] = 9;
        assert_eq!(Snapshot::read(&other), Err(RingError::Version { version: 9 }));
    }

    proptest! {
        /// A slot whose words are some of one record and some of another is torn, unless it is one of the two.
        #[test]
        fn torn_records_are_never_believed(old in 0u64..1000, new in 0u64..1000, mask in 0u8..=255) {
            let words = empty();
            let ring = Recorder::new(&words, 1, 0, 7);
            ring.record(old, 1, Some(0), waited(old));
            let before: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
            // The same slot, a lap later.
            words[HEADS].store(CAPACITY[0] as u64, Relaxed);
            ring.record(new, 2, Some(1), waited(new));
            for place in (0..RECORD).filter(|place| mask >> place & 1 == 1) {
                words[HEADER + place].store(before[HEADER + place], Relaxed);
            }
            let snapshot = Snapshot::read(&bytes(&words)).unwrap();
            let read = snapshot.records.iter().find(|record| record.number == CAPACITY[0] as u64);
            match read {
                Some(record) => prop_assert_eq!((record.event, record.thread), (waited(new), 2)),
                None => prop_assert!(mask != 0),
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            heads in any::<[u64; 2]>(),
            places in proptest::collection::vec((0..WORDS, any::<u64>()), 0..50),
        ) {
            let words = empty();
            Recorder::new(&words, 1, 0, 7);
            for (place, word) in places.into_iter().filter(|(place, _)| *place > 1) {
                words[place].store(word, Relaxed);
            }
            words[HEADS].store(heads[0], Relaxed);
            words[HEADS + 1].store(heads[1], Relaxed);
            let snapshot = Snapshot::read(&bytes(&words)).unwrap();
            prop_assert!(snapshot.records.len() <= CAPACITY[0] + CAPACITY[1]);
            let _ = snapshot.newer(&bytes(&words)).unwrap();
        }
    }

    /// Several writers that lap each other, and a reader: all that is read was written.
    #[test]
    fn writers_and_readers_need_no_lock() {
        let words = empty();
        let ring = Recorder::new(&words, 1, 0, 7);
        std::thread::scope(|scope| {
            for thread in 0..3u32 {
                let ring = &ring;
                scope.spawn(move || {
                    for n in 0..20_000 {
                        ring.record(n, thread, Some(0), waited(n));
                    }
                });
            }
            for _ in 0..20 {
                for record in Snapshot::read(&bytes(&words)).unwrap().records {
                    assert_eq!(record.event, waited(record.time_ns));
                }
            }
        });
        let last = Snapshot::read(&bytes(&words)).unwrap();
        assert_eq!(last.lost, 60_000 - CAPACITY[0] as u64);
    }
}
