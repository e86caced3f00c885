//! Functions whose instances cannot serve the waiting requests in time.

use super::{Function, SlackRouter};
use crate::pipeline::{RouteAction, SHORT_EVERY};
use gshare_core::dag::MAX_TIME;
use gshare_core::{FunctionId, Timestamp};

impl SlackRouter {
    /// Whether the function's instances need longer for its waiting requests than until `deadline`.
    pub(super) fn too_slow(of: &Function, now: Timestamp, deadline: Timestamp) -> bool {
        let Some(fastest) = of.fastest() else { return true };
        if deadline == Timestamp::MAX {
            return false;
        }
        now.saturating_add(of.behind()).saturating_add(fastest) > deadline
    }

    pub(super) fn tell_short(
        &mut self,
        now: Timestamp,
        function: FunctionId,
        actions: &mut Vec<RouteAction>,
    ) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let recently = of.told_short.is_some_and(|told| now.saturating_since(told) < SHORT_EVERY);
        if !recently {
            of.told_short = Some(now);
            let waiting = u32::try_from(of.waiting()).unwrap_or(u32::MAX);
            actions.push(RouteAction::Short { function, waiting, behind: of.behind().min(MAX_TIME) });
            self.again.insert((now.saturating_add(SHORT_EVERY), function));
        }
    }

    /// Tells the host when the last request in the queue will be late.
    pub(super) fn shortage(&mut self, now: Timestamp, function: FunctionId, actions: &mut Vec<RouteAction>) {
        let Some(of) = self.functions.get(&function) else { return };
        let last = of.on_time.last_key_value().map(|(turn, _)| turn.0);
        let late = !of.late.is_empty();
        let short = late || last.is_some_and(|last| Self::too_slow(of, now, last));
        if of.waiting() > 0 && short {
            self.tell_short(now, function, actions);
        }
    }

    /// Repeats the shortage check for functions that were short.
    pub(super) fn look_again(&mut self, now: Timestamp, actions: &mut Vec<RouteAction>) {
        while let Some(&(at, function)) = self.again.first() {
            if at > now {
                break;
            }
            self.again.remove(&(at, function));
            self.shortage(now, function, actions);
        }
    }
}
