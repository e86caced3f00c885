//! Open GPUs by free area: which to re-arrange first.
//!
//! Every place and release changes a GPU's free area, so the order is kept in steps of [`STEP`] (2 % of a GPU): within
//! a step GPUs go by id. Each GPU's step is a byte, 64 of them in a block, which counts how many are in each step. Per step
//! there is a set of bits, one for such a block, under a level of bits that say which words are not zero. The words of all
//! steps lie side by side, since a GPU moves between steps more often than GPUs are asked for.
//!
//! Cost: a change writes a byte, two counts and, for each of two steps, a word, seldom more; an answer looks into at most
//! seven. Two bytes a GPU, and a tenth of one for the bits, so that all of it stays in a core's own cache at 100,000 GPUs.
#![expect(clippy::cast_possible_truncation, reason = "a GPU's id is below MAX_GPUS, and a step below STEPS")]

/// Steps, as bits of an area in basis points squared.
const STEP: u32 = 21;
const STEPS: usize = (100_000_000 >> STEP) + 1;
const LEVELS: usize = 2;

type Words = [u64; STEPS];

/// 64 GPUs.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(128))]
struct Block {
    /// The step of each, plus one; 0 for a GPU that is not in.
    held: [u8; 64],
    /// How many hold each of these.
    counts: [u8; STEPS + 1],
}

impl Block {
    fn new() -> Self {
        let mut counts = [0; STEPS + 1];
        counts[0] = 64;
        Self { held: [0; 64], counts }
    }

    /// Which of them hold this, as bits: eight bytes are compared at once.
    fn holding(&self, held: u8) -> u64 {
        const LOW: u64 = 0x0101_0101_0101_0101;
        const BELOW_TOP: u64 = 0x7F * LOW;
        let (eights, _) = self.held.as_chunks();
        eights.iter().rev().fold(0, |members, eight| {
            let other = u64::from_le_bytes(*eight) ^ (u64::from(held) * LOW);
            // The top bit of each byte that is zero, then these eight bits side by side.
            let equal = !(((other & BELOW_TOP) + BELOW_TOP) | other | BELOW_TOP);
            members << 8 | (equal >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56
        })
    }
}

/// The order by (free area in steps, GPU).
#[derive(Debug, Clone, Default)]
pub(crate) struct FreeAreas {
    blocks: Vec<Block>,
    /// Bit b of level 0: block b has a GPU in the step. Bit i of a level above: word i of the level below is not zero.
    levels: [Vec<Words>; LEVELS],
    /// Bit s: step s is not empty.
    filled: u64,
}

impl FreeAreas {
    /// Makes room for GPUs below this number.
    pub(crate) fn reserve(&mut self, gpus: usize) {
        let mut words = gpus.div_ceil(64);
        if self.blocks.len() < words {
            self.blocks.resize(words, Block::new());
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
        self.put(gpu, step_of(area) as u8 + 1);
    }

    /// Takes a GPU out, if it is in.
    pub(crate) fn remove(&mut self, gpu: u32) {
        self.put(gpu, 0);
    }

    fn put(&mut self, gpu: u32, held: u8) {
        let at = gpu as usize / 64;
        let block = &mut self.blocks[at];
        let before = core::mem::replace(&mut block.held[gpu as usize % 64], held);
        if before == held {
            return;
        }
        block.counts[usize::from(held)] += 1;
        block.counts[usize::from(before)] -= 1;
        let stays = block.counts[usize::from(before)] != 0;
        self.mark(at, held, true);
        self.mark(at, before, stays);
    }

    /// Whether the block has a GPU in the step of this byte.
    fn mark(&mut self, mut at: usize, held: u8, mut has: bool) {
        let Some(step) = usize::from(held).checked_sub(1) else { return };
        for level in &mut self.levels {
            // Whether the bit changes is as good as random, so it is written either way.
            let word = &mut level[at / 64][step];
            let before = *word;
            *word = before & !(1 << (at % 64)) | u64::from(has) << (at % 64);
            has = *word != 0;
            if has == (before != 0) {
                return;
            }
            at /= 64;
        }
        let any = self.levels[LEVELS - 1].iter().any(|words| words[step] != 0);
        self.filled = self.filled & !(1 << step) | u64::from(any) << step;
    }

    /// GPUs in the step of `area` or above, highest step first; in a step, the largest id first.
    pub(crate) fn freest(&self, area: u32) -> impl Iterator<Item = u32> + '_ {
        let mut steps = self.filled >> step_of(area) << step_of(area);
        let (mut step, mut block, mut members) = (0, 0, 0u64);
        core::iter::from_fn(move || {
            while members == 0 {
                if let Some(below) = self.block_below(step, block) {
                    block = below;
                    members = self.blocks[block].holding(step as u8 + 1);
                } else {
                    step = steps.checked_ilog2()? as usize;
                    steps &= !(1 << step);
                    block = self.blocks.len();
                }
            }
            let last = members.ilog2();
            members &= !(1 << last);
            Some(block as u32 * 64 + last)
        })
    }

    /// The largest block below `end` that has a GPU in the step.
    fn block_below(&self, step: usize, end: usize) -> Option<usize> {
        let mut position = end;
        for (height, level) in self.levels.iter().enumerate() {
            let below =
                level.get(position / 64).map_or(0, |words| words[step]) & ((1 << (position % 64)) - 1);
            if below != 0 {
                return Some(self.descend(step, height, position / 64 * 64 + below.ilog2() as usize));
            }
            position /= 64;
        }
        let top = &self.levels[LEVELS - 1];
        let word = (0..position.min(top.len())).rev().find(|word| top[*word][step] != 0)?;
        Some(self.descend(step, LEVELS - 1, word * 64 + top[word][step].ilog2() as usize))
    }

    /// The largest block under bit `at` of a level.
    fn descend(&self, step: usize, height: usize, at: usize) -> usize {
        let down = |at: usize, level: &Vec<Words>| at * 64 + level[at][step].ilog2() as usize;
        self.levels[..height].iter().rev().fold(at, down)
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
            let mut areas = FreeAreas::default();
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
