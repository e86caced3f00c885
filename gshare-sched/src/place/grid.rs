//! The index of open GPUs by free request and free memory. See the [module documentation](super).
#![expect(
    clippy::cast_possible_truncation,
    reason = "cell numbers are below 128, and fields of a key are as wide as they were packed"
)]

use crate::pack::sets::Sets;

const ROWS: usize = 101;
const COLUMNS: usize = 128;
const GPU_BITS: u32 = 21;
/// GPU ids lie below this.
pub(super) const MAX_GPUS: u32 = 1 << GPU_BITS;
/// Fractional bits of a score's shares.
const FRACTION: u32 = 20;

/// What is free on a GPU, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Free {
    /// Basis points of the largest GPU.
    pub(super) request: u32,
    /// Basis points of the largest GPU.
    pub(super) limit: u32,
    /// Bytes.
    pub(super) memory: u64,
    /// SMs of this GPU, in basis points of the largest.
    pub(super) sm: u32,
    /// Memory of this GPU.
    pub(super) capacity: u64,
}

/// What a demand needs on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) request: u32,
    pub(super) limit: u32,
    pub(super) memory: u64,
}

impl Free {
    pub(super) fn holds(&self, need: Need) -> bool {
        self.request >= need.request && self.limit >= need.limit && self.memory >= need.memory
    }
}

/// Weights of the score, in basis points.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weights {
    pub(super) alpha: u16,
    pub(super) beta: u16,
}

impl Weights {
    /// The score: least is best. 14 + 1 + 20 bits.
    pub(super) fn score(self, free: &Free) -> u64 {
        self.shares(u64::from(free.request), u64::from(free.sm), free.memory, free.capacity)
    }

    fn shares(self, request: u64, sm: u64, memory: u64, capacity: u64) -> u64 {
        let part = |free: u64, whole: u64| match free >> (u64::BITS - FRACTION) {
            0 => (free << FRACTION) / whole.max(1),
            _ => ((u128::from(free) << FRACTION) / u128::from(whole.max(1))) as u64,
        };
        u64::from(self.alpha) * part(request, sm) + u64::from(self.beta) * part(memory, capacity)
    }
}

/// The grid.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    sets: Sets,
    rows: [u128; ROWS],
    weights: Weights,
    /// Bytes a column is wide.
    unit: u64,
    /// The least that a row and a column contribute to a score.
    least_of_row: [u64; ROWS + 1],
    least_of_column: [u64; COLUMNS],
}

impl Grid {
    pub(super) fn new(weights: Weights, largest_sm: u32, largest_memory: u64) -> Self {
        let unit = largest_memory / (COLUMNS as u64 - 1) + 1;
        let largest_sm = u64::from(largest_sm);
        Self {
            sets: Sets::new(ROWS * COLUMNS * 2),
            rows: [0; ROWS],
            weights,
            unit,
            least_of_row: core::array::from_fn(|row| weights.shares(row as u64 * 100, largest_sm, 0, 1)),
            least_of_column: core::array::from_fn(|column| {
                weights.shares(0, 1, column as u64 * unit, largest_memory)
            }),
        }
    }

    fn cell(&self, free: &Free) -> (usize, usize) {
        ((free.request / 100) as usize, (free.memory / self.unit) as usize)
    }

    pub(super) fn insert(&mut self, free: &Free, gpu: u32) {
        let (row, column) = self.cell(free);
        let set = (row * COLUMNS + column) * 2;
        self.sets.insert(set, self.weights.score(free) << GPU_BITS | u64::from(gpu));
        self.sets.insert(set + 1, u64::from(free.limit) << GPU_BITS | u64::from(gpu));
        self.rows[row] |= 1 << column;
    }

    pub(super) fn remove(&mut self, free: &Free, gpu: u32) {
        let (row, column) = self.cell(free);
        let set = (row * COLUMNS + column) * 2;
        self.sets.remove(set, self.weights.score(free) << GPU_BITS | u64::from(gpu));
        self.sets.remove(set + 1, u64::from(free.limit) << GPU_BITS | u64::from(gpu));
        if self.sets.is_empty(set) {
            self.rows[row] &= !(1 << column);
        }
    }

    /// The GPU of least (score, id) that holds `need` and that `accept` takes.
    pub(super) fn best_fit(
        &self,
        need: Need,
        free_of: impl Fn(u32) -> Free,
        accept: &impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let first_row = (need.request / 100) as usize;
        let first_column = (need.memory / self.unit) as usize;
        if first_column >= COLUMNS {
            return None;
        }
        let mut best: Option<u64> = None;
        for row in first_row..ROWS {
            let mut columns = self.rows[row] >> first_column << first_column;
            while columns != 0 {
                let column = columns.trailing_zeros() as usize;
                columns &= columns - 1;
                if best.is_some_and(|best| self.least_score(row, column) > best >> GPU_BITS) {
                    break;
                }
                let set = (row * COLUMNS + column) * 2;
                let most_limit = self.sets.last(set + 1).map_or(0, |at| self.sets.key(at) >> GPU_BITS);
                if most_limit < u64::from(need.limit) {
                    continue;
                }
                let mut cursor = self.sets.first(set);
                while let Some(at) = cursor {
                    let key = self.sets.key(at);
                    if best.is_some_and(|best| key >= best) {
                        break;
                    }
                    let gpu = (key as u32) % MAX_GPUS;
                    if free_of(gpu).holds(need) && accept(gpu) {
                        best = Some(key);
                        break;
                    }
                    cursor = self.sets.next(at);
                }
            }
            // The least cell of the next row is worse than the best, and so are all above it.
            if best.is_some_and(|best| self.least_score(row + 1, first_column) > best >> GPU_BITS) {
                break;
            }
        }
        best.map(|key| (key as u32) % MAX_GPUS)
    }

    /// No GPU of the cell has a lower score.
    fn least_score(&self, row: usize, column: usize) -> u64 {
        self.least_of_row[row] + self.least_of_column[column]
    }

    /// Appends (free memory in whole MiB, GPU) of the open GPUs with at least `request` free, column after column, those
    /// with the most free memory first and those of equal memory by id, until they have `memory` together.
    pub(super) fn most_memory(
        &self,
        request: u32,
        mut memory: u64,
        free_of: impl Fn(u32) -> Free,
        accept: &impl Fn(u32, &Free) -> bool,
        out: &mut Vec<(u64, u32)>,
    ) {
        for column in (0..COLUMNS).rev() {
            let start = out.len();
            for row in (request / 100) as usize..ROWS {
                if self.rows[row] >> column & 1 == 0 {
                    continue;
                }
                let mut cursor = self.sets.first((row * COLUMNS + column) * 2);
                while let Some(at) = cursor {
                    let gpu = (self.sets.key(at) as u32) % MAX_GPUS;
                    let free = free_of(gpu);
                    if accept(gpu, &free) {
                        memory = memory.saturating_sub(free.memory);
                        out.push((free.memory >> 20, gpu));
                    }
                    cursor = self.sets.next(at);
                }
            }
            out[start..].sort_unstable_by_key(|(memory, gpu)| (core::cmp::Reverse(*memory), *gpu));
            if memory == 0 {
                return;
            }
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.sets.bytes() + size_of_val(&self.rows)
    }
}
