//! Both scalers on one clock (Dilu, section 3.4: adaptive 2D co-scaling).
//!
//! # Problem
//! More tokens for the running instances should meet a burst of some seconds, and more instances should meet lasting load. The
//! two decisions belong to different places and paces: tokens to one GPU and milliseconds, instances to the whole pool and
//! seconds.
//!
//! # Algorithm
//! [`CoScaler`] puts a [`VerticalScaler`] and a [`HorizontalScaler`] on one clock and needs no rule of its own. The first bad KLC
//! raises an instance to its limit at the end of the same period, 5 ms later, while the window of a lazy horizontal scaler must
//! fill for 20 s before a start. So scaling up comes first, and scaling out only when the window demands it. Scaling down follows
//! the first good KLC, and scaling in follows after 30 s. [`CoScaler::learning`] makes the best pair: its horizontal scaler knows
//! the vertical scaler's abilities, and starts instances only for peaks beyond the running instances' limits.
//!
//! A host with one node daemon per machine and one controller runs the halves apart, with the same result.
//!
//! # Invariants
//! Both halves have one time: an event refused by either changes neither.
//!
//! # Cost
//! An event costs as much as in its half; [`CoScaleEvent::DeadlineReached`] goes to both.
use super::{DiluVertical, DiluVerticalConfig, PeakHorizontal, PeakHorizontalConfig};
use crate::scale::{
    HorizontalAction, HorizontalError, HorizontalEvent, HorizontalScaler, VerticalAction, VerticalError,
    VerticalEvent, VerticalScaler,
};
use gshare_core::{ConfigError, Engine, TimeWentBack, Timestamp};

/// An event of one of the two scalers, with its subject.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "scaler", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CoScaleEvent {
    /// An event on a GPU.
    Vertical(VerticalEvent),
    /// An event of a function.
    Horizontal(HorizontalEvent),
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of one of the two scalers, with its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "scaler", rename_all = "snake_case"))]
pub enum CoScaleAction {
    /// An order for a GPU.
    Vertical(VerticalAction),
    /// An order for a function.
    Horizontal(HorizontalAction),
}

/// Why an event was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoScaleError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// The vertical scaler refused it.
    #[error(transparent)]
    Vertical(#[from] VerticalError),
    /// The horizontal scaler refused it.
    #[error(transparent)]
    Horizontal(#[from] HorizontalError),
}

/// A vertical and a horizontal scaler on one clock. See the [module](self).
#[derive(Debug)]
pub struct CoScaler<V = DiluVertical, H = PeakHorizontal> {
    now: Timestamp,
    vertical: V,
    horizontal: H,
    ups: Vec<VerticalAction>,
    outs: Vec<HorizontalAction>,
}

impl CoScaler {
    /// A learning vertical scaler, and a horizontal scaler that counts on the instances' limits, with room for `max_clients` and
    /// otherwise with default settings.
    ///
    /// # Errors
    /// `max_clients` is above the bound of [`DiluVerticalConfig::max_clients`].
    pub fn learning(max_clients: u32) -> Result<Self, ConfigError> {
        let mut vertical = DiluVerticalConfig::default();
        (vertical.learn, vertical.max_clients) = (true, max_clients);
        let horizontal = PeakHorizontal::new(PeakHorizontalConfig::default())?;
        Ok(Self::new(DiluVertical::new(vertical)?, horizontal))
    }
}

impl<V: VerticalScaler, H: HorizontalScaler> CoScaler<V, H> {
    /// Joins two scalers. Neither should have seen an event yet.
    pub const fn new(vertical: V, horizontal: H) -> Self {
        Self { now: Timestamp::ZERO, vertical, horizontal, ups: Vec::new(), outs: Vec::new() }
    }

    /// The vertical half.
    pub const fn vertical(&self) -> &V {
        &self.vertical
    }

    /// The horizontal half.
    pub const fn horizontal(&self) -> &H {
        &self.horizontal
    }
}

impl<V: VerticalScaler, H: HorizontalScaler> Engine for CoScaler<V, H> {
    type Event = CoScaleEvent;
    type Action = CoScaleAction;
    type Error = CoScaleError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: CoScaleEvent,
        actions: &mut Vec<CoScaleAction>,
    ) -> Result<(), CoScaleError> {
        TimeWentBack::check(now, self.now)?;
        let (vertical, horizontal) = match event {
            CoScaleEvent::Vertical(event) => (Some(event), None),
            CoScaleEvent::Horizontal(event) => (None, Some(event)),
            CoScaleEvent::DeadlineReached => {
                (Some(VerticalEvent::DeadlineReached), Some(HorizontalEvent::DeadlineReached))
            }
        };
        // Only one half gets an event it may refuse: for a deadline, each refuses the time at most.
        if let Some(event) = vertical {
            self.vertical.handle(now, event, &mut self.ups)?;
        }
        if let Some(event) = horizontal {
            self.horizontal.handle(now, event, &mut self.outs)?;
        }
        self.now = now;
        actions.extend(self.ups.drain(..).map(CoScaleAction::Vertical));
        actions.extend(self.outs.drain(..).map(CoScaleAction::Horizontal));
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        [self.vertical.next_deadline(), self.horizontal.next_deadline()].into_iter().flatten().min()
    }
}
