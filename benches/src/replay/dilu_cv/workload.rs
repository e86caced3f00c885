//! The models, the pairs that share a device, and their loads.

use anyhow::Result;
use clap::ValueEnum;
use gshare_core::{Duration, SmShare, Timestamp};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::contended_gpu::LaneKernel;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Pair {
    Gpt2Roberta,
    RobertaGpt2,
    Gpt2Trainer,
    RobertaTrainer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Bursts {
    /// Gamma distributed counts per second
    Counts,
    /// Gamma distributed gaps
    Gaps,
}

impl Pair {
    pub(super) const ALL: [Self; 4] =
        [Self::Gpt2Roberta, Self::RobertaGpt2, Self::Gpt2Trainer, Self::RobertaTrainer];

    /// The models of the first instance and of its neighbour; none is a trainer.
    pub(super) const fn models(self) -> (&'static Model, Option<&'static Model>) {
        match self {
            Self::Gpt2Roberta => (&GPT2, Some(&ROBERTA)),
            Self::RobertaGpt2 => (&ROBERTA, Some(&GPT2)),
            Self::Gpt2Trainer => (&GPT2, None),
            Self::RobertaTrainer => (&ROBERTA, None),
        }
    }
}

/// An iteration of one batch size: `wide` per cent of its `micros` need all SMs, the rest `width` per cent of them. On a share
/// `s` it takes `micros x (wide / s + (1 - wide) x max(1, width / s))`.
#[derive(Debug)]
pub(super) struct Size {
    pub(super) batch: usize,
    micros: u64,
    wide: u64,
    width: u16,
}

const fn size(batch: usize, micros: u64, wide: u64, width: u16) -> Size {
    Size { batch, micros, wide, width }
}

/// A model on an A100, smallest batch first.
#[derive(Debug)]
pub(super) struct Model(pub(super) [Size; 6]);

const ROBERTA: Model = Model([
    size(1, 20_800, 0, 15),
    size(2, 22_600, 0, 27),
    size(4, 25_400, 10, 36),
    size(8, 33_000, 15, 57),
    size(16, 56_200, 45, 47),
    size(32, 107_100, 50, 47),
]);
const GPT2: Model = Model([
    size(1, 29_400, 0, 13),
    size(2, 31_800, 5, 16),
    size(4, 32_900, 25, 15),
    size(8, 49_500, 35, 17),
    size(16, 85_900, 35, 31),
    size(32, 163_300, 40, 27),
]);
/// An iteration is this number of layers, each of a kernel that needs all SMs, if any does, and three that do not.
const LAYERS: u64 = 24;
pub(super) const KERNELS: u64 = 4 * LAYERS;

impl Size {
    pub(super) fn kernel(&self, number: u64) -> Option<LaneKernel> {
        let wide = self.wide > 0 && number.is_multiple_of(4);
        let (part, among) = match wide {
            true => (self.wide, LAYERS),
            false if self.wide > 0 => (100 - self.wide, 3 * LAYERS),
            false => (100, KERNELS),
        };
        let duration = Duration::from_nanos(self.micros * 1_000 * part / 100 / among);
        let width = SmShare::from_percent(if wide { 100 } else { self.width })?;
        Some(LaneKernel { duration, width })
    }
}

/// A kernel of the trainer: it can use 90 % of the SMs.
pub(super) fn trainer_kernel() -> Option<LaneKernel> {
    Some(LaneKernel { duration: Duration::from_micros(500), width: SmShare::from_percent(90)? })
}

pub(super) fn load(bursts: Bursts, rate: f64, cv: f64, seed: u64, time: Duration) -> Result<Vec<Timestamp>> {
    let (mut rng, end) = (Rng::new(seed), Timestamp::ZERO.saturating_add(time));
    if bursts == Bursts::Gaps {
        return Ok(Arrivals::gamma(rate, cv)?.until(end, &mut rng));
    }
    // A count is drawn like a gap of that many seconds.
    let mut counts = Arrivals::gamma(1.0 / rate, cv / rate.sqrt())?;
    let (mut load, mut second) = (Vec::new(), Timestamp::ZERO);
    while second < end
        && let Some(count) = counts.next_after(Timestamp::ZERO, &mut rng)
    {
        let count = count.as_nanos() / 1_000_000_000;
        let at = |n| second.saturating_add(Duration::from_nanos(1_000_000_000 * n / count.max(1)));
        load.extend((0..count).map(at));
        if count > 0 {
            second = at(count);
        }
    }
    Ok(load)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iteration_on_a_share_takes_what_the_profile_says() {
        // RoBERTa, four requests on 30 % of the SMs: 34.2 ms were measured.
        let size = ROBERTA.0.iter().find(|size| size.batch == 4).unwrap();
        let on =
            |kernel: LaneKernel| kernel.within(SmShare::from_percent(30).unwrap()).duration.as_secs_f64();
        let time: f64 = (0..KERNELS).map(|number| on(size.kernel(number).unwrap())).sum();
        assert!((0.032..0.037).contains(&time), "{time}");
    }
}
