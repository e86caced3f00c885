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

    fn least(&self, function: FunctionId, cluster: &Cluster) -> u32 {
        match self.bounds(function, cluster) {
            Some(HorizontalEvent::BoundsChanged { min_instances, .. }) => min_instances,
            _ => 0,
        }
    }

    pub(super) fn lacks(&self, function: FunctionId, cluster: &Cluster) -> bool {
        let (has, least) = (self.scaler.instances(function), self.least(function, cluster));
        !cluster.is_removed(function) && has.is_some_and(|has| has.starting + has.ready < least)
    }

    /// Starts found no room at these points: the minimum tries each of the scaler's other points once. Instances with room at none
    /// of them wait for it at the first: others may be parked for them.
    pub(super) fn no_room(&mut self, function: FunctionId, at: &[Setting], cluster: &mut Cluster) {
        if self.lacks(function, cluster) {
            if self.is_news(function, at) {
                self.tell_bounds(function, cluster);
            }
            if self.lacks(function, cluster)
                && let Some(of) = self.functions.get_mut(&function).filter(|of| !of.waits)
            {
                of.waits = true;
                of.refused.clear();
                self.scale(HorizontalEvent::MinimumLacking { function }, cluster);
                if let Some(of) = self.functions.get_mut(&function) {
                    of.waits = false;
                }
            }
            if !self.lacks(function, cluster) {
                return;
            }
        }
        cluster.unmet(function);
    }

    /// Notes refused points. True: at least one of them is new.
    fn is_news(&mut self, function: FunctionId, at: &[Setting]) -> bool {
        let Some(of) = self.functions.get_mut(&function) else { return false };
        let known = of.refused.len();
        for point in at {
            if !of.refused.contains(point) {
                of.refused.push(*point);
            }
        }
        of.refused.len() > known
    }

    /// Tells the scaler the function's bounds; the scaler starts missing instances at a point that was not refused.
    pub(super) fn tell_bounds(&mut self, function: FunctionId, cluster: &mut Cluster) {
        if let Some(bounds) = self.bounds(function, cluster) {
            self.scale(bounds, cluster);
        }
    }
}
