//! Reasons: why a launch waits, a process is refused, a request is denied, or a connection ends.
//!
//! The hook, the daemon, its metrics and its journal, and `gshare why` all name a reason by the same enum. Each reason has a
//! code for the wire, a label for programs and a text for people, and the list below is the only place for all three.
//!
//! ```
//! use gshare_core::reason::{Reason, RefusalCode};
//!
//! let reason = Reason::from(RefusalCode::Full);
//! assert_eq!((reason.code(), reason.label()), (2, "full"));
//! assert_eq!(reason.to_string(), "the daemon serves as many clients as it may");
//! ```
//!
//! # Invariants
//! No two reasons share a code, and no two share a label.

use crate::units::Duration;

/// The wait of a launch before its process reports the reason to the daemon: longer than most hand-overs of a token, and a tenth
/// of a window.
pub const LONG_WAIT: Duration = Duration::from_millis(10);

macro_rules! reasons {
    ($($(#[$group_doc:meta])* $group:ident { $($code:literal $name:ident $label:literal $text:literal)+ })+) => {
        $(
            $(#[$group_doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
            #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
            #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
            #[non_exhaustive]
            pub enum $group {
                $(
                    #[doc = $text]
                    #[cfg_attr(feature = "serde", serde(rename = $label))]
                    $name,
                )+
            }

            impl $group {
                /// The number of the reason on the wire.
                pub const fn code(self) -> u8 {
                    match self { $(Self::$name => $code,)+ }
                }

                /// The reason with this number; `None` for a number outside this group.
                pub const fn from_code(code: u8) -> Option<Self> {
                    match code {
                        $($code => Some(Self::$name),)+
                        _ => None,
                    }
                }
            }

            impl From<$group> for Reason {
                fn from(reason: $group) -> Self {
                    Self::$group(reason)
                }
            }
        )+

        /// Any reason.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(untagged))]
        #[allow(missing_docs)] // a variant is named after its group
        pub enum Reason {
            $($group($group),)+
        }

        impl Reason {
            /// All reasons, group by group.
            pub const ALL: &[Self] = &[$($(Self::$group($group::$name),)+)+];

            /// The number of the reason on the wire.
            pub const fn code(self) -> u8 {
                match self { $(Self::$group(reason) => reason.code(),)+ }
            }

            /// The short, fixed name of the reason in metrics, the journal and JSON.
            pub const fn label(self) -> &'static str {
                match self { $($(Self::$group($group::$name) => $label,)+)+ }
            }

            /// The text of the reason for people.
            pub const fn text(self) -> &'static str {
                match self { $($(Self::$group($group::$name) => $text,)+)+ }
            }
        }

        impl core::fmt::Display for Reason {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.text())
            }
        }
    };
}

reasons! {
    /// Why a daemon refused a process or one of its devices.
    RefusalCode {
        0 DuplicateName "duplicate_name" "another run uses its name"
        1 NotAllowed "not_allowed" "its user may not use this daemon or this name"
        2 Full "full" "the daemon serves as many clients as it may"
        3 BadSpec "bad_spec" "the device cannot meet its request"
        4 UnknownDevice "unknown_device" "the daemon does not manage this device"
        5 Protocol "protocol" "a message did not fit the state of the connection"
    }
    /// Why a launch waits. The process itself knows the first four reasons and `Parked`, the daemon knows the others.
    Wait {
        16 Token "token" "the daemon was asked for a token, and has given none yet"
        17 InFlight "in_flight" "as much work is queued on the device as may be"
        18 Draining "draining" "its last token is used up, and work that was launched under it still runs"
        19 Measuring "measuring" "the cost of this kernel is being measured, by its first launch"
        20 Limit "limit" "the limit of its share is used up"
        21 Debt "debt" "overuse by an earlier process of its name is paid back"
        22 Paced "paced" "its overuse is paid back first, although SMs are free"
        23 Holder "holder" "others hold tokens, and its SMs do not fit beside theirs"
        24 Sibling "sibling" "another process of its instance holds the instance's token"
        25 Parked "parked" "its memory is in host memory, or on the way to or from there"
        26 Room "room" "its memory is in host memory, and waits for room on the device"
    }
    /// Why a client gets no memory, or no other share of its device.
    Denial {
        32 InstanceMemory "instance_memory" "the memory limit of its instance leaves less"
        33 DeviceMemory "device_memory" "the device has less memory left"
        35 Guaranteed "guaranteed" "the rest of the device is guaranteed to others"
        36 Residents "residents" "others keep their memory on the device for now"
        37 ParkMemory "park_memory" "host memory has no room for the programs that would have to park"
        34 NotScaled "not_scaled" "vertical scaling leaves its share as it is"
    }
    /// Why device memory of a process does not go to host memory, or does not come back.
    Obstacle {
        64 Devices "devices" "it sees several devices"
        65 Driver "driver" "its driver or its kernel lacks functions for it"
        66 Capture "capture" "it captures a graph"
        67 Work "work" "its work on the device does not end"
        68 HostMemory "host_memory" "host memory has no room for it"
        69 Copy "copy" "its driver failed to copy or to map it"
        70 Device "device" "the device has no room for it"
        71 Pools "pools" "it lies in memory pools or in graphs"
        72 Handles "handles" "the program maps it in parts, more than once or not at all"
        73 Objects "objects" "it is managed memory, arrays, or smaller than 2 MiB"
        74 Shared "shared" "other devices or processes may use it"
    }
    /// Why the daemon ended a connection, apart from refusals.
    Fault {
        48 Truncated "truncated" "a frame had fewer bytes than its header says"
        49 Oversized "oversized" "a frame had more bytes than its header says, or than any frame has"
        50 Version "version" "a frame was of another version of the wire format"
        51 Kind "kind" "a frame was of a kind that does not exist"
        52 Sequence "sequence" "a frame was sent again or left out"
        53 Field "field" "a frame had a field with an impossible value"
        54 Slow "slow" "the process does not read its frames, or did not say Hello in time"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_two_reasons_share_a_code_or_a_label() {
        let codes: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        let labels: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();
        assert_eq!((codes.len(), labels.len()), (Reason::ALL.len(), Reason::ALL.len()));
    }

    #[test]
    fn a_group_reads_its_own_codes_alone() {
        for code in 0..=u8::MAX {
            let groups = [
                RefusalCode::from_code(code).map(Reason::from),
                Wait::from_code(code).map(Reason::from),
                Denial::from_code(code).map(Reason::from),
                Obstacle::from_code(code).map(Reason::from),
                Fault::from_code(code).map(Reason::from),
            ];
            let known = Reason::ALL.iter().find(|reason| reason.code() == code);
            assert_eq!(
                groups.into_iter().flatten().collect::<Vec<_>>(),
                known.copied().into_iter().collect::<Vec<_>>()
            );
        }
    }
}
