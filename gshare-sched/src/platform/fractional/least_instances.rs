//! The minimum of a function: a promise of the pool, which does not wait for its scaler's next report of load.

use super::{FractionalPool, Function, FunctionId, HorizontalEvent, PoolAction, Setting, Timer};

impl Function {
    /// Number of instances of the function under any load: its minimum, and at least one while it is called.
    fn least(&self) -> u32 {
        self.spec.min_instances.max(self.activated.into())
    }
}

impl FractionalPool {
    fn lacks(&self, function: FunctionId) -> bool {
        let least = self.functions.get(&function).filter(|of| !of.removed).map_or(0, Function::least);
        self.scaler.instances(function).is_some_and(|has| has.starting + has.ready < least)
    }

    /// Starts the missing instances of the function's minimum, unless the host refused a start a moment ago.
    pub(super) fn keep_minimum(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        if self.lacks(function) && !self.timers.has(Timer::Minimum(function)) {
            if let Some(of) = self.functions.get_mut(&function) {
                of.refused.clear();
            }
            self.scale(HorizontalEvent::MinimumLacking { function }, actions);
        }
    }

    /// A start found no room at its point: the minimum tries each of the scaler's other points once, and all points again after
    /// an instance has left a device.
    pub(super) fn no_room(&mut self, function: FunctionId, at: Setting, actions: &mut Vec<PoolAction>) {
        if self.lacks(function) {
            self.lacking.insert(function);
            if let Some(of) = self.functions.get_mut(&function)
                && !of.refused.contains(&at)
            {
                of.refused.push(at);
                self.tell_bounds(function, actions);
            }
            if !self.lacks(function) {
                return;
            }
        }
        let unmet = PoolAction::Unmet { function };
        // Each point without room comes here, and one `Unmet` is enough.
        if !actions.contains(&unmet) {
            actions.push(unmet);
        }
    }

    /// Tells the scaler the function's bounds; the scaler starts missing instances at a point that was not refused.
    pub(super) fn tell_bounds(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.functions.get(&function) else { return };
        let (min_instances, max_instances) = (of.least(), of.spec.max_instances);
        self.scale(HorizontalEvent::BoundsChanged { function, min_instances, max_instances }, actions);
    }
}
