//! The ledger of moves: the time in which a function's instances start, leave their devices and come back, and the cheaper way to park.
//!
//! A parking keeps an instance's processes, with their memory in host memory, or ends them, and new ones start at the return. The ledger
//! takes the time from each order to its report, and keeps the last of each kind, of copies the last two. Copies are chosen as long as,
//! there and back, they have not been seen to take longer than a start.

use super::cluster::Cluster;
use super::{Bytes, Duration, FunctionId, InstanceId, InstanceReport, Part, Timestamp};

/// The times of the last two copies in a direction. The shorter counts, since a single slow one says more about the machine just then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Copies([Option<Duration>; 2]);

impl Copies {
    fn took(&mut self, time: Duration) {
        self.0 = [Some(time), self.0[0]];
    }

    fn time(self) -> Option<Duration> {
        self.0.into_iter().flatten().min()
    }
}

/// What the last moves of a function's instances took; None before the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Moves {
    /// A start of processes, and the same with its weights from host memory, where they are after a parking.
    start: Option<Duration>,
    load: Option<Duration>,
    /// Copies of living processes' memory to host memory, and back.
    out: Copies,
    back: Copies,
    /// An end of processes.
    end: Option<Duration>,
    /// Whether the processes lived on at the last parking.
    lives: bool,
}

impl Moves {
    /// The time of a start, or of a return to new processes.
    pub(super) fn start(&self) -> Duration {
        self.start.unwrap_or_default()
    }

    /// Whether the next parking keeps the processes.
    fn keeps(&self) -> bool {
        self.start.zip(self.there_and_back()).is_none_or(|(start, copies)| copies <= start)
    }

    /// Copies out and back. A return is taken to be as long as the copy out before the first.
    fn there_and_back(&self) -> Option<Duration> {
        let out = self.out.time()?;
        Some(out.saturating_add(self.back.time().unwrap_or(out)))
    }

    /// A copy back.
    fn back(&self) -> Option<Duration> {
        self.back.time().or(self.out.time())
    }

    fn never_parked(&self) -> bool {
        self.out.time().is_none() && self.end.is_none()
    }

    /// Learns from a start that was to take `expected`, and would take `host` with weights in host memory.
    fn started(&mut self, took: Duration, expected: Duration, host: Duration) {
        self.start = Some(took);
        let nanos = u128::from(took.as_nanos()) * u128::from(host.as_nanos());
        self.load = Some(match expected {
            Duration::ZERO => took,
            expected => Duration::from_wide_nanos(nanos / u128::from(expected.as_nanos())),
        });
    }

    /// Learns from a parking. Copies that were given up for an end count less each time: other moves may have slowed them down.
    fn parked(&mut self, took: Duration, lives: bool, kept: bool) {
        self.lives = lives;
        match lives {
            true => self.out.took(took),
            false => self.end = Some(took),
        }
        if !kept {
            for copy in [&mut self.out, &mut self.back].into_iter().flat_map(|copies| &mut copies.0).flatten()
            {
                *copy = copy.scaled(3, 4);
            }
        }
    }
}

/// The move of an instance that its host carries out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Move {
    /// Processes start, which takes this long by the specification.
    Start(Duration),
    /// The instance is parked, and its processes are to live on or not.
    Park { keeps: bool },
    /// Memory comes back to living processes.
    Return,
    /// Nothing moves: processes start parked, or have run before.
    Nothing,
}

impl Cluster {
    /// Whether a parking of the function keeps its processes.
    pub(super) fn keeps(&self, function: FunctionId) -> bool {
        self.functions.get(&function).is_none_or(|of| of.moves.keeps())
    }

    /// Whether moves of the function are copies, as far as known.
    pub(super) fn copies(&self, function: FunctionId) -> bool {
        let moves = &self.functions[&function].moves;
        moves.lives || moves.never_parked() && self.copied.is_some()
    }

