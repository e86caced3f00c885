//! MIG as data: which slices a GPU can be cut into, and where each may lie.
//!
//! # Problem
//! Multi-Instance GPU cuts one GPU into **slices** (GPU instances) that share neither SMs nor memory. A slice has one of a
//! few **profiles** (`2g.20gb`), each of which may lie only at some places, so not everything that adds up fits: a GPU with
//! `1g` at place 1 and nothing else has room for `4g` nowhere. This module knows the rules, so packers, partitioners and
//! tests need neither a GPU nor the driver.
//!
//! # Terms
//! - **memory slice**: the unit of place. A GPU of the [seven-slice family](Family::Seven) has 8 of them and 7 compute
//!   slices, one of the [four-slice family](Family::Four) has 4 and 4;
//! - **profile** ([`MigProfile`]): a name, a number of compute slices, a number of memory slices and the places (`starts`)
//!   at which it may begin. SMs are **not** in proportion to compute slices (an H100's `1g.10gb` has 16 SMs, its `7g.80gb`
//!   132), so a profile is known by its name, never by its `g`;
//! - **layout**: slices with their places, none of which share a memory slice; **maximal** when no further slice fits;
//! - **multiset**: a layout without its places.
//!
//! # Rules
//! A slice at `start` occupies the memory slices `start .. start + memory_slices`. The driver refuses a slice exactly when
//! one of these is taken, its start is not in the profile's list, or the profile's greatest count is reached. That compute
//! slices never run out first follows from the starts (tested over all layouts). At most one slice of a GPU has the media
//! engines (`+me`).
//!
//! Seven-slice family, memory slices across:
//! ```text
//!              0 1 2 3 4 5 6 7        starts
//! 7g           ───────────────        0
//! 4g           ───────                0
//! 3g           ─────── ───────        0 4        at 0 it strands a compute slice
//! 2g           ─── ─── ───            0 2 4      not 6
//! 1g double    ─── ─── ─── ───        0 2 4 6    1 compute slice with the memory of a 2g
//! 1g           ─ ─ ─ ─ ─ ─ ─          0 to 6     never 7
//! ```
//!
//! ## Example
//! Which slices can join `2g` at 2 on an A100? Memory slices 2 and 3 are taken: `7g`, `4g` and `3g` at 0 are out; `3g` at 4
//! fits, and `1g` at 0 and 1 beside it; that layout (`1g 1g 2g 3g`) is maximal.
//!
//! # Counts
//! The five base profiles of the seven-slice family have 298 legal layouts, with the empty layout and partial layouts. 19
//! layouts are maximal, with 14 different multisets. The four-slice family has 26 layouts, 5 of them maximal. FluidFaaS
//! (section 2) and NVIDIA's figure say "18 configurations"; there are 19 by the driver's own list of places.
//!
//! # Cost
//! [`GpuModel::arrange`] is a search over at most 8 places with the larger slices first: microseconds.
//!
//! # Differences
//! Tables are what `nvidia-smi mig -lgip` and `-lgipp` print for the GPU. Where no such list was at hand the geometry is
//! the family's, and the memory is an estimate that says so ([`MigProfile::memory_is_estimate`]).

mod models;

use core::fmt;
use gshare_core::{Bytes, ProfileId, SmShare};
use std::borrow::Cow;

/// The geometry of a GPU's memory and compute slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Family {
    /// 8 memory and 7 compute slices: A100, H100, H200, GH200, B200, B300 and their kin.
    Seven,
    /// 4 memory and 4 compute slices: A30.
    Four,
}

impl Family {
    /// Number of memory slices.
    pub const fn memory_slices(self) -> u8 {
        match self {
            Self::Seven => 8,
            Self::Four => 4,
        }
    }

    /// Number of compute slices.
    pub const fn compute_slices(self) -> u8 {
        match self {
            Self::Seven => 7,
            Self::Four => 4,
        }
    }
}

/// One size of slice that a GPU model offers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct MigProfile {
    /// The driver's name: `1g.10gb`, `1g.10gb+me`.
    pub name: Cow<'static, str>,
    /// Compute slices it holds: the number before the `g`.
    pub compute_slices: u8,
    /// Memory slices it occupies.
    pub memory_slices: u8,
    /// Memory slices at which it may begin: bit `i` for place `i`.
    pub starts: u8,
    /// The most slices of this profile on one GPU.
    pub max_count: u8,
    /// Whether it has the media engines (`+me`), which only one slice of a GPU can have.
    pub media: bool,
    /// Usable memory, less than the name says.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
    pub memory: Bytes,
    /// Whether `memory` is an estimate (7/8 of the nominal size) to be replaced by what NVML reports.
    pub memory_is_estimate: bool,
    /// SMs, where known.
    pub sms: Option<u16>,
}

