//! Ids: small `Copy` names that cannot be mixed up.
//!
//! An id that can go stale carries a generation: a slot of a table is reused, its generation is not, so an answer to
//! a client that left, a lease that expired or a placement that was released is recognised and refused. Ids order by
//! slot, then generation, which is the last tie-break of every decision.

use core::fmt;

macro_rules! plain_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[cfg_attr(feature = "serde", serde(transparent))]
        pub struct $name(pub u32);

        impl $name {
            /// The number as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

macro_rules! generational_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        ///
        /// Serialised as one integer: `generation << 32 | slot`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[cfg_attr(feature = "serde", serde(from = "u64", into = "u64"))]
        pub struct $name {
            slot: u32,
            generation: u32,
        }

        impl $name {
            /// The `generation`-th use of `slot`.
            pub const fn new(slot: u32, generation: u32) -> Self {
                Self { slot, generation }
            }

            /// Index of the table entry, reused after its holder is gone.
            pub const fn slot(self) -> u32 {
                self.slot
            }

            /// How often the slot was used before.
            pub const fn generation(self) -> u32 {
                self.generation
            }

            /// The slot as an index into a table.
            pub const fn index(self) -> usize {
                self.slot as usize
            }
        }

        impl From<$name> for u64 {
            fn from(id: $name) -> u64 {
                u64::from(id.generation) << 32 | u64::from(id.slot)
            }
        }

        impl From<u64> for $name {
            #[expect(clippy::cast_possible_truncation, reason = "the two halves of the integer")]
            fn from(raw: u64) -> Self {
                Self { slot: raw as u32, generation: (raw >> 32) as u32 }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}.{}"), self.slot, self.generation)
            }
        }
    };
}

plain_id! {
    /// One GPU (or one MIG instance) of a node or pool, numbered by the host.
    GpuId, "gpu"
}

plain_id! {
    /// A function: what is scaled. Numbered by the host.
    FunctionId, "fn"
}

plain_id! {
    /// A model: what is loaded. Numbered by the host.
    ModelId, "model"
}

generational_id! {
    /// A client: one hooked process on one GPU, named by the host that let it in.
    ClientId, "client"
}

generational_id! {
    /// A connection of a process to its node, named by the host that accepted it.
    ConnId, "conn"
}

generational_id! {
    /// A placement of a demand on a GPU, named by the packer.
    PlacementId, "placement"
}

generational_id! {
    /// An arena of the model store: memory that holds one model's content, named by the store.
    ArenaId, "arena"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generational_id_survives_its_integer_form() {
        let id = ClientId::new(7, 3);
        assert_eq!(ClientId::from(u64::from(id)), id);
        assert_eq!(id.to_string(), "client7.3");
        assert_ne!(id, ClientId::new(7, 4), "the slot is reused, the id is not");
    }
}
