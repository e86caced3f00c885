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
/// Steps that free limits are told apart by in a key.
const STEP_BITS: u32 = 8;
/// Steps that cells are told apart by in the rows' bits, as a shift.
const CLASS_BITS: u32 = 4;
const CLASSES: usize = 1 << (STEP_BITS - CLASS_BITS);
/// A score in a key lies above this.
const SCORE_SHIFT: u32 = GPU_BITS + STEP_BITS;

const fn gpu_of(key: u64) -> u32 {
    (key >> STEP_BITS) as u32 % MAX_GPUS
}

const fn step_of(key: u64) -> u8 {
    key as u8
}

const fn class_of(step: u8) -> usize {
    (step >> CLASS_BITS) as usize
}

/// The free request, limit and memory of a GPU, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Free {
    /// Basis points of the largest GPU.
    pub(super) request: u32,
    /// Basis points of the largest GPU.
    pub(super) limit: u32,
    /// Free memory, in bytes.
    pub(super) memory: u64,
    /// SMs of this GPU, in basis points of the largest.
    pub(super) sm: u32,
    /// Memory of this GPU.
    pub(super) capacity: u64,
}

/// The request, limit and memory that a demand needs on one GPU.
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

/// Weights of the free SM share and of the free memory share in the score, in basis points: the published ones.
const ALPHA: u64 = 6_000;
const BETA: u64 = 4_000;

/// The score: least is best. 15 + 20 bits; the GPU and its step take the other 29 of a key.
pub(super) fn score(free: &Free) -> u64 {
    shares(u64::from(free.request), u64::from(free.sm), free.memory, free.capacity)
}

fn shares(request: u64, sm: u64, memory: u64, capacity: u64) -> u64 {
    let part = |free: u64, whole: u64| match free >> (u64::BITS - FRACTION) {
        0 => (free << FRACTION) / whole.max(1),
        _ => ((u128::from(free) << FRACTION) / u128::from(whole.max(1))) as u64,
    };
    ALPHA * part(request, sm) + BETA * part(memory, capacity)
}

/// The grid. A key is (score, GPU, step of the free limit), so that a walk reads of a GPU only what might fit.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    /// By cell.
    sets: Sets,
    /// By class of steps, the cells that have a GPU of this class or above. Class 0: those that are not empty.
    rows: Box<[[u128; ROWS]; CLASSES]>,
    /// By cell: the least key, and the most step.
    least: Vec<u64>,
    most: Vec<u8>,
    /// Free limit that a step stands for, in basis points.
    step: u32,
    /// Bytes a column is wide.
    unit: u64,
    /// The least that a row and a column contribute to a score.
    least_of_row: [u64; ROWS + 1],
    least_of_column: [u64; COLUMNS],
}

impl Grid {
    /// For GPUs of at most this much free limit, this many SMs and this much memory.
    pub(super) fn new(most_limit: u32, largest_sm: u32, largest_memory: u64) -> Self {
        let unit = largest_memory / (COLUMNS as u64 - 1) + 1;
        let largest_sm = u64::from(largest_sm);
        Self {
            sets: Sets::new(ROWS * COLUMNS),
            rows: Box::new([[0; ROWS]; CLASSES]),
            least: vec![u64::MAX; ROWS * COLUMNS],
            most: vec![0; ROWS * COLUMNS],
            step: (most_limit >> STEP_BITS) + 1,
            unit,
            least_of_row: core::array::from_fn(|row| shares(row as u64 * 100, largest_sm, 0, 1)),
            least_of_column: core::array::from_fn(|column| {
                shares(0, 1, column as u64 * unit, largest_memory)
            }),
        }
    }

    fn cell(&self, free: &Free) -> (usize, usize) {
        ((free.request / 100) as usize, (free.memory / self.unit) as usize)
    }

    fn step(&self, limit: u32) -> u8 {
        (limit / self.step) as u8
    }

    fn key(&self, free: &Free, gpu: u32) -> u64 {
        score(free) << SCORE_SHIFT | u64::from(gpu) << STEP_BITS | u64::from(self.step(free.limit))
    }