impl MigProfile {
    /// The memory slices it occupies at `start`, as a bit mask; `None` where it may not begin.
    pub const fn mask_at(&self, start: u8) -> Option<u8> {
        if start >= 8 || self.starts & (1 << start) == 0 {
            return None;
        }
        Some(span(start, self.memory_slices))
    }

    /// The places at which it may begin, ascending.
    pub fn start_places(&self) -> impl Iterator<Item = u8> + use<> {
        let starts = self.starts;
        (0..8).filter(move |place| starts & (1 << place) != 0)
    }
}

/// `size` memory slices from `start` on.
#[expect(clippy::cast_possible_truncation, reason = "bits above the eighth are no memory slices")]
const fn span(start: u8, size: u8) -> u8 {
    let size = if size > 8 { 8 } else { size };
    (((1u16 << size) - 1) << start) as u8
}

/// A slice and its place.
///
/// Orders by place, as `nvidia-smi` lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct SliceAt {
    /// The first memory slice it occupies.
    pub start: u8,
    pub profile: ProfileId,
}

/// Why slices were refused. Names the profile and the bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum MigError {
    /// No table for that GPU.
    #[error("unknown GPU model `{name}`: known are {known}")]
    UnknownModel { name: String, known: String },
    /// Not a profile of this GPU, perhaps of another one.
    #[error("{model} has no MIG profile `{name}`: it has {known}")]
    UnknownProfile { model: String, name: String, known: String },
    /// A profile number past the table.
    #[error("{model} has no MIG profile number {profile}: it has {count}")]
    ProfileOutOfRange { model: String, profile: u8, count: usize },
    /// The profile may not begin there.
    #[error("{name} cannot begin at memory slice {start}: it may at {starts}")]
    IllegalStart { name: String, start: u8, starts: String },
    /// Profiles that do not fit on one GPU together, wherever they are placed.
    #[error("{names} do not fit together on one {model}")]
    NoArrangement { model: String, names: String },
    /// Two slices share a memory slice.
    #[error("{name} at memory slice {start} overlaps another slice")]
    Overlap { name: String, start: u8 },
    /// More of one profile, or of the media engines, than one GPU has.
    #[error("more than {limit} of {name} on one GPU")]
    TooMany { name: String, limit: u8 },
}

/// A GPU model with MIG: its family and its profiles.
///
/// ```
/// use gshare_sched::mig::GpuModel;
///
/// let a100 = GpuModel::find("A100-80")?;
/// let (big, small) = (a100.profile("4g.40gb")?, a100.profile("3g.40gb")?);
/// assert!(a100.arrange(&[big, small]).is_some());
/// assert!(a100.arrange(&[small, small, small]).is_none());
/// assert!(a100.profile("4g.71gb").is_err(), "that is an H200's");
/// # Ok::<(), gshare_sched::mig::MigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct GpuModel {
    /// The name of the table: `A100-80`.
    pub name: Cow<'static, str>,
    /// Its geometry.
    pub family: Family,
    /// MIG profiles, small to large; each `+me` or double-memory variant follows its base profile.
    pub profiles: Vec<MigProfile>,
}

