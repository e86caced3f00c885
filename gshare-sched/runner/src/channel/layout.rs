//! Where what lies in a channel's file, and what the words in it mean. Pure: the file is mapped in `map.rs`, by places that are
//! computed and checked here, so that all of it is tested without shared memory.

use super::ChannelError;
use std::ops::Range;

pub(super) const MAGIC: u64 = 0x6773_6861_7265_6368;
pub(super) const VERSION: u32 = 3;
pub(super) const PAGE: u64 = 4096;
/// Bytes of a descriptor: a cache line.
const DESCRIPTOR: u64 = 64;
/// The most slots of a channel.
const MAX_SLOTS: u32 = 1024;
/// The most bytes of all slots: 1 TiB.
const MAX_BYTES: u64 = 1 << 40;

// Places in the first page. Words that different sides write are a cache line apart.
pub(super) const AT_MAGIC: u64 = 0;
pub(super) const AT_VERSION: u64 = 8;
pub(super) const AT_SLOTS: u64 = 12;
pub(super) const AT_SLOT_BYTES: u64 = 16;
pub(super) const AT_HEAD: u64 = 128;
/// On the line of the counter: length and tag of the last even and the last odd message.
const AT_LATEST: u64 = AT_HEAD + 16;
pub(super) const AT_HEAD_ASLEEP: u64 = 192;
pub(super) const AT_TAIL: u64 = 256;
pub(super) const AT_TAIL_ASLEEP: u64 = 320;
pub(super) const AT_SENDER_CLOSED: u64 = 384;
pub(super) const AT_RECEIVER_CLOSED: u64 = 448;

/// The first words of a file, as they were copied out of it. The other process may change the file at any time, so each is read
/// once, and only the copy is checked and used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) magic: u64,
    pub(super) version: u32,
    pub(super) slots: u32,
    pub(super) slot_bytes: u64,
}

/// Sizes of a channel that were checked: every place below lies within `bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) slots: u32,
    pub(super) slot_bytes: u64,
    /// Bytes of the file.
    pub(super) bytes: u64,
    /// Where the slots begin.
    data: u64,
}

impl Layout {
    /// The layout of a new channel.
    pub(super) fn new(slots: u32, slot_bytes: u64) -> Result<Self, ChannelError> {
        if !(2..=MAX_SLOTS).contains(&slots) || !slots.is_power_of_two() {
            let bound = "need a power of two from 2 to 1024";
            return Err(ChannelError::BadSize { field: "slots", value: slots.into(), bound });
        }
        if slot_bytes == 0 || slot_bytes > MAX_BYTES / u64::from(slots) {
            let bound = "need more than 0, and at most 1 TiB for all slots";
            return Err(ChannelError::BadSize { field: "slot_bytes", value: slot_bytes, bound });
        }
        let data = PAGE + (u64::from(slots) * DESCRIPTOR).next_multiple_of(PAGE);
        let bytes = data + u64::from(slots) * slot_bytes.next_multiple_of(PAGE);
        Ok(Self { slots, slot_bytes, bytes, data })
    }

    /// The layout of a file of `bytes` that another process made.
    pub(super) fn of(header: Header, bytes: u64) -> Result<Self, ChannelError> {
        if (header.magic, header.version) != (MAGIC, VERSION) {
            return Err(ChannelError::Foreign { what: "it has another mark or version" });
        }
        let layout = Self::new(header.slots, header.slot_bytes)?;
        match layout.bytes == bytes {
            true => Ok(layout),
            false => Err(ChannelError::Foreign { what: "its size is not that of its slots" }),
        }
    }

    /// The slot of a message: the number of slots is a power of two.
    #[inline]
    fn slot_of(&self, message: u32) -> u64 {
        (message & (self.slots - 1)).into()
    }

    /// The descriptor of a message: its length, its tag, how far its copy has come, and how often one was begun, 8 bytes each.
    #[inline]
    pub(super) fn descriptor(&self, message: u32) -> u64 {
        PAGE + self.slot_of(message) * DESCRIPTOR
    }

    /// Length and tag of the last message that was published with the same lowest bit as this one, 8 bytes each.
    #[inline]
    pub(super) fn latest(message: u32) -> u64 {
        AT_LATEST + u64::from(message % 2) * 16
    }

    /// The bytes of a message's slot.
    #[inline]
    pub(super) fn slot(&self, message: u32) -> Range<u64> {
        let at = self.data + self.slot_of(message) * self.slot_bytes.next_multiple_of(PAGE);
        at..at + self.slot_bytes
    }
}

