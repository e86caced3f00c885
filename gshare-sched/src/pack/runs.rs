//! Many short lists in one vector.
//!
//! A GPU has a handful of placements and a handful of free rectangles. A `Vec` for each list would allocate whenever
//! some GPU passes its own record; here a list is a run of 4, 8, 16, ... entries in one shared vector, and a run that
//! is outgrown goes to a free list for the next GPU. A pool that has stopped growing allocates nothing.
//!
//! A run is two cache lines away: its owner's, which says where it is, and its own. A list that is nearly always short can
//! lie with its owner instead ([`Few`]) and has a run only while it is longer than there is room.

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

/// A list with up to `N` entries in place, and more entries in a run. `Default` is empty.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Few<T, const N: usize> {
    /// Without memory of its own, its length is the length of `here`.
    run: Run,
    here: [T; N],
}

impl<T, const N: usize> Few<T, N> {
    pub(crate) fn len(&self) -> usize {
        self.run.len()
    }
}

impl<T: Copy + Default, const N: usize> Default for Few<T, N> {
    fn default() -> Self {
        Self { run: Run::default(), here: [T::default(); N] }
    }
}

/// The shared memory of the lists.
#[derive(Debug, Clone, Default)]
pub(crate) struct Runs<T> {
    items: Vec<T>,
    free: [Vec<u32>; CLASSES],
}

#[expect(clippy::cast_possible_truncation, reason = "lists are short and their sum stays below 2^32 entries")]
impl<T: Copy + Default> Runs<T> {
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

    #[inline]
    pub(crate) fn get_few<'a, const N: usize>(&'a self, few: &'a Few<T, N>) -> &'a [T] {
        if few.run.log2 == 0 { &few.here[..few.run.len()] } else { self.get(few.run) }
    }

    #[inline]
    pub(crate) fn get_few_mut<'a, const N: usize>(&'a mut self, few: &'a mut Few<T, N>) -> &'a mut [T] {
        if few.run.log2 == 0 { &mut few.here[..few.run.len()] } else { self.get_mut(few.run) }
    }

    pub(crate) fn set_few<const N: usize>(&mut self, few: &mut Few<T, N>, items: &[T]) {
        let Some(here) = few.here.get_mut(..items.len()) else { return self.set(&mut few.run, items) };
        here.copy_from_slice(items);
        self.give_back(few.run);
        few.run = Run { len: items.len() as u32, ..Run::default() };
    }

    /// The same for the first `len` of `items`: where more lie behind them, a short list is copied at a length that is known
    /// beforehand.
    #[inline]
    pub(crate) fn set_few_of<const N: usize>(&mut self, few: &mut Few<T, N>, items: &[T], len: usize) {
        match items.first_chunk() {
            Some(items) if len <= N && few.run.log2 == 0 => {
                few.here = *items;
                few.run.len = len as u32;
            }
            _ => self.set_few(few, &items[..len]),
        }
    }

    #[inline]
    pub(crate) fn push_few<const N: usize>(&mut self, few: &mut Few<T, N>, item: T) {
        if few.run.log2 == 0 {
            if let Some(free) = few.here.get_mut(few.run.len()) {
                *free = item;
                few.run.len += 1;
                return;
            }
            self.set(&mut few.run, &few.here);
        }
        self.push(&mut few.run, item);
    }

    /// Removes an entry and keeps the order of the others.
    pub(crate) fn remove_few<const N: usize>(&mut self, few: &mut Few<T, N>, index: usize) {
        self.get_few_mut(few).copy_within(index + 1.., index);
        few.run.len -= 1;
        // Not as soon as the list fits, or one changing entry would move the others each time.
        if few.run.log2 != 0 && few.run.len() <= N / 2 {
            let run = few.run;
            few.here[..run.len()].copy_from_slice(self.get(run));
            self.give_back(run);
            few.run = Run { len: run.len, ..Run::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Three lists that grow beyond the room they have at home, and come back, are three vectors.
        #[test]
        fn a_list_with_its_owner_is_a_vector(changes in prop::collection::vec((0..3usize, 0..9u8, 0..12usize), 1..200)) {
            let mut runs: Runs<u32> = Runs::default();
            let mut lists = [Few::<u32, 4>::default(); 3];
            let mut literal: [Vec<u32>; 3] = Default::default();
            for (step, (list, change, at)) in changes.into_iter().enumerate() {
                let (few, vector) = (&mut lists[list], &mut literal[list]);
                let item = u32::try_from(step).unwrap_or(0);
                match change {
                    0..4 => {
                        runs.push_few(few, item);
                        vector.push(item);
                    }
                    4..7 if at < vector.len() => {
                        runs.remove_few(few, at);
                        vector.remove(at);
                    }
                    7 => {
                        *vector = vec![item; at];
                        runs.set_few(few, vector);
                    }
                    8 => {
                        *vector = vec![item; at];
                        let beyond: Vec<u32> = vector.iter().copied().chain(0..5).collect();
                        runs.set_few_of(few, &beyond, at);
                    }
                    _ => {}
                }
                runs.get_few_mut(few).iter_mut().zip(vector.iter_mut()).take(1).for_each(|(few, vector)| {
                    (*few, *vector) = (item, item);
                });
                for (few, vector) in lists.iter().zip(&literal) {
                    prop_assert_eq!(runs.get_few(few), vector.as_slice());
                    prop_assert_eq!(few.len(), vector.len());
                }
            }
        }
    }
}
