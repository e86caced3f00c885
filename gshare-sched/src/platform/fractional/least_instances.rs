//! The minimum of a function, in the words of the scaler.

use super::{Cluster, FractionalPool, FunctionId, HorizontalEvent, Setting};

impl FractionalPool {
    /// The scaler's bounds of the function: at least one instance while it is called.
    pub(super) fn bounds(&self, function: FunctionId, cluster: &Cluster) -> Option<HorizontalEvent> {
        let activated = self.functions.get(&function)?.activated;
        let spec = &cluster.functions.get(&function)?.spec;
        let (min_instances, max_instances) = (spec.min_instances.max(activated.into()), spec.max_instances);
        Some(HorizontalEvent::BoundsChanged { function, min_instances, max_instances })
    }

    pub(super) fn lacks(&self, function: FunctionId, cluster: &Cluster) -> bool {
        let least = match self.bounds(function, cluster) {
            Some(HorizontalEvent::BoundsChanged { min_instances, .. }) => min_instances,
            _ => 0,
        };
        let has = self.scaler.instances(function);
        !cluster.is_removed(function) && has.is_some_and(|has| has.starting + has.ready < least)
    }

    /// A start found no room at its point: the minimum tries each of the scaler's other points once, and all points again after
    /// an instance has left a device.
    pub(super) fn no_room(&mut self, function: FunctionId, at: Setting, cluster: &mut Cluster) {
        if self.lacks(function, cluster) {
            if let Some(of) = self.functions.get_mut(&function)
                && !of.refused.contains(&at)
            {
                of.refused.push(at);
                self.tell_bounds(function, cluster);
            }
            if !self.lacks(function, cluster) {
                return;
            }
        }
        cluster.unmet(function);
    }

    /// Tells the scaler the function's bounds; the scaler starts missing instances at a point that was not refused.
    pub(super) fn tell_bounds(&mut self, function: FunctionId, cluster: &mut Cluster) {
        if let Some(bounds) = self.bounds(function, cluster) {
            self.scale(bounds, cluster);
        }
    }
}
