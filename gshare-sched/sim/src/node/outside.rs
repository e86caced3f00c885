//! Everything between the processes and the daemon: the queue of events, the connections and the log.

use super::node_book::NodeBook;
use super::node_plan::Delays;
use super::worker::Done;
use crate::event_queue::EventQueue;
use crate::log::Log;
use crate::rng::Rng;
use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{ConnId, Duration, Timestamp};

/// A scheduled event.
#[derive(Debug)]
pub(super) enum Event {
    /// A process starts.
    Starts { process: usize },
    /// The launching thread of a process goes on, unless another turn has been scheduled since.
    Thread { process: usize, turn: u64 },
    /// The helper thread of a process wakes up, unless a call has woken it earlier.
    Helper { process: usize, turn: u64 },
    /// The allocating thread of a process goes on.
    Allocates { process: usize },
    /// A copy of a process's memory ends.
    Copied { process: usize },
    /// A stopped process continues.
    Continues { process: usize },
    /// A frame reaches the daemon. The frame is boxed, so that the queue moves small events.
    ToDaemon { conn: ConnId, frame: Box<ToDaemon> },
    /// The daemon sees the end of a connection.
    DaemonSeesEnd { conn: ConnId },
    /// A frame reaches a process.
    ToProcess { conn: ConnId, frame: Box<ToClient> },
    /// A process sees the end of a connection.
    ProcessSeesEnd { conn: ConnId },
    /// A kernel ends on a device.
    Device { gpu: usize },
    /// A fault strikes, given by its place in the plan.
    Fault { index: usize },
    /// The daemon is started again.
    DaemonStarts,
    /// The stopped daemon continues.
    DaemonContinues,
}

/// A connection, as both ends see it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) process: usize,
    /// Frames arrive in order, so the next frame of each direction arrives no earlier than these times.
    to_daemon: Timestamp,
    /// The daemon reads nothing before this time, and nothing but the end if the frames are `lost`.
    unread_until: Timestamp,
    lost: bool,
    to_process: Timestamp,
    /// The process has not closed the connection.
    pub(super) held: bool,
    /// The daemon has not closed the connection.
    pub(super) served: bool,
}

/// The number of log lines kept for a report.
const LINES: usize = 400;

/// The connections by which processes and the daemon reach each other. See the [module](self).
#[derive(Debug)]
pub(super) struct Outside {
    pub(super) queue: EventQueue<Event>,
    pub(super) book: NodeBook,
    pub(super) log: Log,
    /// Work space for the bytes of a frame.
    buffer: Vec<u8>,
    pub(super) delays: Delays,
    /// Frames are late until this time.
    pub(super) late_until: Timestamp,
    /// Totals and permissions come twice until this time.
    pub(super) doubled_until: Timestamp,
    /// Whether a daemon accepts connections; a stopped daemon does.
    pub(super) listening: bool,
    pub(super) conns: Vec<Connection>,
    /// Completed tasks of workers.
    pub(super) done: Vec<Done>,
    rng: Rng,
}

impl Outside {
    pub(super) fn new(book: NodeBook, delays: Delays, rng: Rng, logs: bool) -> Self {
        Self {
            queue: EventQueue::new(),
            book,
            log: Log::keeping(if logs { LINES } else { 0 }),
            buffer: Vec::new(),
            delays,
            late_until: Timestamp::ZERO,
            doubled_until: Timestamp::ZERO,
            listening: true,
            conns: Vec::new(),
            done: Vec::new(),
            rng,
        }
    }

    /// The delay between new work for a thread and the thread's next turn.
    pub(super) fn wake_up(&mut self) -> Duration {
        self.rng.duration(self.delays.wake.0, self.delays.wake.1)
    }

    fn travel(&mut self, now: Timestamp) -> Timestamp {
        let mut delay = self.rng.duration(self.delays.frame.0, self.delays.frame.1);
        if now < self.late_until && self.rng.percent(30) {
            delay =
                delay.saturating_add(self.rng.duration(Duration::from_micros(200), Duration::from_millis(8)));
        }
        now.saturating_add(delay)
    }

    /// Connects a process, or returns `None` while no daemon listens.
    pub(super) fn connect(&mut self, now: Timestamp, process: usize) -> Option<ConnId> {
        if !self.listening {
            return None;
        }
        let conn = ConnId::new(u32::try_from(self.conns.len()).unwrap_or(u32::MAX), 0);
        self.conns.push(Connection {
            process,
            to_daemon: now,
            unread_until: now,
            lost: false,
            to_process: now,
            held: true,
            served: true,
        });
        self.log.line(now, || format!("process {process} connects as {conn}"));
        Some(conn)
    }

