//! The place of the device's movable memory: on the device, in host memory, or on the way.
//!
//! ```text
//! Resident ── Park{on} ──▶ Leaving ── the turn is over: ToHost ──▶ Leaving ── moved ──▶ Away
//! Away ── Park{off}, or without a daemon a thread that misses it: ToDevice ──▶ Coming ── moved ──▶ Resident
//! ```
//! Launches are let in only while the memory is resident. A move to host memory that fails leaves it resident; a move to the device that
//! fails is tried again. The daemon's last order holds, and without a daemon the process takes its memory back when it is missed.

use gshare_core::reason::Obstacle;
use gshare_core::wire::{DaemonWait, Residence, ToDaemon};
use gshare_core::{Bytes, ClientId};

use super::turn::Turn;
use super::{Attachment, Device, Ground};
use crate::{Action, Actions, Facts, Movable, Move};

/// How long work on the device may keep the memory there while threads wait, in ns. The work may itself wait for one of them.
const PATIENCE: u64 = 2_000_000_000;
/// The shortest and the longest delay before another attempt to come back, in ns.
const RETRY: (u64, u64) = (100_000_000, 1_600_000_000);
/// The shortest time between two reports of another amount of movable memory, in ns.
const REPORT: u64 = 100_000_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Resident,
    /// Launches have stopped. The host was told to move the memory at `moves` (ns).
    Leaving {
        moves: Option<u64>,
    },
    Away,
    Coming,
}

/// The last report to the daemon: its time, in ns, and its content.
type Said = (u64, ClientId, (Residence, Bytes, Option<Obstacle>));

/// The movable memory of one device.
#[derive(Debug, Default)]
pub(super) struct Parking {
    place: Place,
    /// Whether the memory shall be in host memory.
    ordered: bool,
    /// `None` for a process that cannot be parked.
    movable: Option<Movable>,
    /// Why the last move failed.
    obstacle: Option<Obstacle>,
    said: Option<Said>,
    /// The time of the next attempt to come back and the delay after it, in ns.
    retry: (u64, u64),
    /// The time at which waiting launches fail, in ns, because the memory does not come back and no daemon is there.
    fails_at: Option<u64>,
}

impl Parking {
    pub(super) fn is_resident(&self) -> bool {
        self.place == Place::Resident
    }

    /// Has the daemon told again, after a new connection.
    pub(super) fn restate(&mut self) {
        self.said = None;
    }

    /// The time of the next look for the sake of the memory, in ns.
    pub(super) fn next_look(&self, now: u64) -> u64 {
        match self.place {
            Place::Leaving { moves: Some(since) } => (since + PATIENCE).max(now + RETRY.0),
            Place::Away if !self.ordered => self.retry.0,
            _ => u64::MAX,
        }
    }
}

impl<G: Ground> Device<G> {
    /// Takes the daemon's order for the place of the memory.
    pub(crate) fn park(&mut self, on: bool, now: u64) {
        if self.parking.movable.is_some() {
            let parking = &mut self.parking;
            if core::mem::replace(&mut parking.ordered, on) != on {
                (parking.obstacle, parking.retry) = (None, (now, RETRY.0));
            }
            // Each order is answered, although the place may be the same.
            parking.said = None;
            self.look_at = now;
        }
    }

    /// A move of the memory has ended.
    pub(crate) fn moved(
        &mut self,
        result: Result<(), Obstacle>,
        wait: DaemonWait,
        now: u64,
        actions: &mut Actions,
    ) {
        let parking = &mut self.parking;
        parking.obstacle = result.err();
        parking.place = match (parking.place, result) {
            (Place::Leaving { moves: Some(_) }, Ok(())) => Place::Away,
            (Place::Leaving { moves: Some(_) }, Err(_)) => {
                parking.ordered = false;
                Place::Resident
            }
            (Place::Coming, Ok(())) => {
                parking.fails_at = None;
                Place::Resident
            }
            (Place::Coming, Err(_)) => {
                let (_, delay) = parking.retry;
                parking.retry = (now + delay, (delay * 2).min(RETRY.1));
                Place::Away
            }
            (place, _) => panic!("memory was moved without an order: {place:?}"),
        };
        self.look_at = now;
        let waits_alone =
            self.parking.place == Place::Away && !self.parking.ordered && self.client().is_none();
        if waits_alone {
            let fails_at = *self.parking.fails_at.get_or_insert(now + wait.get().as_nanos());
            if now >= fails_at {
                self.fail_launches(actions);
            }
        } else if self.parking.is_resident()
            && matches!(self.attachment, Attachment::Served(_) | Attachment::Local(_))
        {
            self.set_shut(false, actions);
        }
        actions.push(Action::Wake(self.ordinal));
    }

    /// Takes the next step towards the ordered place, and tells the daemon.
    pub(super) fn move_memory(&mut self, facts: &Facts, now: u64, actions: &mut Actions) {
        self.parking.movable = facts.movable;
        let Some(movable) = facts.movable else { return };
        let missed = movable.missed > 0 || self.waiting > 0;
        if self.parking.is_resident() && self.parking.ordered {
            self.parking.place = Place::Leaving { moves: None };
            match self.turn {
                Turn::Holding { until, .. } => {
                    self.drain(until, now);
                }
                Turn::Draining { .. } => {}
                Turn::Idle | Turn::Wanting => self.stop_launches(),
            }
        }
        let (over, alone) =
            (!matches!(self.turn, Turn::Holding { .. } | Turn::Draining { .. }), self.client().is_none());
        let parking = &mut self.parking;
        if alone && missed && parking.place == Place::Away {
            parking.ordered = false;
        }
        let order = match parking.place {
            Place::Leaving { moves: None } if !parking.ordered => {
                parking.place = Place::Resident;
                None
            }
            Place::Leaving { moves: None } if over => {
                parking.place = Place::Leaving { moves: Some(now) };
                Some(Move::ToHost)
            }
            Place::Leaving { moves: Some(since) } if missed && now >= since + PATIENCE => Some(Move::Cancel),
            Place::Away if !parking.ordered && now >= parking.retry.0 => {
                parking.place = Place::Coming;
                Some(Move::ToDevice)
            }
            _ => None,
        };
        if let Some(order) = order {
            actions.push(Action::MoveMemory { device: self.ordinal, order });
        }
        if let Some(client) = self.client() {
            self.say_place(client, missed, movable, now, actions);
        }
    }

    fn say_place(
        &mut self,
        client: ClientId,
        missed: bool,
        movable: Movable,
        now: u64,
        actions: &mut Actions,
    ) {
        let residence = match self.parking.place {
            Place::Resident => Residence::Resident,
            Place::Leaving { .. } => Residence::Parking,
            Place::Away if missed => Residence::Missed,
            Place::Away => Residence::Parked,
            Place::Coming => Residence::Returning,
        };
        let nothing = movable.obstacle.filter(|_| movable.bytes == 0);
        let stated = (residence, Bytes(movable.bytes), self.parking.obstacle.or(nothing));
        if let Some((at, of, said)) = self.parking.said {
            let soon = residence == Residence::Resident && said.0 == residence && now < at + REPORT;
            if of == client && (said == stated || soon) {
                return;
            }
        }
        self.parking.said = Some((now, client, stated));
        let (residence, bytes, obstacle) = stated;
        actions.push(Action::Say(ToDaemon::Parking { client, residence, bytes, obstacle }));
    }
}
