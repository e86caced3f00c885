//! The minimum of a function, at any of its points with room.

use super::{Cluster, FractionalPool, FunctionId};
use crate::scale::{Fleet, HorizontalError};

impl FractionalPool {
    pub(super) fn fleet(&self, function: FunctionId) -> Option<&Fleet> {
        self.functions.get(&function)?.fleet.as_ref()
    }

    pub(super) fn fleet_mut(&mut self, function: FunctionId) -> Option<&mut Fleet> {
        self.functions.get_mut(&function)?.fleet.as_mut()
    }

    /// Whether the function has fewer instances than its minimum.
    pub(super) fn lacks(&self, function: FunctionId) -> bool {
        self.fleet(function).is_some_and(Fleet::lacks)
    }

    /// Sets the bounds of the function's instances. Surplus instances go, the youngest first, and missing ones start.
    ///
    /// # Errors
    /// Bounds that exclude each other; nothing changed.
    pub(super) fn set_bounds(
        &mut self,
        function: FunctionId,
        (least, most): (u32, u32),
        cluster: &mut Cluster,
    ) -> Result<(), HorizontalError> {
        let Some(fleet) = self.fleet_mut(function) else { return Ok(()) };
        fleet.set_bounds(function, least, most)?;
        while let Some(fleet) = self.fleet(function).filter(|fleet| fleet.deployed() > most)
            && let Some((youngest, _)) = fleet.youngest()
        {
            self.take_away(youngest, cluster);
        }
        self.set_minimum(function, cluster);
        Ok(())
    }

    /// Sets the minimum, at least one while the function is called, and starts missing instances.
    pub(super) fn set_minimum(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let Some((fleet, known)) = of.fleet.as_mut().zip(cluster.functions.get(&function)) else { return };
        fleet.set_minimum(known.spec.min_instances.max(of.activated.into()));
        self.start_missing(function, cluster);
    }

    /// Starts missing instances.
    pub(super) fn start_missing(&mut self, function: FunctionId, cluster: &mut Cluster) {
        if self.try_points(function, false, cluster) {
            self.no_room(function, cluster);
        }
    }

    /// Starts missing instances, also at points that were refused just now.
    pub(super) fn retry_missing(&mut self, function: FunctionId, cluster: &mut Cluster) {
        if let Some(fleet) = self.fleet_mut(function) {
            fleet.retry();
        }
        self.start_missing(function, cluster);
    }

    /// Starts found no room: the minimum tries the function's other points. Instances with room at none of them wait for it at the first:
    /// others may be parked for them.
    pub(super) fn no_room(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let lacked = self.lacks(function);
        self.try_points(function, false, cluster);
        if self.lacks(function)
            && let Some(fleet) = self.fleet_mut(function)
        {
            fleet.retry();
            self.try_points(function, true, cluster);
        }
        if !lacked || self.lacks(function) {
            cluster.unmet(function);
        }
    }

    /// Starts missing instances at the points that may be tried now, the most effective first, until a start `waits` for room. Answers
    /// whether a point was refused.
    fn try_points(&mut self, function: FunctionId, waits: bool, cluster: &mut Cluster) -> bool {
        let mut refused = false;
        let next = |of: &Fleet, now| of.startable(now).next().map(|(point, _)| point).filter(|_| of.lacks());
        while let Some(point) = self.fleet(function).and_then(|fleet| next(fleet, cluster.now)) {
            refused |= !self.start(function, point, waits, cluster);
        }
        refused
    }
}
