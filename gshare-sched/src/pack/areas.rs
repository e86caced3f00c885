//! Open GPUs by free area: which to re-arrange first.
//!
//! Every place and release changes a GPU's free area, so the order is kept in steps of [`STEP`] (2 % of a GPU): within
//! a step GPUs go by id. Each GPU's step is a byte, 64 of them in a cache line. Per step there is a set of bits, one for
//! such a block, under a level of bits that say which words are not zero. The words of all steps lie side by side, since a
//! GPU moves between steps more often than GPUs are asked for.
//!
//! Cost: a change reads a line of bytes and, where it was the first or the last of its block in a step, touches two or
//! three words; an answer looks into at most seven. One byte a GPU, and a tenth of one for the bits, so that all of it stays
//! in a core's own cache at 100,000 GPUs.
#![expect(clippy::cast_possible_truncation, reason = "a GPU's id is below MAX_GPUS, and a step below STEPS")]

use super::index::MAX_GPUS;

/// Steps, as bits of an area in basis points squared.
const STEP: u32 = 21;
const STEPS: usize = (100_000_000 >> STEP) + 1;
const LEVELS: usize = 2;

type Words = [u64; STEPS];

/// The steps of 64 GPUs, plus one each; 0 for a GPU that is not in.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Block([u8; 64]);

impl Block {
    /// Without a branch: the compiler compares many at a time.
    fn holds(&self, step: u8) -> bool {
        self.0.iter().fold(false, |found, held| found | (*held == step))
    }
}

/// The order by (free area in steps, GPU).
#[derive(Debug, Clone)]
pub(crate) struct FreeAreas {
    blocks: Vec<Block>,
    /// Bit b of level 0: block b has a GPU in the step. Bit i of a level above: word i of the level below is not zero.
    levels: [Vec<Words>; LEVELS],
    /// Bit s: step s is not empty.
    filled: u64,
}

impl FreeAreas {
    pub(crate) const fn new() -> Self {
        Self { blocks: Vec::new(), levels: [const { Vec::new() }; LEVELS], filled: 0 }
    }

    /// Makes room for GPUs below this number.
    pub(crate) fn reserve(&mut self, gpus: usize) {
        let mut words = gpus.div_ceil(64);
        if self.blocks.len() < words {
            self.blocks.resize(words, Block([0; 64]));
        }
        for level in &mut self.levels {
            words = words.div_ceil(64);
            if level.len() < words {
                level.resize(words, [0; STEPS]);
            }
        }
    }

    /// The GPU, which may be new, has this much area free.
    pub(crate) fn set(&mut self, gpu: u32, area: u32) {
        let step = step_of(area);
        let (block, held) = (gpu as usize / 64, step as u8 + 1);
        let before = core::mem::replace(&mut self.blocks[block].0[gpu as usize % 64], held);
        if before != held {
            self.add(block, step);
            self.leave(block, before);
        }
    }

    /// Takes a GPU out, if it is in.
    pub(crate) fn remove(&mut self, gpu: u32) {
        let block = gpu as usize / 64;
        let before = core::mem::replace(&mut self.blocks[block].0[gpu as usize % 64], 0);
        self.leave(block, before);
    }

    /// The block has a GPU in the step.
    fn add(&mut self, mut at: usize, step: usize) {
        for level in &mut self.levels {
            let word = &mut level[at / 64][step];
            let before = core::mem::replace(word, *word | 1 << (at % 64));
            if before != 0 {
                return;
            }
            at /= 64;
        }
        self.filled |= 1 << step;
    }

