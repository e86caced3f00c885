//! Many short lists in one vector.
//!
//! A GPU has a handful of placements and a handful of free rectangles. A `Vec` for each list would allocate whenever
//! some GPU passes its own record; here a list is a run of 4, 8, 16, ... entries in one shared vector, and a run that
//! is outgrown goes to a free list for the next GPU. A pool that has stopped growing allocates nothing.

const SMALLEST_LOG2: u8 = 2;
const CLASSES: usize = 24;

/// A list. `Default` is the empty one, which holds no memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Run {
    start: u32,
    len: u32,
    /// log2 of the capacity; 0 = no memory.
    log2: u8,
}

impl Run {
    pub(crate) fn len(self) -> usize {
        self.len as usize
    }
}

/// The shared memory of the lists.
#[derive(Debug, Clone)]
pub(crate) struct Runs<T> {
    items: Vec<T>,
    free: [Vec<u32>; CLASSES],
}

#[expect(clippy::cast_possible_truncation, reason = "lists are short and their sum stays below 2^32 entries")]
impl<T: Copy + Default> Runs<T> {
    pub(crate) fn new() -> Self {
        Self { items: Vec::new(), free: [const { Vec::new() }; CLASSES] }
    }

    pub(crate) fn get(&self, run: Run) -> &[T] {
        &self.items[run.start as usize..][..run.len as usize]
    }

    pub(crate) fn get_mut(&mut self, run: Run) -> &mut [T] {
        &mut self.items[run.start as usize..][..run.len as usize]
    }

    pub(crate) fn push(&mut self, run: &mut Run, item: T) {
        if run.len == self.capacity(*run) {
            let old = *run;
            self.allocate(run, old.len + 1);
            self.items.copy_within(old.start as usize..(old.start + old.len) as usize, run.start as usize);
            run.len = old.len;
            self.give_back(old);
        }
        self.items[(run.start + run.len) as usize] = item;
        run.len += 1;
    }

    /// Removes an entry and keeps the order of the others.
    pub(crate) fn remove(&mut self, run: &mut Run, index: usize) {
        let list = self.get_mut(*run);
        list.copy_within(index + 1.., index);
        run.len -= 1;
    }

    pub(crate) fn set(&mut self, run: &mut Run, items: &[T]) {
        if items.len() as u32 > self.capacity(*run) {
            self.give_back(*run);
            self.allocate(run, items.len() as u32);
        }
        run.len = items.len() as u32;
        self.get_mut(*run).copy_from_slice(items);
    }

    pub(crate) fn clear(&mut self, run: &mut Run) {
        self.give_back(*run);
        *run = Run::default();
    }

    fn capacity(&self, run: Run) -> u32 {
        if run.log2 == 0 { 0 } else { 1 << run.log2 }
    }

    fn allocate(&mut self, run: &mut Run, len: u32) {
        let log2 = (len.next_power_of_two().trailing_zeros() as u8).max(SMALLEST_LOG2);
        let start = self.free[log2 as usize].pop().unwrap_or_else(|| {
            let start = self.items.len();
            self.items.resize(start + (1 << log2), T::default());
            start as u32
        });
        *run = Run { start, len: 0, log2 };
    }

    fn give_back(&mut self, run: Run) {
        if run.log2 != 0 {
            self.free[run.log2 as usize].push(run.start);
        }
    }

    /// Bytes held, for reports.
    pub(crate) fn bytes(&self) -> usize {
        self.items.capacity() * size_of::<T>()
            + self.free.iter().map(|list| list.capacity() * 4).sum::<usize>()
    }
}
