//! The tables: one row per GPU model.
//!
//! Sources: `nvidia-smi mig -lgip` and `-lgipp` of A100-40, A100-80, H100-80 and A30; the profile tables of NVIDIA's MIG
//! user guide for the others. Usable memory is given in MiB where a list was at hand; drivers differ in the last digits.

use super::{Family, GpuModel, MigProfile};
use gshare_core::Bytes;
use std::borrow::Cow;

/// The numbers of a profile that all GPUs of a family have in common.
struct Shape {
    compute: u8,
    memory: u8,
    starts: u8,
    max_count: u8,
    media: bool,
}

/// Order: 1g, 1g+me, 1g double, 2g, 3g, 4g, 7g.
const SEVEN: [Shape; 7] = [
    Shape { compute: 1, memory: 1, starts: 0b0111_1111, max_count: 7, media: false },
    Shape { compute: 1, memory: 1, starts: 0b0111_1111, max_count: 1, media: true },
    Shape { compute: 1, memory: 2, starts: 0b0101_0101, max_count: 4, media: false },
    Shape { compute: 2, memory: 2, starts: 0b0001_0101, max_count: 3, media: false },
    Shape { compute: 3, memory: 4, starts: 0b0001_0001, max_count: 2, media: false },
    Shape { compute: 4, memory: 4, starts: 0b0000_0001, max_count: 1, media: false },
    Shape { compute: 7, memory: 8, starts: 0b0000_0001, max_count: 1, media: false },
];

/// Order: 1g, 1g+me, 2g, 2g+me, 4g.
const FOUR: [Shape; 5] = [
    Shape { compute: 1, memory: 1, starts: 0b1111, max_count: 4, media: false },
    Shape { compute: 1, memory: 1, starts: 0b1111, max_count: 1, media: true },
    Shape { compute: 2, memory: 2, starts: 0b0101, max_count: 2, media: false },
    Shape { compute: 2, memory: 2, starts: 0b0101, max_count: 1, media: true },
    Shape { compute: 4, memory: 4, starts: 0b0001, max_count: 1, media: false },
];

