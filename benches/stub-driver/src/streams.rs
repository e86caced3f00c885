//! Streams and events: times of kernels, and work that queues behind a wait.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use crate::device::{device, now};

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// An entry of a stream.
#[derive(Clone, Copy)]
pub(crate) enum Entry {
    /// Work of this length, in ns, on the whole device.
    Kernel(u64),
    /// Work of this length, in ns, beside kernels.
    Copy(u64),
    /// The record of an event by its number, and how many records of it there were before.
    Record(usize, u64),
    Wait(Wait),
    /// A function on the host, with its argument.
    Host(HostFunction, usize),
}

/// The condition for which a stream waits.
#[derive(Clone, Copy)]
pub(crate) enum Wait {
    /// A word at an address, to reach at least this value.
    Word(usize, u32),
    Event(usize, u64),
    /// The host function that runs for this stream.
    Host,
}

#[derive(Default)]
struct Stream {
    /// End of the timed entries, in ns.
    until: u64,
    /// Entries behind a wait.
    queue: VecDeque<Entry>,
    waits: Option<Wait>,
}

#[derive(Default)]
struct Event {
    records: u64,
    /// The last timed record, and its time in ns.
    timed: u64,
    at: u64,
}

#[derive(Default)]
pub(crate) struct Streams {
    streams: Vec<Option<Stream>>,
    events: Vec<Event>,
    /// Due host functions: stream, time, function and argument.
    due: Vec<(usize, u64, HostFunction, usize)>,
}

