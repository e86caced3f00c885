//! The weights of a program that can be parked: the process allocates them, moves them by order, and reserves them anew to come back.

use super::{DEVICE, Life, Process, Request};
use crate::node::outside::{Event, Outside};
use gshare_core::reason::Obstacle;
use gshare_core::{Bytes, Duration, Timestamp};
use gshare_meter::{MeterEvent, Movable, Move};

/// Bytes that the link to host memory copies in a microsecond: 64 GB/s.
const LINK: u64 = 64_000;
/// Time between two looks at work on the device, or at a stopped process.
const LOOK: Duration = Duration::from_millis(1);

/// The place of a process's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) enum Place {
    Here,
    /// On their way to host memory.
    Leaving,
    Away,
    /// Room on the device has been asked for.
    Asking,
    /// On their way to the device, which holds them already.
    Coming,
}

/// The time for a copy between the device and host memory.
pub(in crate::node) fn copy_of(bytes: Bytes) -> Duration {
    Duration::from_micros(bytes.0 / LINK + 1)
}

impl Process {
    /// Whether the launching thread finds the weights on the device. Otherwise it waits for them.
    pub(super) fn finds_weights(&mut self, now: Timestamp, outside: &mut Outside) -> bool {
        let misses = self.place != Place::Here;
        if misses {
            outside.book.misses(now, self.who.number);
            if !self.missed {
                self.missed = true;
                self.ring(now, outside);
            }
        }
        !misses
    }

    /// The weights as the meter sees them.
    pub(in crate::node) fn movable(&self) -> Option<Movable> {
        let bytes = match self.place {
            Place::Away | Place::Asking => self.away,
            Place::Here | Place::Leaving | Place::Coming => self.blocks.iter().sum(),
        };
        let missed = self.missed.into();
        (self.program.weights > Bytes::ZERO).then_some(Movable { bytes, obstacle: None, missed })
    }

    /// Allocates the rest of the weights, the guaranteed part first.
    pub(in crate::node) fn load_weights(&mut self, now: Timestamp, outside: &mut Outside) {
        let (have, all) = (self.blocks.iter().sum::<u64>(), self.program.weights.0);
        if have >= all {
            return;
        }
        if self.place == Place::Here && !self.shut {
            let first = self.who.spec.guaranteed().map_or(0, Bytes::get).min(all);
            let bytes = if have < first { first - have } else { all - have };
            if self.ground.memory.reserve(bytes).is_err() {
                self.allocating = true;
                self.requests.push_back(Request::Reserve(bytes));
                return self.ring(now, outside);
            }
            self.allocate(now, bytes, outside);
        }
        self.next_allocation(now, outside);
    }

    /// The daemon has denied memory.
    pub(in crate::node) fn is_denied(&self, now: Timestamp, bytes: u64, outside: &mut Outside) {
        let guaranteed = self.who.spec.guaranteed().map_or(0, Bytes::get);
        if self.blocks.iter().sum::<u64>() + bytes <= guaranteed
            && outside.book.memory_is_known
            && self.main.is_some()
        {
            outside
                .book
                .fail(now, "memory", || format!("process {} is denied guaranteed memory", self.who.number));
        }
    }

    /// Carries an order of the meter out.
    pub(in crate::node) fn move_memory(&mut self, now: Timestamp, order: Move, outside: &mut Outside) {
        match order {
            Move::ToHost => {
                self.place = Place::Leaving;
                self.copy(now, outside);
            }
            Move::ToDevice => {
                self.place = Place::Asking;
                let bytes = self.away;
                if self.ground.memory.reserve(bytes).is_ok() {
                    self.room_to_return(now, bytes, true, outside);
                } else {
                    self.requests.push_back(Request::Return(bytes));
                    self.ring(now, outside);
                }
            }
            // The copy ends soon.
            Move::Cancel => {}
        }
    }

    fn copy(&self, now: Timestamp, outside: &mut Outside) {
        let bytes = if self.place == Place::Coming { self.away } else { self.blocks.iter().sum() };
        let at = now.saturating_add(copy_of(Bytes(bytes)));
        outside.queue.schedule(at, Event::Copied { process: self.who.number });
    }

    /// The daemon's answer to the request for room.
    pub(in crate::node) fn room_to_return(
        &mut self,
        now: Timestamp,
        bytes: u64,
        granted: bool,
        outside: &mut Outside,
    ) {
        if granted && outside.book.allocate(now, self.who.number, bytes) {
            self.place = Place::Coming;
            return self.copy(now, outside);
        }
        if granted {
            self.released(now, bytes, outside);
        }
        self.place = Place::Away;
        outside.book.return_failed(self.who.number);
        self.has_moved(now, Err(Obstacle::Device), outside);
    }

    /// A copy has ended.
    pub(in crate::node) fn copied(&mut self, now: Timestamp, outside: &mut Outside) {
        if self.life == Life::Gone {
            return;
        }
        if self.stopped || self.place == Place::Leaving && self.in_flight() > 0 && !self.device_lost {
            let at = now.saturating_add(LOOK);
            return outside.queue.schedule(at, Event::Copied { process: self.who.number });
        }
        let (number, bytes) = (self.who.number, self.blocks.iter().sum());
        match self.place {
            Place::Leaving if self.rng.percent(3) => {
                self.place = Place::Here;
                self.missed = false;
                outside.book.move_failed(now, number);
                outside.book.is_here(now, number, None);
                self.has_moved(now, Err(Obstacle::Copy), outside);
            }
            Place::Leaving => {
                (self.place, self.away) = (Place::Away, bytes);
                self.free(now, bytes, outside);
                self.has_moved(now, Ok(()), outside);
            }
            Place::Coming => {
                (self.place, self.missed) = (Place::Here, false);
                let back = core::mem::take(&mut self.away);
                outside.book.is_here(now, number, Some(copy_of(Bytes(back))));
                self.has_moved(now, Ok(()), outside);
            }
            Place::Here | Place::Away | Place::Asking => {}
        }
    }

    fn has_moved(&mut self, now: Timestamp, result: Result<(), Obstacle>, outside: &mut Outside) {
        self.events.push_back(MeterEvent::Moved { device: DEVICE, result });
        self.ring(now, outside);
    }
}