    pub(super) fn conn(&self, conn: ConnId) -> Option<&Connection> {
        self.conns.get(conn.index())
    }

    /// Breaks a connection at the process's end, which the daemon notices `late`.
    pub(super) fn breaks(&mut self, now: Timestamp, conn: ConnId, late: Duration) {
        let Some(entry) = self.conns.get_mut(conn.index()) else { return };
        entry.unread_until = now.saturating_add(late);
        entry.lost = late.is_zero();
        // Later frames keep their place behind the frames under way.
        entry.to_daemon = entry.to_daemon.max(entry.unread_until.saturating_add(Duration::from_nanos(1)));
    }

    /// Whether the daemon reads what arrives on a connection now. Otherwise the event comes again later, or is lost.
    pub(super) fn reads(&mut self, now: Timestamp, conn: ConnId, event: Event) -> Option<Event> {
        let Some(entry) = self.conns.get(conn.index()) else { return Some(event) };
        if now < entry.unread_until {
            self.queue.schedule(entry.unread_until, event);
            return None;
        }
        (!entry.lost || matches!(event, Event::DaemonSeesEnd { .. })).then_some(event)
    }

    /// Whether a frame comes twice.
    fn doubles(&mut self, now: Timestamp, is_total: bool) -> bool {
        let doubled = is_total && now < self.doubled_until && self.rng.percent(40);
        self.book.figures.doubled += u64::from(doubled);
        doubled
    }

    /// Sends a frame from a process. `false` means the other end has closed the connection.
    pub(super) fn say(&mut self, now: Timestamp, conn: ConnId, frame: ToDaemon) -> bool {
        let arrives = self.travel(now);
        let Some(entry) = self.conns.get_mut(conn.index()).filter(|entry| entry.held && entry.served) else {
            return false;
        };
        entry.to_daemon = entry.to_daemon.max(arrives);
        let arrives = entry.to_daemon;
        let process = entry.process;
        self.buffer.clear();
        frame.encode(0, &mut self.buffer);
        self.log.mix(&[now.as_nanos(), u64::from(conn.slot())]);
        self.log.mix_bytes(&self.buffer);
        self.log.line(now, || format!("process {process} says {frame:?}"));
        self.book.said(now, conn, process, &frame);
        let twice = self.doubles(now, matches!(frame, ToDaemon::Use { .. })).then(|| frame.clone());
        for frame in twice.into_iter().chain([frame]) {
            self.queue.schedule(arrives, Event::ToDaemon { conn, frame: Box::new(frame) });
        }
        true
    }

    /// Sends a frame from the daemon.
    pub(super) fn tell(&mut self, now: Timestamp, conn: ConnId, frame: ToClient) {
        let arrives = self.travel(now);
        let Some(entry) = self.conns.get_mut(conn.index()).filter(|entry| entry.served) else { return };
        entry.to_process = entry.to_process.max(arrives);
        let arrives = entry.to_process;
        let process = entry.process;
        self.buffer.clear();
        frame.encode(0, &mut self.buffer);
        self.log.mix(&[now.as_nanos(), u64::from(conn.slot())]);
        self.log.mix_bytes(&self.buffer);
        self.log.line(now, || format!("daemon tells process {process}: {frame:?}"));
        self.book.told(now, conn, &frame);
        let twice = self.doubles(now, matches!(frame, ToClient::Allow { .. })).then(|| frame.clone());
        for frame in twice.into_iter().chain([frame]) {
            self.queue.schedule(arrives, Event::ToProcess { conn, frame: Box::new(frame) });
        }
    }

    /// Closes a connection from the process's end.
    pub(super) fn hang_up(&mut self, now: Timestamp, conn: ConnId) {
        let arrives = self.travel(now);
        let Some(entry) = self.conns.get_mut(conn.index()).filter(|entry| entry.held) else { return };
        entry.held = false;
        let arrives = entry.to_daemon.max(arrives);
        self.queue.schedule(arrives, Event::DaemonSeesEnd { conn });
    }

    /// Closes a connection from the daemon's end, or because the daemon dies.
    pub(super) fn cut(&mut self, now: Timestamp, conn: ConnId) {
        let arrives = self.travel(now);
        let Some(entry) = self.conns.get_mut(conn.index()).filter(|entry| entry.served) else { return };
        entry.served = false;
        let arrives = entry.to_process.max(arrives);
        self.book.closed(conn);
        self.queue.schedule(arrives, Event::ProcessSeesEnd { conn });
    }
}