/// All streams and events of the process. The first two streams are the default streams.
pub(crate) fn streams() -> MutexGuard<'static, Streams> {
    static STREAMS: Mutex<Streams> =
        Mutex::new(Streams { streams: Vec::new(), events: Vec::new(), due: Vec::new() });
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Streams {
    pub(crate) fn create(&mut self) -> usize {
        self.defaults();
        let free = self.streams.iter().position(Option::is_none);
        let number = free.unwrap_or(self.streams.len());
        if free.is_none() {
            self.streams.push(None);
        }
        self.streams[number] = Some(Stream::default());
        number
    }

    fn defaults(&mut self) {
        while self.streams.len() < 3 {
            self.streams.push(Some(Stream::default()));
        }
    }

    pub(crate) fn destroy(&mut self, stream: usize) -> bool {
        self.streams.get_mut(stream).is_some_and(|slot| slot.take().is_some())
    }

    pub(crate) fn create_event(&mut self) -> usize {
        self.events.push(Event::default());
        self.events.len() - 1
    }

    /// A new record of an event, to be pushed.
    pub(crate) fn record(&mut self, event: usize) -> Option<Entry> {
        let found = self.events.get_mut(event)?;
        found.records += 1;
        Some(Entry::Record(event, found.records))
    }

    /// Waits for the last record of an event so far.
    pub(crate) fn wait_for(&self, event: usize) -> Option<Entry> {
        self.events.get(event).map(|found| Entry::Wait(Wait::Event(event, found.records)))
    }

    pub(crate) fn push(&mut self, stream: usize, entry: Entry) -> bool {
        self.defaults();
        let now = now();
        self.resolve(stream, now);
        let Some(Some(to)) = self.streams.get_mut(stream) else { return false };
        if to.waits.is_some() {
            to.queue.push_back(entry);
        } else {
            self.time(stream, entry, now);
        }
        true
    }

    /// Times an entry of a stream without a wait; `now` at the earliest.
    fn time(&mut self, number: usize, entry: Entry, now: u64) {
        let Some(Some(stream)) = self.streams.get_mut(number) else { return };
        let ready = stream.until.max(now);
        match entry {
            Entry::Kernel(length) => stream.until = device().run(ready, length),
            Entry::Copy(length) => stream.until = ready + length,
            Entry::Record(event, record) => {
                stream.until = ready;
                let event = &mut self.events[event];
                (event.timed, event.at) = (record, ready);
            }
            Entry::Wait(wait) => {
                (stream.until, stream.waits) = (ready, Some(wait));
                self.resolve(number, now);
            }
            Entry::Host(function, argument) => {
                (stream.until, stream.waits) = (ready, Some(Wait::Host));
                self.due.push((number, ready, function, argument));
            }
        }
        if self.waits(number) {
            watch();
        }
    }

    fn waits(&self, number: usize) -> bool {
        matches!(self.streams.get(number), Some(Some(Stream { waits: Some(_), .. })))
    }

    /// Times the work behind an ended wait.
    fn resolve(&mut self, number: usize, now: u64) {
        loop {
            let Some(Some(stream)) = self.streams.get_mut(number) else { return };
            let over = match stream.waits {
                None | Some(Wait::Host) => return,
                Some(Wait::Event(event, record)) => {
                    let event = &self.events[event];
                    (event.timed >= record).then_some(event.at)
                }
                // The device reads the word when it gets there.
                Some(Wait::Word(address, least)) => {
                    // SAFETY: the program gave the address of a word that it keeps until the wait is over.
                    let word = unsafe { &*std::ptr::with_exposed_provenance::<AtomicU32>(address) };
                    let passed = word.load(Ordering::Acquire).wrapping_sub(least).cast_signed() >= 0;
                    (stream.until <= now && passed).then_some(now)
                }
            };
            let Some(at) = over else { return };
            self.release(number, at);
        }
    }

    /// Ends a stream's wait at `at`.
    fn release(&mut self, number: usize, at: u64) {
        let Some(Some(stream)) = self.streams.get_mut(number) else { return };
        (stream.until, stream.waits) = (stream.until.max(at), None);
        while let Some(Some(stream)) = self.streams.get_mut(number)
            && stream.waits.is_none()
            && let Some(entry) = stream.queue.pop_front()
        {
            self.time(number, entry, at);
        }
    }

    fn resolve_all(&mut self, now: u64) {
        (0..self.streams.len()).for_each(|number| self.resolve(number, now));
    }

    /// End of a stream's work, in ns; `u64::MAX` while it waits.
    pub(crate) fn until(&mut self, number: usize, now: u64) -> Option<u64> {
        self.defaults();
        self.resolve_all(now);
        let stream = self.streams.get(number)?.as_ref()?;
        Some(if stream.waits.is_some() { u64::MAX } else { stream.until })
    }

    /// End of the work of all streams.
    pub(crate) fn all_until(&mut self, now: u64) -> u64 {
        (0..self.streams.len()).filter_map(|number| self.until(number, now)).max().unwrap_or(0)
    }

    /// The time of an event's last record, in ns; `u64::MAX` while it has none.
    pub(crate) fn event_at(&mut self, event: usize, now: u64) -> Option<u64> {
        self.resolve_all(now);
        let event = self.events.get(event)?;
        Some(if event.timed < event.records { u64::MAX } else { event.at })
    }

    /// The first host function that is due by now.
    fn take_due(&mut self, now: u64) -> Option<(usize, HostFunction, usize)> {
        let at = self.due.iter().position(|&(_, at, _, _)| at <= now)?;
        let (stream, _, function, argument) = self.due.swap_remove(at);
        Some((stream, function, argument))
    }
}

/// Runs host functions and checks the streams' waits, from the first wait of the process on.
fn watch() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_micros(20));
                let due = streams().take_due(now());
                if let Some((stream, function, argument)) = due {
                    // SAFETY: the program's own function and argument.
                    unsafe { function(std::ptr::with_exposed_provenance_mut(argument)) };
                    streams().release(stream, now());
                }
            }
        });
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_micros(20));
                streams().resolve_all(now());
            }
        });
    });
}

/// Waits until the time given by `until` has come.
pub(crate) fn wait(mut until: impl FnMut(&mut Streams, u64) -> Option<u64>) -> bool {
    loop {
        let now = now();
        let Some(at) = until(&mut streams(), now) else { return false };
        match at.saturating_sub(now) {
            0 => return true,
            // Short waits spin, as the driver's do.
            1..50_000 => core::hint::spin_loop(),
            left => std::thread::sleep(Duration::from_nanos((left / 2).min(50_000))),
        }
    }
}