    pub(super) fn insert(&mut self, free: &Free, gpu: u32) {
        let (row, column) = self.cell(free);
        let (cell, key) = (row * COLUMNS + column, self.key(free, gpu));
        let known = if self.sets.is_empty(cell) { 0 } else { class_of(self.most[cell]) + 1 };
        self.sets.insert(cell, key);
        self.least[cell] = self.least[cell].min(key);
        self.most[cell] = self.most[cell].max(step_of(key));
        for rows in self.rows.iter_mut().take(class_of(step_of(key)) + 1).skip(known) {
            rows[row] |= 1 << column;
        }
    }

    pub(super) fn remove(&mut self, free: &Free, gpu: u32) {
        let (row, column) = self.cell(free);
        let (cell, key) = (row * COLUMNS + column, self.key(free, gpu));
        self.sets.remove(cell, key);
        let known = class_of(self.most[cell]) + 1;
        let first = self.sets.first(cell);
        self.least[cell] = first.map_or(u64::MAX, |at| self.sets.key(at));
        let left = if first.is_none() {
            self.most[cell] = 0;
            0
        } else {
            if step_of(key) == self.most[cell] {
                self.most[cell] = self.most_step(cell, step_of(key));
            }
            class_of(self.most[cell]) + 1
        };
        for rows in self.rows.iter_mut().take(known).skip(left) {
            rows[row] &= !(1 << column);
        }
    }

    /// The most step in a cell, which is known to be at most `bound`.
    fn most_step(&self, cell: usize, bound: u8) -> u8 {
        let (mut most, mut cursor) = (0, self.sets.first(cell));
        while let (Some(at), true) = (cursor, most < bound) {
            most = most.max(step_of(self.sets.key(at)));
            cursor = self.sets.next(at);
        }
        most
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
        if first_column >= COLUMNS || need.limit / self.step > u8::MAX.into() {
            return None;
        }
        let need_step = self.step(need.limit);
        // A GPU from here on in each of the three holds the need, for all that the cells leave open.
        let sure_row = need.request.div_ceil(100) as usize;
        let sure_column = need.memory.div_ceil(self.unit) as usize;
        let sure_step = need.limit.div_ceil(self.step);
        let mut best: Option<u64> = None;
        let rows = &self.rows[class_of(need_step)];
        for (row, columns) in rows.iter().enumerate().skip(first_row) {
            let mut columns = columns >> first_column << first_column;
            while columns != 0 {
                let column = columns.trailing_zeros() as usize;
                columns &= columns - 1;
                if best.is_some_and(|best| self.least_score(row, column) > best >> SCORE_SHIFT) {
                    break;
                }
                let cell = row * COLUMNS + column;
                let least = self.least[cell];
                if self.most[cell] < need_step || best.is_some_and(|best| least >= best) {
                    continue;
                }
                let sure_cell = row >= sure_row && column >= sure_column;
                let fits = |key: u64| {
                    let sure = sure_cell && u32::from(step_of(key)) >= sure_step;
                    step_of(key) >= need_step
                        && (sure || free_of(gpu_of(key)).holds(need))
                        && accept(gpu_of(key))
                };
                if fits(least) {
                    best = Some(least);
                    continue;
                }
                let mut cursor = self.sets.first(cell).and_then(|at| self.sets.next(at));
                while let Some(at) = cursor {
                    let key = self.sets.key(at);
                    if best.is_some_and(|best| key >= best) {
                        break;
                    }
                    if fits(key) {
                        best = Some(key);
                        break;
                    }
                    cursor = self.sets.next(at);
                }
            }
            // The least cell of the next row is worse than the best, and so are all above it.
            if best.is_some_and(|best| self.least_score(row + 1, first_column) > best >> SCORE_SHIFT) {
                break;
            }
        }
        best.map(gpu_of)
    }

    /// No GPU of the cell has a lower score.
    fn least_score(&self, row: usize, column: usize) -> u64 {
        self.least_of_row[row] + self.least_of_column[column]
    }
}