/// How far the copy of a message has come. In its word: the message's number in the upper half; in the lower one bit
/// for `far`, and below it the chunks, all ones for none that are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Coming {
    /// [`CHUNK`](super::map::CHUNK)s that are there; none if it is all there.
    pub(super) chunks: Option<u64>,
    /// The chunks that are there are in memory, not in the sender's cache.
    pub(super) far: bool,
}

const FAR: u64 = 1 << 31;

impl Coming {
    #[inline]
    pub(super) fn of(message: u32, word: u64) -> Option<Self> {
        let chunks = word & (FAR - 1);
        let chunks = (chunks != FAR - 1).then_some(chunks);
        (word >> 32 == u64::from(message)).then_some(Self { chunks, far: word & FAR != 0 })
    }

    #[inline]
    pub(super) fn word(self, message: u32) -> u64 {
        let chunks = self.chunks.unwrap_or(FAR - 1);
        u64::from(message) << 32 | if self.far { FAR } else { 0 } | chunks
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sizes near every bound, and any.
    fn header() -> impl Strategy<Value = Header> {
        let slots = prop_oneof![(0u32..12).prop_map(|n| 1 << n), any::<u32>(), 0u32..9];
        let near = |at: u64| (0u64..5).prop_map(move |n| at.saturating_sub(2).saturating_add(n));
        let bytes = prop_oneof![
            (0u32..64).prop_flat_map(move |n| near(1 << n)),
            any::<u64>(),
            Just(u64::MAX),
            1u64..20_000
        ];
        let magic = prop_oneof![9 => Just(MAGIC), 1 => any::<u64>()];
        let version = prop_oneof![9 => Just(VERSION), 1 => any::<u32>()];
        (magic, version, slots, bytes).prop_map(|(magic, version, slots, slot_bytes)| Header {
            magic,
            version,
            slots,
            slot_bytes,
        })
    }

    proptest! {
        /// Any header is refused, or every place of every message lies in the file, aligned, and no two
        /// overlap.
        #[test]
        fn a_header_is_refused_or_all_places_lie_in_the_file(header in header(), size in any::<u64>(), first in any::<u32>()) {
            let Ok(Layout { bytes: right, .. }) = Layout::new(header.slots, header.slot_bytes) else {
                prop_assert!(Layout::of(header, size).is_err());
                return Ok(());
            };
            if size != right {
                prop_assert!(Layout::of(header, size).is_err());
            }
            let Ok(layout) = Layout::of(header, right) else {
                prop_assert!((header.magic, header.version) != (MAGIC, VERSION));
                return Ok(());
            };
            let mut last = AT_RECEIVER_CLOSED + 4;
            prop_assert!(Layout::latest(first) + 16 <= AT_HEAD_ASLEEP && Layout::latest(first) >= AT_HEAD + 4);
            let base = first - first % layout.slots;
            for message in base..=base + (layout.slots - 1) {
                let at = layout.descriptor(message);
                prop_assert!(at >= last && at.is_multiple_of(8));
                last = at + DESCRIPTOR;
            }
            for message in base..=base + (layout.slots - 1) {
                let slot = layout.slot(message);
                prop_assert!(slot.start >= last && slot.start.is_multiple_of(PAGE));
                prop_assert_eq!(slot.end - slot.start, header.slot_bytes);
                last = slot.end;
            }
            prop_assert!(last <= layout.bytes);
            prop_assert_eq!(layout.slot(first), layout.slot(first.wrapping_add(layout.slots)));
        }

        #[test]
        fn a_size_out_of_its_bounds_is_named(header in header()) {
            let fits = header.slots.is_power_of_two() && (2..=1024).contains(&header.slots);
            let room = header.slot_bytes > 0 && u128::from(header.slot_bytes) * u128::from(header.slots) <= 1 << 40;
            let field = match Layout::new(header.slots, header.slot_bytes) {
                Ok(_) => None,
                Err(ChannelError::BadSize { field, .. }) => Some(field),
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
            };
            prop_assert_eq!(field, if !fits { Some("slots") } else if !room { Some("slot_bytes") } else { None });
        }

        #[test]
        fn a_word_is_read_as_it_was_written_and_by_its_message_only(
            message: u32,
            other: u32,
            chunks in prop::option::of(0..FAR - 1),
            far: bool,
        ) {
            let coming = Coming { chunks, far };
            prop_assert_eq!(Coming::of(message, coming.word(message)), Some(coming));
            prop_assert_eq!(Coming::of(other, coming.word(message)).is_some(), other == message);
        }
    }
}
