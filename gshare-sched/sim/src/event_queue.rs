//! Virtual time: the queue of events with their times.

use core::cmp::Ordering;
use core::fmt;
use gshare_core::Timestamp;
use std::collections::BinaryHeap;

/// Events in the order of their time; events of one time in the order of their scheduling.
///
/// The second rule makes a simulation replay, since a plain heap hands out equal keys in any order.
///
/// ```
/// use gshare_core::Timestamp;
/// use gshare_sim::EventQueue;
/// let mut queue = EventQueue::new();
/// queue.schedule(Timestamp::from_millis(2), "second");
/// queue.schedule(Timestamp::from_millis(1), "first");
/// queue.schedule(Timestamp::from_millis(2), "third");
/// let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, event)| event).collect();
/// assert_eq!(order, ["first", "second", "third"]);
/// ```
///
/// An event cannot be taken back, so give it a generation and drop it when it comes too late. `O(log n)` per event.
pub struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    now: Timestamp,
    scheduled: u64,
}

impl<E> EventQueue<E> {
    /// An empty queue at the epoch.
    pub const fn new() -> Self {
        Self { heap: BinaryHeap::new(), now: Timestamp::ZERO, scheduled: 0 }
    }

    /// The time of the last event taken.
    pub const fn now(&self) -> Timestamp {
        self.now
    }

    /// Adds an event. An event in the past happens now, since time never goes back.
    pub fn schedule(&mut self, at: Timestamp, event: E) {
        let at = at.max(self.now);
        self.heap.push(Entry { at, number: self.scheduled, event });
        self.scheduled += 1;
    }

    /// The time of the next event.
    pub fn next_at(&self) -> Option<Timestamp> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// Takes the next event and moves the time to it.
    pub fn pop(&mut self) -> Option<(Timestamp, E)> {
        let entry = self.heap.pop()?;
        self.now = entry.at;
        Some((entry.at, entry.event))
    }

    /// The time and the event of the next step until `until`; the event is `None` if an engine's `deadline` comes before it.
    pub fn step(&mut self, deadline: Option<Timestamp>, until: Timestamp) -> Option<(Timestamp, Option<E>)> {
        let next = self.next_at();
        let now = next.into_iter().chain(deadline).min().filter(|now| *now <= until)?;
        let event = if next == Some(now) { self.pop() } else { None };
        Some((now, event.map(|(_, event)| event)))
    }

    /// The number of events still to come.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether no event is left.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E> fmt::Debug for EventQueue<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventQueue").field("now", &self.now).field("len", &self.len()).finish()
    }
}

struct Entry<E> {
    at: Timestamp,
    number: u64,
    event: E,
}

/// Reversed: the standard heap gives the greatest first.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_event_in_the_past_happens_now() {
        let mut queue = EventQueue::new();
        queue.schedule(Timestamp::from_millis(5), "a");
        queue.pop();
        queue.schedule(Timestamp::from_millis(1), "b");
        assert_eq!(queue.pop(), Some((Timestamp::from_millis(5), "b")));
        assert_eq!(queue.now(), Timestamp::from_millis(5));
    }

    proptest! {
        /// A stable sort of a list is the slow model of the queue.
        #[test]
        fn events_come_in_order_of_time_then_of_scheduling(times in prop::collection::vec(0u64..20, 0..60)) {
            let mut queue = EventQueue::new();
            for (number, &at) in times.iter().enumerate() {
                queue.schedule(Timestamp::from_nanos(at), number);
            }
            let mut expected: Vec<_> = times.iter().map(|&at| Timestamp::from_nanos(at)).zip(0..).collect();
            expected.sort_by_key(|&(at, _)| at);
            prop_assert_eq!(std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>(), expected);
        }
    }
}