    /// A GPU of the block is no longer in the step of this byte.
    fn leave(&mut self, mut at: usize, held: u8) {
        if held == 0 || self.blocks[at].holds(held) {
            return;
        }
        let step = usize::from(held) - 1;
        for level in &mut self.levels {
            let word = &mut level[at / 64][step];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
        if self.levels[LEVELS - 1].iter().all(|words| words[step] == 0) {
            self.filled &= !(1 << step);
        }
    }

    /// GPUs whose step is that of `area` or above, the highest first; in a step, the largest id first.
    pub(crate) fn freest(&self, area: u32) -> impl Iterator<Item = u32> + '_ {
        let mut steps = self.filled >> step_of(area) << step_of(area);
        let (mut step, mut end) = (0, 0);
        core::iter::from_fn(move || {
            loop {
                if let Some(gpu) = self.last_below(step, end) {
                    end = gpu;
                    return Some(gpu as u32);
                }
                step = steps.checked_ilog2()? as usize;
                steps &= !(1 << step);
                end = MAX_GPUS as usize;
            }
        })
    }

    /// The largest GPU of a step with an id below `end`.
    fn last_below(&self, step: usize, end: usize) -> Option<usize> {
        if let Some(gpu) = self.last_of(step, end / 64, end % 64) {
            return Some(gpu);
        }
        let mut position = end / 64;
        for (height, level) in self.levels.iter().enumerate() {
            let below =
                level.get(position / 64).map_or(0, |words| words[step]) & ((1 << (position % 64)) - 1);
            if below != 0 {
                return self.descend(step, height, position / 64 * 64 + below.ilog2() as usize);
            }
            position /= 64;
        }
        let top = &self.levels[LEVELS - 1];
        let word = (0..position.min(top.len())).rev().find(|word| top[*word][step] != 0)?;
        self.descend(step, LEVELS - 1, word * 64 + top[word][step].ilog2() as usize)
    }

    /// The largest GPU of a step among the first `count` of a block.
    fn last_of(&self, step: usize, block: usize, count: usize) -> Option<usize> {
        let steps = &self.blocks.get(block)?.0[..count];
        Some(block * 64 + steps.iter().rposition(|held| usize::from(*held) == step + 1)?)
    }

    /// The largest GPU under bit `at` of a level.
    fn descend(&self, step: usize, height: usize, at: usize) -> Option<usize> {
        let down = |at: usize, level: &Vec<Words>| at * 64 + level[at][step].ilog2() as usize;
        self.last_of(step, self.levels[..height].iter().rev().fold(at, down), 64)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block>()
            + self.levels.iter().map(|level| level.capacity() * size_of::<Words>()).sum::<usize>()
    }
}

fn step_of(area: u32) -> usize {
    (area >> STEP) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn the_order_is_that_of_sorting(
            gpus in prop::collection::vec(1..400_000u32, 1..4),
            changes in prop::collection::vec((any::<prop::sample::Index>(), 0..6u32, 0..100_000_001u32), 1..60),
            least in 0..100_000_001u32,
        ) {
            // A few far apart, and their neighbours.
            let ids: Vec<u32> = gpus.iter().flat_map(|gpu| gpu - 1..gpu + 2).collect();
            let mut areas = FreeAreas::new();
            areas.reserve(ids.iter().max().map_or(0, |gpu| *gpu as usize + 1));
            let mut literal: BTreeMap<u32, u32> = BTreeMap::new();
            for (gpu, choice, area) in changes {
                let gpu = *gpu.get(&ids);
                // Mostly to steps that others are in.
                let area = if choice == 0 { area } else { choice << STEP };
                if choice < 5 {
                    areas.set(gpu, area);
                    literal.insert(gpu, area);
                } else {
                    areas.remove(gpu);
                    literal.remove(&gpu);
                }
                let mut expected: Vec<(usize, u32)> =
                    literal.iter().map(|(gpu, area)| (step_of(*area), *gpu)).filter(|(step, _)| *step >= step_of(least)).collect();
                expected.sort_unstable_by(|a, b| b.cmp(a));
                let found: Vec<u32> = areas.freest(least).collect();
                prop_assert_eq!(found, expected.iter().map(|(_, gpu)| *gpu).collect::<Vec<_>>());
            }
        }
    }
}