/// One profile of one model: name, usable MiB (0 = estimate from the name), SMs (0 = not known).
type Row = (&'static str, u64, u16);

type Model = (&'static str, Family, &'static [Row]);

const A100_40: &[Row] = &[
    ("1g.5gb", 4_864, 14),
    ("1g.5gb+me", 4_864, 14),
    ("1g.10gb", 9_856, 14),
    ("2g.10gb", 9_856, 28),
    ("3g.20gb", 19_968, 42),
    ("4g.20gb", 19_968, 56),
    ("7g.40gb", 40_192, 98),
];
const A100_80: &[Row] = &[
    ("1g.10gb", 9_856, 14),
    ("1g.10gb+me", 9_856, 14),
    ("1g.20gb", 19_968, 14),
    ("2g.20gb", 19_968, 28),
    ("3g.40gb", 40_192, 42),
    ("4g.40gb", 40_192, 56),
    ("7g.80gb", 80_384, 98),
];
const H100_80: &[Row] = &[
    ("1g.10gb", 9_984, 16),
    ("1g.10gb+me", 9_984, 16),
    ("1g.20gb", 20_096, 26),
    ("2g.20gb", 20_096, 32),
    ("3g.40gb", 40_448, 60),
    ("4g.40gb", 40_448, 64),
    ("7g.80gb", 81_152, 132),
];
const H100_94: &[Row] = &[
    ("1g.12gb", 0, 0),
    ("1g.12gb+me", 0, 0),
    ("1g.24gb", 0, 0),
    ("2g.24gb", 0, 0),
    ("3g.47gb", 0, 0),
    ("4g.47gb", 0, 0),
    ("7g.94gb", 0, 0),
];
const GH200_96: &[Row] = &[
    ("1g.12gb", 11_264, 16),
    ("1g.12gb+me", 11_264, 16),
    ("1g.24gb", 23_552, 26),
    ("2g.24gb", 23_552, 32),
    ("3g.48gb", 47_616, 60),
    ("4g.48gb", 47_616, 64),
    ("7g.96gb", 95_232, 132),
];
const GH200_144: &[Row] = &[
    ("1g.18gb", 0, 0),
    ("1g.18gb+me", 0, 0),
    ("1g.36gb", 0, 0),
    ("2g.36gb", 0, 0),
    ("3g.72gb", 0, 0),
    ("4g.72gb", 0, 0),
    ("7g.144gb", 0, 0),
];
const H200_141: &[Row] = &[
    ("1g.18gb", 16_384, 16),
    ("1g.18gb+me", 16_384, 16),
    ("1g.35gb", 0, 26),
    ("2g.35gb", 33_280, 32),
    ("3g.71gb", 71_424, 60),
    ("4g.71gb", 0, 0),
    ("7g.141gb", 143_360, 132),
];
const B200_180: &[Row] = &[
    ("1g.23gb", 0, 0),
    ("1g.23gb+me", 0, 0),
    ("1g.45gb", 0, 0),
    ("2g.45gb", 0, 0),
    ("3g.90gb", 0, 0),
    ("4g.90gb", 0, 0),
    ("7g.180gb", 0, 0),
];
const B300_269: &[Row] = &[
    ("1g.34gb", 0, 0),
    ("1g.34gb+me", 0, 0),
    ("1g.67gb", 0, 0),
    ("2g.67gb", 0, 0),
    ("3g.135gb", 0, 0),
    ("4g.135gb", 0, 0),
    ("7g.269gb", 0, 0),
];
const GB200_186: &[Row] = &[
    ("1g.23gb", 0, 0),
    ("1g.23gb+me", 0, 0),
    ("1g.47gb", 0, 0),
    ("2g.47gb", 0, 0),
    ("3g.93gb", 0, 0),
    ("4g.93gb", 0, 0),
    ("7g.186gb", 0, 0),
];
const GB300_278: &[Row] = &[
    ("1g.35gb", 0, 0),
    ("1g.35gb+me", 0, 0),
    ("1g.70gb", 0, 0),
    ("2g.70gb", 0, 0),
    ("3g.139gb", 0, 0),
    ("4g.139gb", 0, 0),
    ("7g.278gb", 0, 0),
];
const A30_24: &[Row] = &[
    ("1g.6gb", 5_952, 14),
    ("1g.6gb+me", 5_952, 14),
    ("2g.12gb", 11_968, 28),
    ("2g.12gb+me", 11_968, 28),
    ("4g.24gb", 24_000, 56),
];

const MODELS: [Model; 12] = [
    ("A100-40", Family::Seven, A100_40),
    ("A100-80", Family::Seven, A100_80),
    ("H100-80", Family::Seven, H100_80),
    ("H100-94", Family::Seven, H100_94),
    ("GH200-96", Family::Seven, GH200_96),
    ("GH200-144", Family::Seven, GH200_144),
    ("H200-141", Family::Seven, H200_141),
    ("B200-180", Family::Seven, B200_180),
    ("B300-269", Family::Seven, B300_269),
    ("GB200-186", Family::Seven, GB200_186),
    ("GB300-278", Family::Seven, GB300_278),
    ("A30-24", Family::Four, A30_24),
];

pub(super) const NAMES: [&str; MODELS.len()] = {
    let mut names = [""; MODELS.len()];
    let mut i = 0;
    while i < MODELS.len() {
        names[i] = MODELS[i].0;
        i += 1;
    }
    names
};

pub(super) fn find(name: &str) -> Option<GpuModel> {
    let (name, family, rows) = MODELS.iter().find(|(known, ..)| known.eq_ignore_ascii_case(name))?;
    let shapes: &[Shape] = match family {
        Family::Seven => &SEVEN,
        Family::Four => &FOUR,
    };
    let profiles = shapes.iter().zip(*rows).map(|(shape, row)| profile(shape, row)).collect();
    Some(GpuModel { name: Cow::Borrowed(name), family: *family, profiles })
}

fn profile(shape: &Shape, &(name, mib, sms): &Row) -> MigProfile {
    MigProfile {
        name: Cow::Borrowed(name),
        compute_slices: shape.compute,
        memory_slices: shape.memory,
        starts: shape.starts,
        max_count: shape.max_count,
        media: shape.media,
        // The usable part of the lists at hand is 0.889 to 0.993 of the nominal size, so 7/8 promises too little.
        memory: Bytes::from_mib(if mib == 0 { nominal_gib(name) * 1024 * 7 / 8 } else { mib }),
        memory_is_estimate: mib == 0,
        sms: (sms != 0).then_some(sms),
    }
}

/// The 20 of `2g.20gb`.
fn nominal_gib(name: &str) -> u64 {
    let size = name.split_once('.').and_then(|(_, rest)| rest.split_once("gb"));
    size.and_then(|(gib, _)| gib.parse().ok()).unwrap_or(0)
}
