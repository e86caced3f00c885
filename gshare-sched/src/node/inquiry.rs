//! Questions to clients about the memory they use, with their answers and deadlines.
//!
//! # Problem
//! A client gets memory in chunks and allocates from them, so the daemon knows the chunks but not the use. Only the client itself knows
//! the difference, its **slack**. Two answers need the slack: a denial, since the slack of idle clients could be called back first, and
//! the view of an instance, which is exact to the byte.
//!
//! # Algorithm
//! A **round** asks some clients at once. The round is over when each of them has answered or is gone, or after
//! [`PATIENCE`]. After a missed round a client is not asked again before it answers, so a stopped process delays one denial
//! or view, not all. Reservations of one client are answered in order: later ones queue behind a reservation in a round.
//!
//! # Cost
//! O(clients asked) per round, and a pass over the open rounds per answer.

use super::reservations::Reservation;
use gshare_core::{Bytes, ClientId, Duration, Timestamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The longest wait of a round. A hook answers from a thread of its own, so only a stopped process or a badly overloaded
/// machine takes longer.
const PATIENCE: Duration = Duration::from_millis(200);
/// The most reservations of one client behind a round. A process has one under way per allocating thread.
const MAX_QUEUE: usize = 4_096;

/// The work after a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Try a reservation once more.
    Reserve(Reservation),
    /// Tell a client the use of its siblings.
    View { client: ClientId },
    /// Answer a question of the operator.
    Status { question: u32 },
    /// Look at the line for a device's memory.
    Room,
}

impl Purpose {
    fn client(&self) -> Option<ClientId> {
        match *self {
            Self::Reserve(Reservation { client, .. }) | Self::View { client } => Some(client),
            Self::Status { .. } | Self::Room => None,
        }
    }
}

#[derive(Debug)]
struct Round {
    purpose: Purpose,
    open: BTreeSet<ClientId>,
    until: Timestamp,
}

/// The open rounds. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Inquiries {
    last: u32,
    rounds: BTreeMap<u32, Round>,
    /// Clients without an answer since a missed round.
    silent: BTreeSet<ClientId>,
    /// Reservations behind a reservation in a round.
    queued: BTreeMap<ClientId, VecDeque<(Bytes, Bytes)>>,
}

impl Inquiries {
    /// Begins a round over the answering clients among `clients`; with `at_least_until`, it is not over before then. Gives
    /// its number and the clients to ask; `None` if there is nothing to wait for.
    pub(super) fn begin(
        &mut self,
        now: Timestamp,
        purpose: Purpose,
        clients: impl IntoIterator<Item = ClientId>,
        at_least_until: Option<Timestamp>,
    ) -> Option<(u32, Vec<ClientId>)> {
        let asked: BTreeSet<_> = clients.into_iter().filter(|client| !self.silent.contains(client)).collect();
        if asked.is_empty() && at_least_until.is_none() {
            return None;
        }
        self.last = self.last.wrapping_add(1);
        let until = at_least_until.unwrap_or_else(|| now.saturating_add(PATIENCE));
        let list = asked.iter().copied().collect();
        self.rounds.insert(self.last, Round { purpose, open: asked, until });
        if let Purpose::Reserve(Reservation { client, .. }) = purpose {
            self.hold(client);
        }
        Some((self.last, list))
    }

    /// Queues the client's later reservations behind its waiting reservation.
    pub(super) fn hold(&mut self, client: ClientId) {
        self.queued.entry(client).or_default();
    }

    /// Whether later reservations of the client queue.
    pub(super) fn holds(&self, client: ClientId) -> bool {
        self.queued.contains_key(&client)
    }

    /// Whether a round has no end yet.
    pub(super) fn is_open(&self, round: u32) -> bool {
        self.rounds.contains_key(&round)
    }

    /// Queues a reservation behind an earlier reservation of the client in a round. `None`: no reservation of the client is in a round;
    /// `Some(false)`: the queue is full.
    pub(super) fn queue(&mut self, client: ClientId, bytes: Bytes, wish: Bytes) -> Option<bool> {
        let queue = self.queued.get_mut(&client)?;
        let fits = queue.len() < MAX_QUEUE;
        if fits {
            queue.push_back((bytes, wish));
        }
        Some(fits)
    }

    /// The next queued reservation of a client after an answer.
    pub(super) fn next_queued(&mut self, client: ClientId) -> Option<(Bytes, Bytes)> {
        let next = self.queued.get_mut(&client)?.pop_front();
        if next.is_none() {
            self.queued.remove(&client);
        }
        next
    }

    /// A client has answered a round. Gives the purpose of the round after its last answer.
    pub(super) fn answered(&mut self, round: u32, client: ClientId) -> Option<Purpose> {
        self.silent.remove(&client);
        let entry = self.rounds.get_mut(&round)?;
        let last = entry.open.remove(&client) && entry.open.is_empty();
        let purpose = entry.purpose;
        last.then(|| self.rounds.remove(&round)).map(|_| purpose)
    }

