//! The order in which waiting requests have their turn: three lists through one table, and an exact skip count in O(1).
//!
//! # Problem
//! Out-of-order dispatch is bounded by how often each waiting request was overtaken (GPU-enabled FaaS, Algorithm 1, lines
//! 11-16). Counting that in every request costs O(queue) per dispatch.
//!
//! # Algorithm
//! A request is skipped when a later request leaves the queue first, and a request that overtakes `r` overtakes all before
//! `r` too. So the counts never increase from the head to the tail, and their differences suffice: each request carries a
//! **mark**, and its count is the sum of the marks from itself to the tail. When `x` is dispatched, all before it were
//! skipped once more: its predecessor gets one mark. When `x` goes, for any reason, its predecessor also inherits `x`'s
//! marks; the head's marks vanish. The head's count is the sum of all marks, which is stored.
//!
//! ## Example
//! Queue `a b c d`, all marks 0. Dispatch `c`: mark(b) = 1; the counts are a 1, b 1, d 0. Dispatch `b`: `a` inherits one
//! mark and gets one: the counts are a 2, d 0. A request that comes back after the loss of its GPU counts as skipped as
//! often as its successor.
//!
//! So the requests at the limit form a prefix of the queue. The queue stores the last request of this prefix with its
//! count, and moves it towards the tail as counts grow. So a comparison of two numbers tells whether a request is due.
//!
//! # Cost
//! O(1) (amortised) for everything but the insertion of a request that comes back: it walks from the head, among the oldest
//! requests.

use crate::platform::hash_table::Table;
use gshare_core::{FunctionId, GpuId, RequestId, Timestamp};

/// No request.
pub(super) const NONE: u32 = u32::MAX;

/// The lists a waiting request is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// All waiting requests.
    Arrival = 0,
    /// Requests that the same kinds of GPU can serve.
    Class = 1,
    /// Requests for the same function.
    Function = 2,
}

#[derive(Debug, Clone, Copy)]
struct Links {
    prev: u32,
    next: u32,
}

/// One list: its ends and its length.
#[derive(Debug, Clone, Copy)]
pub(super) struct List {
    pub(super) head: u32,
    pub(super) tail: u32,
    pub(super) len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NONE, tail: NONE, len: 0 }
    }
}

/// The present place of an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// No device is chosen.
    Queued,
    /// Behind the work of this device, which has its model.
    Local(GpuId),
    /// On this device, which makes room for its model or loads it.
    Placed(GpuId),
}

/// A request that waits, or a wish for a function's kept instance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    /// The request of the ledger; none for a kept instance.
    pub(super) request: Option<RequestId>,
    pub(super) function: FunctionId,
    /// Its place in the order of arrival.
    pub(super) number: u64,
    pub(super) arrived: Timestamp,
    /// The first instant at which it is too late to start; the end of time if there is none.
    pub(super) drop_at: Timestamp,
    /// Time that was added to its device's local queue for it.
    pub(super) local_ns: u64,
    links: [Links; 3],
    mark: u32,
    pub(super) failed_loads: u8,
    pub(super) place: Place,
}

impl Ask {
    pub(super) const fn new(
        request: Option<RequestId>,
        function: FunctionId,
        number: u64,
        arrived: Timestamp,
    ) -> Self {
        const NOWHERE: Links = Links { prev: NONE, next: NONE };
        Self {
            request,
            function,
            number,
            arrived,
            drop_at: Timestamp::MAX,
            local_ns: 0,
            links: [NOWHERE; 3],
            mark: 0,
            failed_loads: 0,
            place: Place::Queued,
        }
    }
}

/// Requests that the same kinds of GPU can serve.
#[derive(Debug, Clone, Copy)]
struct Class {
    /// One bit per kind.
    kinds: u64,
    list: List,
}

impl Class {
    /// Whether a request waits here for this kind of GPU.
    const fn serves(&self, kind: u8) -> bool {
        self.list.len > 0 && self.kinds >> kind & 1 == 1
    }
}