impl GpuModel {
    /// The names of all tables.
    pub fn names() -> impl Iterator<Item = &'static str> {
        models::NAMES.iter().copied()
    }

    /// The table of that name; upper and lower case are the same.
    ///
    /// # Errors
    /// [`MigError::UnknownModel`].
    pub fn find(name: &str) -> Result<Self, MigError> {
        models::find(name)
            .ok_or_else(|| MigError::UnknownModel { name: name.to_owned(), known: models::NAMES.join(", ") })
    }

    /// The profile of that name.
    ///
    /// # Errors
    /// [`MigError::UnknownProfile`], also for the name of another GPU's profile.
    pub fn profile(&self, name: &str) -> Result<ProfileId, MigError> {
        let found = self.profiles.iter().position(|profile| profile.name == name);
        found.and_then(|index| u8::try_from(index).ok()).map(ProfileId::new).ok_or_else(|| {
            let known: Vec<&str> = self.profiles.iter().map(|profile| &*profile.name).collect();
            MigError::UnknownProfile {
                model: self.name.clone().into_owned(),
                name: name.to_owned(),
                known: known.join(", "),
            }
        })
    }

    /// The profile with that number.
    pub fn get(&self, profile: ProfileId) -> Option<&MigProfile> {
        self.profiles.get(profile.index())
    }

    /// The part of the GPU's compute slices that a slice of the profile holds, as a share of the SMs.
    pub fn share_of(&self, profile: &MigProfile) -> Option<SmShare> {
        let all = self.profiles.iter().map(|one| one.compute_slices).max()?;
        SmShare::new(u16::try_from(u32::from(profile.compute_slices) * 10_000 / u32::from(all)).ok()?)
    }

    /// The numbers of all profiles.
    pub fn ids(&self) -> impl Iterator<Item = ProfileId> + use<> {
        (0..u8::try_from(self.profiles.len()).unwrap_or(u8::MAX)).map(ProfileId::new)
    }

    /// Checks that the slices can be on one GPU together; answers the memory slices they occupy, as a bit mask.
    ///
    /// # Errors
    /// [`MigError::IllegalStart`], [`MigError::Overlap`], [`MigError::TooMany`], [`MigError::ProfileOutOfRange`]: the
    /// first slice that breaks a rule.
    pub fn validate(&self, slices: &[SliceAt]) -> Result<u8, MigError> {
        let mut taken = 0u8;
        for (index, slice) in slices.iter().enumerate() {
            let profile = self.get(slice.profile).ok_or_else(|| MigError::ProfileOutOfRange {
                model: self.name.clone().into_owned(),
                profile: slice.profile.number(),
                count: self.profiles.len(),
            })?;
            let name = || profile.name.clone().into_owned();
            let mask = profile.mask_at(slice.start).ok_or_else(|| MigError::IllegalStart {
                name: name(),
                start: slice.start,
                starts: profile.start_places().map(|place| place.to_string()).collect::<Vec<_>>().join(", "),
            })?;
            if taken & mask != 0 {
                return Err(MigError::Overlap { name: name(), start: slice.start });
            }
            let before = &slices[..index];
            let same = before.iter().filter(|other| other.profile == slice.profile).count();
            if same >= usize::from(profile.max_count) {
                return Err(MigError::TooMany { name: name(), limit: profile.max_count });
            }
            let media = |other: &SliceAt| self.get(other.profile).is_some_and(|other| other.media);
            if profile.media && before.iter().any(media) {
                return Err(MigError::TooMany { name: "+me".to_owned(), limit: 1 });
            }
            taken |= mask;
        }
        Ok(taken)
    }

    /// Places for slices of these profiles on one empty GPU, in the order of `profiles`; `None` when they do not fit
    /// together. Pass these places to the driver: by its own choice it may put small slices where the large slices must go.
    pub fn arrange(&self, profiles: &[ProfileId]) -> Option<Vec<SliceAt>> {
        if profiles.len() > usize::from(self.family.memory_slices()) {
            return None;
        }
        // Larger slices have fewer places, so they come first. Equal slices take ascending places, which breaks the
        // symmetry.
        let mut order: Vec<usize> = (0..profiles.len()).collect();
        order.sort_by_key(|&index| {
            (core::cmp::Reverse(self.get(profiles[index]).map(|p| p.memory_slices)), profiles[index], index)
        });
        let mut places = vec![0u8; profiles.len()];
        if !self.search(profiles, &order, &mut places, 0) {
            return None;
        }
        let slices: Vec<SliceAt> =
            profiles.iter().zip(&places).map(|(&profile, &start)| SliceAt { start, profile }).collect();
        self.validate(&slices).ok().map(|_| slices)
    }

    fn search(&self, profiles: &[ProfileId], order: &[usize], places: &mut [u8], taken: u8) -> bool {
        let Some((&index, rest)) = order.split_first() else { return true };
        let Some(profile) = self.get(profiles[index]) else { return false };
        profile.start_places().any(|start| {
            let free = profile.mask_at(start).is_some_and(|mask| {
                places[index] = start;
                taken & mask == 0 && self.search(profiles, rest, places, taken | mask)
            });
            if free {
                places[index] = start;
            }
            free
        })
    }
}

impl fmt::Display for GpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests;
