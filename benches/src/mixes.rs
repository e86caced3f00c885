//! Seeded inputs: the four mixes of demands that the packers are measured on.

/// `SplitMix64` (Steele, Lea and Flood 2014): one word of state, and the same stream everywhere.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A stream from a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next word.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which must not be zero.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next_u64() % bound as u64).unwrap_or(0)
    }

    /// A share in `1..=most`.
    fn share(&mut self, most: u16) -> u16 {
        u16::try_from(self.below(usize::from(most))).unwrap_or(0) + 1
    }

    /// A number in `[0, 1)`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A distribution of demands: (quota, SM share).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Points of the FaST-GShare profiler's grid: quota 20..100 %, SM {6, 12, 24, 50, 60, 80, 100} %. About 3.5 a GPU.
    Profile,
    /// Small pods: quota {20, 40, 60} %, SM {6: 4, 12: 4, 24: 3, 50: 1} (weights). About 15 on a full GPU.
    Light,
    /// Uniform whole per cents, 1..100 x 1..100.
    Fine,
    /// Uniform whole per cents, 1..50 x 1..50.
    Half,
}

impl Mix {
    /// The four mixes of whole per cents.
    pub const PERCENT: [Self; 4] = [Self::Profile, Self::Light, Self::Fine, Self::Half];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Profile => "profile",
            Self::Light => "light",
            Self::Fine => "fine",
            Self::Half => "half",
        }
    }

    /// The next demand, in basis points.
    pub fn draw(self, rng: &mut SplitMix64) -> (u16, u16) {
        let percent = |w: u16, h: u16| (w * 100, h * 100);
        match self {
            Self::Profile => {
                let quota = [20, 40, 60, 80, 100][rng.below(5)];
                percent(quota, [6, 12, 24, 50, 60, 80, 100][rng.below(7)])
            }
            Self::Light => {
                let quota = [20, 40, 60][rng.below(3)];
                percent(quota, [6, 6, 6, 6, 12, 12, 12, 12, 24, 24, 24, 50][rng.below(12)])
            }
            Self::Fine => percent(rng.share(100), rng.share(100)),
            Self::Half => percent(rng.share(50), rng.share(50)),
        }
    }
}