/// The waiting requests that a kind of GPU can serve, in order of arrival.
#[derive(Debug)]
pub(super) struct Walk {
    /// Class, and the next of its requests.
    cursors: Vec<(usize, u32)>,
}

impl Walk {
    pub(super) fn new(queue: &Queue, kind: u8) -> Self {
        let classes = (0..).zip(&queue.classes).filter(|(_, class)| class.serves(kind));
        Self { cursors: classes.map(|(index, class)| (index, class.list.head)).collect() }
    }

    /// The next request, and the cursor it is under.
    pub(super) fn first(&self, queue: &Queue) -> Option<(usize, u32)> {
        let slots = (0..).zip(self.cursors.iter().map(|&(_, slot)| slot));
        slots.filter(|&(_, slot)| slot != NONE).min_by_key(|&(_, slot)| queue.get(slot).number)
    }

    /// Moves a cursor behind a request that is still in the queue.
    pub(super) fn go_on(&mut self, queue: &Queue, cursor: usize, slot: u32) {
        self.cursors[cursor].1 = queue.next(By::Class, slot);
    }

    /// Moves a cursor to the head of its class.
    pub(super) fn restart(&mut self, queue: &Queue, cursor: usize) {
        let (class, slot) = &mut self.cursors[cursor];
        *slot = queue.classes[*class].list.head;
    }
}

/// All asks, and the queue of those without a device.
#[derive(Debug, Default)]
pub(super) struct Queue {
    table: Vec<Ask>,
    free: Vec<u32>,
    names: Table<RequestId, u32>,
    order: List,
    classes: Vec<Class>,
    functions: Table<FunctionId, List>,
    /// Sum of the marks: how often the head was skipped.
    head_skips: u64,
    /// Skips that make a request due.
    limit: u64,
    /// The last request that is due, and how often it was skipped.
    due: u32,
    due_skips: u64,
}

impl Queue {
    /// An empty queue in which a request is due that was skipped `limit` times.
    pub(super) fn new(limit: u32) -> Self {
        Self { limit: limit.into(), due: NONE, ..Self::default() }
    }

