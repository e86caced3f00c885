//! The picture that goes with a violation: the last calls, and who held what before it.
//!
//! ```text
//! client0.0  ####----####====####!!!!
//! client1.0      ....####....########
//! ```
//! `#` holds a token, `=` holds and asks for more, `.` waits, `-` is throttled, `!` was revoked, blank: wants nothing.
//! A column shows the strongest state within it.

use core::fmt::Write as _;
use gshare_core::{ClientId, Duration, Share, Timestamp, TokenAction, TokenEvent};
use std::collections::{BTreeMap, VecDeque};

/// Calls whose text is kept.
const CALLS_KEPT: usize = 24;
/// State changes that are kept.
const MARKS_KEPT: usize = 4_096;
/// Columns of the picture, and the time that each stands for.
const COLUMNS: u64 = 100;
const COLUMN: Duration = Duration::from_millis(2);

/// States, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Idle,
    Throttled,
    Waits,
    Holds,
    HoldsAndAsks,
    Revoked,
}

impl State {
    const fn letter(self) -> char {
        match self {
            Self::Idle => ' ',
            Self::Throttled => '-',
            Self::Waits => '.',
            Self::Holds => '#',
            Self::HoldsAndAsks => '=',
            Self::Revoked => '!',
        }
    }
}

/// The recent past of a scheduler, cheap to keep and drawn only when something went wrong.
#[derive(Debug)]
pub struct Timeline {
    calls: VecDeque<(Timestamp, TokenEvent, Vec<TokenAction>)>,
    marks: VecDeque<(Timestamp, ClientId, State)>,
    states: BTreeMap<ClientId, State>,
}

impl Timeline {
    /// Nothing has happened.
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
            TokenEvent::TokenRequested { client } => {
                let holds = matches!(self.states.get(&client), Some(State::Holds | State::HoldsAndAsks));
                self.mark(now, client, if holds { State::HoldsAndAsks } else { State::Waits });
            }
            TokenEvent::TokenReturned { client, again, .. } => {
                let asks = again || self.states.get(&client) == Some(&State::HoldsAndAsks);
                self.mark(now, client, if asks { State::Waits } else { State::Idle });
            }
            TokenEvent::ClientLeft { client } => self.mark(now, client, State::Idle),
            _ => {}
        }
        for action in actions {
            match *action {
                TokenAction::Grant { client, .. } => self.mark(now, client, State::Holds),
                TokenAction::Revoke { client, .. } => self.mark(now, client, State::Revoked),
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
        TokenEvent::TokenRequested { client } => format!("{client} asks"),
        TokenEvent::TokenReturned { client, lease, used, again } => {
            let asks = if *again { ", and asks again" } else { "" };
            format!("{client} returns {lease}, used {used}{asks}")
        }
        TokenEvent::UsageReported { client, lease, used } => {
            format!("{client} reports on {lease}: used {used}")
        }
        other => format!("{other:?}"),
    }
}

fn action_line(action: &TokenAction) -> String {
    match action {
        TokenAction::Grant { client, lease, budget, expires } => {
            format!("grant {client} {lease}: {budget} until {expires}")
        }
        TokenAction::Revoke { client, lease, reason } => format!("revoke {client} {lease}: {reason:?}"),
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
    use gshare_core::LeaseId;

    #[test]
    fn the_picture_shows_who_held_and_who_waited() {
        let mut timeline = Timeline::new();
        let client = ClientId::new(3, 0);
        let (lease, at) = (LeaseId::new(1), Timestamp::from_millis);
        let (budget, expires) = (Duration::from_millis(6), at(10));
        timeline.call(at(0), TokenEvent::TokenRequested { client }, &[]);
        let grant = TokenAction::Grant { client, lease, budget, expires };
        timeline.call(at(4), TokenEvent::DeadlineReached, &[grant]);
        let returned = TokenEvent::TokenReturned { client, lease, used: budget, again: false };
        timeline.call(at(10), returned, &[]);
        let picture = timeline.picture(at(14));
        assert!(picture.contains("client3.0 ..####  \n"), "{picture}");
        assert!(
            picture.contains("0.004000000s DeadlineReached\n    -> grant client3.0 lease1: 6ms until"),
            "{picture}"
        );
    }
}