    /// How long the next move of an instance takes, there and back. Before the function's first, other functions' copies tell.
    pub(super) fn price(&self, function: FunctionId) -> Duration {
        let of = &self.functions[&function];
        let Moves { load, end, .. } = of.moves;
        match (self.copied, of.moves.there_and_back()) {
            (Some((bytes, took)), _) if of.moves.never_parked() => {
                took.scaled(of.spec.memory.get().saturating_mul(2), bytes.get().max(1))
            }
            (_, Some(copies)) if of.moves.lives => copies,
            _ => end.unwrap_or_default().saturating_add(load.unwrap_or(of.spec.load_host)),
        }
    }

    /// The expected time of the parked instance's return to these parts.
    pub(super) fn return_time(&self, instance: InstanceId, function: FunctionId, parts: &[Part]) -> Duration {
        let (of, known) = (self.instances.get(instance), &self.functions[&function]);
        let copies = of.is_some_and(|of| of.returns_to(parts));
        let copy = known.moves.back().filter(|_| copies);
        copy.unwrap_or(known.spec.load_host)
    }

    /// When an instance that starts or comes back is expected on its devices, by its function's last such move. It may be overdue.
    pub(super) fn arrives(&self, instance: InstanceId) -> Option<Timestamp> {
        let of = self.instances.get(instance)?;
        let known = &self.functions.get(&of.function)?.moves;
        let takes = match of.last_move {
            Move::Start(expected) => known.start.unwrap_or(expected),
            Move::Return => known.back()?,
            Move::Park { .. } | Move::Nothing => return None,
        };
        Some(of.ordered.saturating_add(takes))
    }

    /// The order to start the instance finds its processes running.
    pub(super) fn runs_already(&mut self, instance: InstanceId) {
        if let Some(of) = self.instances.get_mut(instance) {
            of.last_move = Move::Nothing;
        }
    }

    /// Learns from the report that ends the instance's move.
    pub(super) fn learn_move(&mut self, instance: InstanceId, report: InstanceReport) {
        let Some(of) = self.instances.get_mut(instance) else { return };
        let Some(function) = self.functions.get_mut(&of.function) else { return };
        let (took, lives) = (self.now.saturating_since(of.ordered), report == InstanceReport::Parked);
        of.came_in = if of.last_move == Move::Return { took } else { Duration::ZERO };
        match of.last_move {
            Move::Start(expected) => {
                function.fails = false;
                function.moves.started(took, expected, function.spec.load_host);
            }
            Move::Park { keeps } => {
                function.moves.parked(took, lives, keeps);
                if lives {
                    self.copied = Some((function.spec.memory, took));
                }
            }
            Move::Return => function.moves.back.took(took),
            Move::Nothing => {}
        }
    }
}

/// Memory and time of the last copy to host memory.
pub(super) type Copied = Option<(Bytes, Duration)>;

#[cfg(test)]
mod tests {
    use super::{Duration, Moves};

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn processes_end_where_they_start_in_less_time_than_their_memory_moves() {
        let mut moves = Moves::default();
        moves.started(ms(400), ms(100), ms(50));
        assert!(moves.keeps(), "no copy was seen so far");
        assert_eq!((moves.start(), moves.load), (ms(400), Some(ms(200))));
        moves.parked(ms(200), true, true);
        assert!(moves.keeps(), "a return is taken to be as long as its copy out");
        moves.back.took(ms(250));
        assert!(!moves.keeps());
        moves.parked(ms(900), true, true);
        assert_eq!(moves.there_and_back(), Some(ms(450)), "a single slow copy does not count");
        moves.parked(ms(5), false, false);
        assert!(moves.keeps(), "a slow copy counts less with each start in its place");
        assert!(!moves.lives);
    }

    #[test]
    fn processes_that_cannot_live_on_say_nothing_about_copies() {
        let mut moves = Moves::default();
        moves.parked(ms(5), false, true);
        assert_eq!((moves.end, moves.there_and_back(), moves.lives), (Some(ms(5)), None, false));
    }
}
