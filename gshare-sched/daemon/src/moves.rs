//! Moves of clients' memory to host memory and back, and the questions for their ends.

use crate::handle::{Moved, Reply};
use gshare_core::reason::Obstacle;
use gshare_core::wire::Residence;
use gshare_core::{Bytes, Duration, Timestamp};
use gshare_sched::node::Node;
use serde::{Deserialize, Serialize};

/// The longest wait of a question; the asker has some more patience.
const LONGEST: Duration = Duration::from_millis(3_000);

/// How far a move of clients' memory has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Progress {
    /// The memory is on its way.
    Moves,
    /// These bytes are where they were ordered to be.
    Done(Bytes),
    /// These bytes were ordered to host memory, and are on the device again, since the program works.
    Back(Bytes),
    /// The memory stays on the device.
    Failed(Obstacle),
    /// None of the clients is there any more.
    Ended,
}

/// Questions that wait for the end of a move.
#[derive(Debug, Default)]
pub(crate) struct Moves(Vec<(Timestamp, Moved, Reply<Progress>)>);

impl Moves {
    pub(crate) fn ask(&mut self, now: Timestamp, moved: Moved, reply: Reply<Progress>) {
        self.0.push((now.saturating_add(LONGEST), moved, reply));
    }

    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        self.0.iter().map(|(until, ..)| *until).min()
    }

    /// Answers the questions about ended moves, and those that have waited long enough.
    pub(crate) fn answer(&mut self, now: Timestamp, node: &Node) {
        for (until, moved, reply) in core::mem::take(&mut self.0) {
            match progress(now, node, &moved) {
                Progress::Moves if now < until => self.0.push((until, moved, reply)),
                progress => reply.send(progress),
            }
        }
    }
}

fn progress(now: Timestamp, node: &Node, moved: &Moved) -> Progress {
    let there = moved.clients.iter().filter_map(|client| node.client(now, *client));
    let there: Vec<_> = there.filter_map(|client| client.parking).collect();
    if there.is_empty() {
        return Progress::Ended;
    }
    let (mut done, mut back) = (Bytes::ZERO, Bytes::ZERO);
    for parking in there {
        match (parking.residence, moved.on) {
            (Residence::Parked | Residence::Missed, true) | (Residence::Resident, false) => {
                done = done.saturating_add(parking.bytes);
            }
            // It may have been parked and have come back, or have stayed.
            (Residence::Resident, true) if !parking.ordered => match parking.obstacle {
                Some(obstacle) => return Progress::Failed(obstacle),
                None => back = back.saturating_add(parking.bytes),
            },
            _ => return Progress::Moves,
        }
    }
    if back > Bytes::ZERO && done == Bytes::ZERO { Progress::Back(back) } else { Progress::Done(done) }
}