    pub(super) fn get(&self, slot: u32) -> &Ask {
        &self.table[slot as usize]
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Ask {
        &mut self.table[slot as usize]
    }

    pub(super) fn find(&self, request: RequestId) -> Option<u32> {
        self.names.get(&request).copied()
    }

    /// Number of asks with a device or without.
    pub(super) fn known(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Number of asks in the queue.
    pub(super) fn len(&self) -> u32 {
        self.order.len
    }

    /// Adds an ask to the table, not to the queue.
    pub(super) fn add(&mut self, ask: Ask) -> u32 {
        let slot = if let Some(slot) = self.free.pop() {
            self.table[slot as usize] = ask;
            slot
        } else {
            self.table.push(ask);
            u32::try_from(self.table.len() - 1).expect("the platform bounds the waiting requests")
        };
        if let Some(request) = ask.request {
            self.names.insert(request, slot);
        }
        slot
    }

    /// Forgets an ask that is not in the queue.
    pub(super) fn forget(&mut self, slot: u32) {
        if let Some(request) = self.get(slot).request {
            self.names.remove(&request);
        }
        self.free.push(slot);
    }

    /// Forgets a function without asks.
    pub(super) fn forget_function(&mut self, function: FunctionId) {
        self.functions.remove(&function);
    }

    /// Whether a waiting request was skipped as often as the limit says.
    pub(super) fn is_due(&self, slot: u32) -> bool {
        self.due != NONE && self.get(slot).number <= self.get(self.due).number
    }

    /// Finds the last due request, starting from the previous one.
    fn find_due(&mut self) {
        loop {
            let (next, skips) = match self.due {
                NONE => (self.order.head, self.head_skips),
                due => (self.next(By::Arrival, due), self.due_skips - u64::from(self.get(due).mark)),
            };
            if next == NONE || skips < self.limit {
                return;
            }
            (self.due, self.due_skips) = (next, skips);
        }
    }

    pub(super) fn next(&self, by: By, slot: u32) -> u32 {
        self.get(slot).links[by as usize].next
    }

    pub(super) fn prev(&self, by: By, slot: u32) -> u32 {
        self.get(slot).links[by as usize].prev
    }

    /// The queued asks for a function.
    pub(super) fn of_function(&self, function: FunctionId) -> List {
        self.functions.get(&function).copied().unwrap_or_default()
    }

    /// Whether a request waits that a kind of GPU can serve.
    pub(super) fn serves(&self, kind: u8) -> bool {
        self.classes.iter().any(|class| class.serves(kind))
    }

    /// The first waiting request that a kind of GPU can serve.
    pub(super) fn first_of(&self, kind: u8) -> Option<u32> {
        let heads = self.classes.iter().filter(|class| class.serves(kind)).map(|class| class.list.head);
        heads.min_by_key(|slot| self.get(*slot).number)
    }

    fn list(&mut self, by: By, class: usize, function: FunctionId) -> &mut List {
        match by {
            By::Arrival => &mut self.order,
            By::Class => &mut self.classes[class].list,
            By::Function => {
                self.functions.get_mut(&function).expect("the function was listed at its first ask")
            }
        }
    }

    /// The class of these kinds.
    fn class(&mut self, kinds: u64) -> usize {
        self.classes.iter().position(|class| class.kinds == kinds).unwrap_or_else(|| {
            self.classes.push(Class { kinds, list: List::default() });
            self.classes.len() - 1
        })
    }

    /// Puts an ask into the queue, at the place of its arrival.
    pub(super) fn enter(&mut self, slot: u32, kinds: u64) {
        let function = self.get(slot).function;
        if !self.functions.contains_key(&function) {
            self.functions.insert(function, List::default());
        }
        let class = self.class(kinds);
        let ask = self.get_mut(slot);
        ask.place = Place::Queued;
        ask.mark = 0;
        for by in [By::Arrival, By::Class, By::Function] {
            self.link(by, class, slot);
        }
        self.find_due();
    }

    /// Takes a request out of the queue. `dispatched`: those before it were skipped.
    pub(super) fn leave(&mut self, slot: u32, kinds: u64, dispatched: bool) {
        let mark = self.get(slot).mark;
        let before = self.prev(By::Arrival, slot);
        if slot == self.due {
            self.due = before;
            self.due_skips += self.table.get(before as usize).map_or(0, |before| u64::from(before.mark))
                + u64::from(dispatched);
        } else if !self.is_due(slot) {
            self.due_skips += u64::from(dispatched);
        }
        if before == NONE {
            self.head_skips -= u64::from(mark);
        } else {
            let more = mark + u32::from(dispatched);
            self.get_mut(before).mark += more;
            self.head_skips += u64::from(dispatched);
        }
        let class = self.class(kinds);
        for by in [By::Arrival, By::Class, By::Function] {
            self.unlink(by, class, slot);
        }
        self.find_due();
    }

    /// Moves a function's queued asks from one class to another.
    pub(super) fn reclass(&mut self, function: FunctionId, from: u64, to: u64) {
        let (from, to) = (self.class(from), self.class(to));
        let mut slot = self.of_function(function).head;
        while slot != NONE {
            self.unlink(By::Class, from, slot);
            self.link(By::Class, to, slot);
            slot = self.next(By::Function, slot);
        }
    }

    fn link(&mut self, by: By, class: usize, slot: u32) {
        let Ask { number, function, .. } = *self.get(slot);
        let list = *self.list(by, class, function);
        let mut next = NONE;
        if list.tail != NONE && self.get(list.tail).number > number {
            next = list.head;
            while self.get(next).number <= number {
                next = self.next(by, next);
            }
        }
        let prev = if next == NONE { list.tail } else { self.prev(by, next) };
        self.get_mut(slot).links[by as usize] = Links { prev, next };
        self.set_next(by, class, function, prev, slot);
        self.set_prev(by, class, function, next, slot);
        self.list(by, class, function).len += 1;
    }

    fn unlink(&mut self, by: By, class: usize, slot: u32) {
        let function = self.get(slot).function;
        let Links { prev, next } = self.get(slot).links[by as usize];
        self.set_next(by, class, function, prev, next);
        self.set_prev(by, class, function, next, prev);
        self.list(by, class, function).len -= 1;
    }

    /// Puts `next` after a slot, or at the list's head if the slot is [`NONE`].
    fn set_next(&mut self, by: By, class: usize, function: FunctionId, slot: u32, next: u32) {
        match slot {
            NONE => self.list(by, class, function).head = next,
            _ => self.get_mut(slot).links[by as usize].next = next,
        }
    }

    /// Puts `prev` before a slot, or at the list's tail if the slot is [`NONE`].
    fn set_prev(&mut self, by: By, class: usize, function: FunctionId, slot: u32, prev: u32) {
        match slot {
            NONE => self.list(by, class, function).tail = prev,
            _ => self.get_mut(slot).links[by as usize].prev = prev,
        }
    }

    /// Checks the properties that hold between two events.
    pub(super) fn invariants(&self) {
        let (mut slot, mut marks, mut last, mut len) = (self.order.head, 0, 0, 0);
        while slot != NONE {
            let ask = self.get(slot);
            assert_eq!(ask.place, Place::Queued);
            assert!(last <= ask.number, "the queue is in the order of arrival");
            last = ask.number;
            marks += u64::from(ask.mark);
            len += 1;
            slot = self.next(By::Arrival, slot);
        }
        assert_eq!((marks, len), (self.head_skips, self.order.len));
        assert_eq!(self.classes.iter().map(|class| class.list.len).sum::<u32>(), len);
        assert_eq!(self.functions.sorted().iter().map(|(_, list)| list.len).sum::<u32>(), len);
        assert!(self.names.len() <= self.known(), "a name without an ask");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Name, count, and whether it is due, from the head on.
    fn counts(queue: &Queue) -> Vec<(u64, u64, bool)> {
        let (mut counts, mut slot, mut count) = (Vec::new(), queue.order.head, queue.head_skips);
        while slot != NONE {
            counts.push((queue.get(slot).number, count, queue.is_due(slot)));
            count -= u64::from(queue.get(slot).mark);
            slot = queue.next(By::Arrival, slot);
        }
        counts
    }

    proptest! {
        /// Hole 3: marks on a linked list give the same counts as a counter in every request.
        #[test]
        fn hole_03_marks_count_skips_exactly(
            limit in 0u32..6, steps in prop::collection::vec((0u8..5, 0usize..8), 0..80),
        ) {
            let mut queue = Queue::new(limit);
            let mut literal: Vec<(u64, u64)> = Vec::new();
            let mut away: Vec<u32> = Vec::new();
            for (id, (what, at)) in (0..).zip(steps) {
                match what {
                    0 | 1 => {
                        let (name, function) = (RequestId::new(id), FunctionId::new(at as u32));
                        let slot = queue.add(Ask::new(Some(name), function, id, Timestamp::ZERO));
                        queue.enter(slot, 1);
                        literal.push((id, 0));
                    }
                    2 | 3 if at < literal.len() => {
                        let (name, _) = literal.remove(at);
                        let slot = queue.find(RequestId::new(name)).unwrap();
                        queue.leave(slot, 1, what == 2);
                        if what == 2 {
                            literal[..at].iter_mut().for_each(|(_, count)| *count += 1);
                        }
                        away.push(slot);
                    }
                    4 if at < away.len() => {
                        let slot = away.remove(at);
                        queue.enter(slot, 1);
                        let name = queue.get(slot).number;
                        let place = literal.partition_point(|&(other, _)| other < name);
                        let count = literal.get(place).map_or(0, |&(_, count)| count);
                        literal.insert(place, (name, count));
                    }
                    _ => {}
                }
                let expected = literal.iter().map(|&(name, count)| (name, count, count >= limit.into()));
                prop_assert_eq!(counts(&queue), expected.collect::<Vec<_>>());
            }
        }
    }
}
