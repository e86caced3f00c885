//! The picture of a violation: the last calls, and the holders of tokens before it.
//!
//! ```text
//! client0.0  ####----####====####!!!!
//! client1.0      ....####....########
//! ```
//! `#` holds a token, `=` holds and asks for more, `.` waits, `-` is throttled, `!` was stopped, blank: wants nothing. A column
//! shows the strongest state within it.

use core::fmt::Write as _;
use gshare_core::{ClientId, Duration, Share, Timestamp, TokenAction, TokenEvent, UseState};
use std::collections::{BTreeMap, VecDeque};

/// The number of calls kept as text.
const CALLS_KEPT: usize = 24;
/// The number of kept state changes.
const MARKS_KEPT: usize = 4_096;
/// The number of columns in the picture, and the time of each column.
const COLUMNS: u64 = 100;
const COLUMN: Duration = Duration::from_millis(2);

/// The states, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Idle,
    Throttled,
    Waits,
    Holds,
    HoldsAndAsks,
    Stopped,
}

impl State {
    const fn letter(self) -> char {
        match self {
            Self::Idle => ' ',
            Self::Throttled => '-',
            Self::Waits => '.',
            Self::Holds => '#',
            Self::HoldsAndAsks => '=',
            Self::Stopped => '!',
        }
    }
}

/// The recent past of a scheduler, cheap to keep and drawn only after a violation.
#[derive(Debug)]
pub struct Timeline {
    calls: VecDeque<(Timestamp, TokenEvent, Vec<TokenAction>)>,
    marks: VecDeque<(Timestamp, ClientId, State)>,
    states: BTreeMap<ClientId, State>,
}

impl Timeline {
    /// A timeline without any call.
    pub const fn new() -> Self {
        Self { calls: VecDeque::new(), marks: VecDeque::new(), states: BTreeMap::new() }
    }

    /// Notes a call.
    pub fn call(&mut self, now: Timestamp, event: TokenEvent, actions: &[TokenAction]) {
        if self.calls.len() == CALLS_KEPT {
            self.calls.pop_front();
        }
        self.calls.push_back((now, event, actions.to_vec()));
        match event {
            TokenEvent::Used { client, state, .. } => {
                let holds = matches!(self.states.get(&client), Some(State::Holds | State::HoldsAndAsks));
                match state {
                    UseState::Idle => self.mark(now, client, State::Idle),
                    UseState::Extends if holds => self.mark(now, client, State::HoldsAndAsks),
                    UseState::Wants | UseState::Extends => self.mark(now, client, State::Waits),
                    UseState::Holds => {}
                }
            }
            TokenEvent::ClientLeft { client } => self.mark(now, client, State::Idle),
            _ => {}
        }
        for action in actions {
            match *action {
                TokenAction::Allow { client, .. } => self.mark(now, client, State::Holds),
                TokenAction::Stop { client } => self.mark(now, client, State::Stopped),
                TokenAction::Throttle { client, .. } if self.states.get(&client) == Some(&State::Waits) => {
                    self.mark(now, client, State::Throttled);
                }
                _ => {}
            }
        }
    }

    /// Draws the time before `now` and lists the last calls.
    pub fn picture(&self, now: Timestamp) -> String {
        let from = now.saturating_sub(COLUMN.saturating_mul(COLUMNS));
        let column = |at: Timestamp| at.saturating_since(from).as_nanos() / COLUMN.as_nanos();
        let mut rows: BTreeMap<ClientId, Vec<(u64, State)>> = BTreeMap::new();
        for &(at, client, state) in &self.marks {
            let row = rows.entry(client).or_default();
            if at < from {
                row.clear();
            }
            row.push((column(at), state));
        }
        let mut picture = format!("{from} to {now}, {COLUMN} per column\n");
        for (client, marks) in rows {
            // Writing into a text cannot fail.
            let _ = write!(picture, "{:>12} ", client.to_string());
            let mut state = State::Idle;
            for at in 0..=column(now) {
                let mut within = marks.iter().filter(|mark| mark.0 == at).map(|mark| mark.1);
                let strongest = within.clone().chain([state]).max().unwrap_or(state);
                picture.push(strongest.letter());
                state = within.next_back().unwrap_or(state);
            }
            picture.push('\n');
        }
        for (at, event, actions) in &self.calls {
            let _ = writeln!(picture, "{at} {}", event_line(event));
            for action in actions {
                let _ = writeln!(picture, "    -> {}", action_line(action));
            }
        }
        picture
    }

    fn mark(&mut self, now: Timestamp, client: ClientId, state: State) {
        if self.marks.len() == MARKS_KEPT {
            self.marks.pop_front();
        }
        self.marks.push_back((now, client, state));
        self.states.insert(client, state);
    }
}

fn event_line(event: &TokenEvent) -> String {
    let share = |share: &Share| format!("{} of the time, {} of the SMs", share.quota, share.sm);
    match event {
        TokenEvent::ClientJoined { client, gpu, share: new } => {
            format!("{client} joins {gpu}: {}", share(new))
        }
        TokenEvent::ShareChanged { client, share: new } => format!("{client} changes to {}", share(new)),
        TokenEvent::ClientLeft { client } => format!("{client} leaves"),
        TokenEvent::Used { client, used, state } => format!("{client} has used {used}: {state:?}"),
        other => format!("{other:?}"),
    }
}

fn action_line(action: &TokenAction) -> String {
    match action {
        TokenAction::Allow { client, allowed, until } => format!("allow {client} {allowed} until {until}"),
        TokenAction::Stop { client } => format!("stop {client}"),
        TokenAction::Throttle { client, until, .. } => format!("throttle {client} until {until}"),
    }
}

impl Default for Timeline {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_shows_who_held_and_who_waited() {
        let mut timeline = Timeline::new();
        let client = ClientId::new(3, 0);
        let at = Timestamp::from_millis;
        let used = |used, state| TokenEvent::Used { client, used: Duration::from_millis(used), state };
        timeline.call(at(0), used(0, UseState::Wants), &[]);
        let allow = TokenAction::Allow { client, allowed: Duration::from_millis(6), until: at(10) };
        timeline.call(at(4), TokenEvent::DeadlineReached, &[allow]);
        timeline.call(at(10), used(6, UseState::Idle), &[]);
        let picture = timeline.picture(at(14));
        assert!(picture.contains("client3.0 ..####  \n"), "{picture}");
        assert!(
            picture.contains("0.004000000s DeadlineReached\n    -> allow client3.0 6ms until"),
            "{picture}"
        );
    }
}