    /// A client is gone. Gives the purposes of the rounds without other open answers.
    pub(super) fn left(&mut self, client: ClientId) -> Vec<Purpose> {
        self.silent.remove(&client);
        self.queued.remove(&client);
        self.rounds.retain(|_, round| round.purpose.client() != Some(client));
        let waits: Vec<u32> = self
            .rounds
            .iter()
            .filter_map(|(number, round)| round.open.contains(&client).then_some(*number))
            .collect();
        waits.into_iter().filter_map(|round| self.answered(round, client)).collect()
    }

    /// Gives the purposes of the rounds past their deadline.
    pub(super) fn due(&mut self, now: Timestamp) -> Vec<Purpose> {
        let due: Vec<u32> = self
            .rounds
            .iter()
            .filter_map(|(number, round)| (round.until <= now).then_some(*number))
            .collect();
        let over = |round| {
            let Round { purpose, open, .. } = self.rounds.remove(&round)?;
            self.silent.extend(open);
            Some(purpose)
        };
        due.into_iter().filter_map(over).collect()
    }

    /// Whether a reservation of this client waits for a round.
    pub(super) fn waits(&self, client: ClientId) -> bool {
        let reserves =
            |purpose| matches!(purpose, Purpose::Reserve(reservation) if reservation.client == client);
        self.rounds.values().any(|round| reserves(round.purpose))
    }

    /// The earliest deadline of a round.
    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.rounds.values().map(|round| round.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId::new(0, 0);
    const B: ClientId = ClientId::new(1, 0);
    const C: ClientId = ClientId::new(2, 0);
    const VIEW: Purpose = Purpose::View { client: A };
    const STATUS: Purpose = Purpose::Status { question: 7 };

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(ms)
    }

    #[test]
    fn a_round_is_over_with_the_last_answer_or_when_its_time_is() {
        let mut inquiries = Inquiries::default();
        assert_eq!(inquiries.begin(at(0), VIEW, [], None), None, "no process to ask");
        let (first, asked) = inquiries.begin(at(0), VIEW, [B, C], None).unwrap();
        let (second, _) = inquiries.begin(at(1), STATUS, [B, C], None).unwrap();
        assert_eq!(asked, [B, C]);
        assert_eq!(inquiries.answered(first, B), None);
        assert_eq!(inquiries.answered(second, A), None, "was not asked");
        assert_eq!(inquiries.answered(first, C), Some(VIEW));
        assert_eq!(inquiries.answered(first, C), None, "once");
        assert_eq!(inquiries.answered(second, C), None);
        let due = inquiries.next_deadline().unwrap();
        assert_eq!((due, inquiries.due(at(200))), (at(201), Vec::new()));
        assert_eq!(inquiries.due(due), [STATUS]);
        assert_eq!(
            inquiries.begin(at(300), VIEW, [B], None),
            None,
            "a silent client is not waited for again"
        );
        inquiries.answered(second, B);
        assert!(inquiries.begin(at(300), VIEW, [B], None).is_some(), "until it answers");
    }

    #[test]
    fn a_client_that_leaves_is_waited_for_no_longer_and_told_nothing() {
        let mut inquiries = Inquiries::default();
        inquiries.begin(at(0), VIEW, [B, C], None).unwrap();
        inquiries.begin(at(0), Purpose::View { client: C }, [B], None).unwrap();
        assert_eq!(inquiries.left(C), []);
        assert_eq!(inquiries.left(B), [VIEW]);
        assert_eq!(inquiries.next_deadline(), None);
    }

    #[test]
    fn reservations_of_a_client_keep_their_order() {
        let mut inquiries = Inquiries::default();
        assert_eq!(inquiries.queue(A, Bytes(1), Bytes(1)), None);
        let (bytes, wish) = (Bytes(9), Bytes(9));
        let purpose = Purpose::Reserve(Reservation { client: A, bytes, wish, recalled: true });
        inquiries.begin(at(0), purpose, [], Some(at(5))).unwrap();
        for n in 0..MAX_QUEUE as u64 {
            assert_eq!(inquiries.queue(A, Bytes(n), Bytes(n)), Some(true));
        }
        assert_eq!(inquiries.queue(A, Bytes(1), Bytes(1)), Some(false));
        assert_eq!(inquiries.next_queued(A), Some((Bytes(0), Bytes(0))));
        assert_eq!(inquiries.next_queued(A), Some((Bytes(1), Bytes(1))));
        inquiries.left(A);
        assert_eq!((inquiries.next_queued(A), inquiries.queue(A, Bytes(1), Bytes(1))), (None, None));
    }
}
