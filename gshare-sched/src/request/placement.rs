//! Rules that choose a GPU for a waiting request, for [`LocalityScheduler`].
//!
//! # Problem
//! An idle GPU is at hand and a request is next. The request can run on an idle GPU with its model, wait for a busy GPU
//! with its model, have its model loaded on an idle GPU, or stay in the queue. The scheduler knows the cost of each choice,
//! and a [`PlacementRule`] weighs the costs.
//!
//! # Terms
//! - **at hand**: the idle GPU that looks for work in this turn;
//! - **hit**: the request's model is on the GPU at hand; the scheduler runs it there without asking a rule;
//! - **worth** of a load: the loading time that its evictions are expected to cost other requests, see
//!   [`scheduler`](super::scheduler).
//!
//! A rule answers with a copy or a load from its [`View`], so it cannot name a GPU that is unable to serve the request.

use super::Policy;
use super::scheduler::{LocalityScheduler, Room};
use core::fmt::Debug;
use core::marker::PhantomData;
use gshare_core::{Duration, GpuId, ModelId};

/// A copy of the request's model on an idle GPU.
#[derive(Debug, Clone, Copy)]
pub struct IdleCopy<'a> {
    pub(super) gpu: u32,
    shown: PhantomData<&'a ()>,
}

impl IdleCopy<'_> {
    /// The GPU that has the copy.
    pub const fn gpu(&self) -> GpuId {
        GpuId::new(self.gpu)
    }
}

/// A copy of the request's model on a busy GPU.
#[derive(Debug, Clone, Copy)]
pub struct BusyCopy<'a> {
    pub(super) gpu: u32,
    done_in: Duration,
    shown: PhantomData<&'a ()>,
}

impl BusyCopy<'_> {
    /// The GPU that has the copy.
    pub const fn gpu(&self) -> GpuId {
        GpuId::new(self.gpu)
    }

    /// Time from now until the request would be complete there, after all work that the GPU already has.
    pub const fn done_in(&self) -> Duration {
        self.done_in
    }
}

/// A load of the request's model on an idle GPU, with its costs.
#[derive(Debug)]
pub struct Load<'a> {
    pub(super) gpu: u32,
    pub(super) room: Option<Room>,
    takes: Duration,
    evicting: Duration,
    shown: PhantomData<&'a ()>,
}

impl Load<'_> {
    /// The GPU that would load the model.
    pub const fn gpu(&self) -> GpuId {
        GpuId::new(self.gpu)
    }

    /// Whether room can be made. Pinned models and models in use stay, and a model at its limit of copies gets no room.
    pub const fn has_room(&self) -> bool {
        self.room.is_some()
    }

    /// Time to load the model and run the request.
    pub const fn takes(&self) -> Duration {
        self.takes
    }

    /// Time of the evictions before the load; zero if none are needed.
    pub const fn evicting(&self) -> Duration {
        self.evicting
    }

    /// Loading time that the evictions are expected to cost other requests.
    pub fn worth(&self) -> Duration {
        self.room.as_ref().map_or(Duration::ZERO, |room| Duration::from_nanos(room.worth))
    }
}

/// The decision of a rule for a request.
#[derive(Debug)]
pub enum Decision<'a> {
    /// The request runs at once where its model is.
    Run(IdleCopy<'a>),
    /// The request joins the local queue of a GPU that has its model.
    Queue(BusyCopy<'a>),
    /// The model is loaded for the request. Without room the request keeps its place in the queue. If the model is at its
    /// limit of copies, the request joins the local queue of the busy GPU that would complete it first.
    Load(Load<'a>),
    /// The request keeps its place in the queue until the next GPU is idle.
    Wait,
}

/// A rule's view of a request, with an idle GPU at hand. Computes an answer only when asked.
#[derive(Debug)]
pub struct View<'a> {
    pub(super) scheduler: &'a LocalityScheduler,
    pub(super) gpu: u32,
    pub(super) slot: u32,
}

impl<'a> View<'a> {
    /// The model that the request needs. It is not on the GPU at hand.
    pub fn model(&self) -> ModelId {
        ModelId::new(self.scheduler.request_of(self.slot).model)
    }

    /// Time that the request has waited.
    pub fn waited(&self) -> Duration {
        self.scheduler.waited(self.slot)
    }

    /// The copy on an idle GPU that runs the model fastest.
    pub fn idle_copy(&self) -> Option<IdleCopy<'a>> {
        let gpu = self.scheduler.idle_copy(self.model().number())?;
        Some(IdleCopy { gpu, shown: PhantomData })
    }

    /// The copy on a busy GPU that would complete the request first.
    pub fn busy_copy(&self) -> Option<BusyCopy<'a>> {
        let (done_in, gpu) = self.scheduler.busy_copy(self.model().number())?;
        Some(BusyCopy { gpu, done_in: Duration::from_nanos(done_in), shown: PhantomData })
    }

    /// A load on the GPU at hand.
    pub fn load_at_hand(&self) -> Load<'a> {
        self.load(self.gpu)
    }

    /// Loads on other idle GPUs that can make room: of each kind that can serve the model, the 16 with the fewest dispatches.
    pub fn loads_elsewhere(&self) -> impl Iterator<Item = Load<'a>> {
        let at_hand = self.gpu;
        let idle = self.scheduler.idle_candidates(self.model().number()).filter(move |gpu| *gpu != at_hand);
        idle.map(|gpu| self.load(gpu)).filter(Load::has_room)
    }

    fn load(&self, gpu: u32) -> Load<'a> {
        let room = self.scheduler.room(gpu, self.slot);
        let (takes, evicting) = self.scheduler.load_costs(gpu, self.model().number(), room.as_ref());
        let [takes, evicting] = [takes, evicting].map(Duration::from_nanos);
        Load { gpu, room, takes, evicting, shown: PhantomData }
    }
}

/// A policy that chooses the GPU for a request. The scheduler keeps queues, memory and tenants; equal views must give equal
/// decisions.
///
/// ```
/// use gshare_sched::request::placement::{Decision, PlacementRule, View};
/// use gshare_sched::request::{LocalityScheduler, SchedulerConfig};
///
/// /// Never loads a second copy of a model: a request that comes while the copy is in use waits for it.
/// #[derive(Debug)]
/// struct OneCopy;
///
/// impl PlacementRule for OneCopy {
///     fn skip_limit(&self) -> u32 {
///         0
///     }
///
///     fn place<'a>(&self, view: &View<'a>) -> Decision<'a> {
///         match (view.idle_copy(), view.busy_copy()) {
///             (Some(idle), _) => Decision::Run(idle),
///             (None, Some(busy)) => Decision::Queue(busy),
///             (None, None) => Decision::Load(view.load_at_hand()),
///         }
///     }
/// }
///
/// let scheduler = LocalityScheduler::with_rule(SchedulerConfig::default(), Box::new(OneCopy))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait PlacementRule: Debug + Send {
    /// How often later requests may skip a waiting request before it must be placed first. Asked once.
    fn skip_limit(&self) -> u32;

    /// Whether an idle GPU first looks for waiting requests for its own models. If not, requests are placed in order of
    /// arrival.
    fn seeks_copies(&self) -> bool {
        true
    }

    /// Decides on a request for a model that is not on the GPU at hand.
    fn place<'a>(&self, view: &View<'a>) -> Decision<'a>;
}

impl Policy {
    /// The rule of this policy.
    pub fn rule(self) -> Box<dyn PlacementRule> {
        match self {
            Self::LoadBalance => Box::new(LoadBalance),
            Self::Lalb | Self::LalbO3 { .. } => Box::new(Lalb { skip_limit: self.skip_limit() }),
            Self::EvictCostAware { skip_limit } => Box::new(EvictCostAware { skip_limit }),
        }
    }
}

/// The head of the queue runs on any idle GPU, even if its model must be loaded (GPU-enabled FaaS, section V-A).
#[derive(Debug)]
struct LoadBalance;

impl PlacementRule for LoadBalance {
    fn skip_limit(&self) -> u32 {
        0
    }

    fn seeks_copies(&self) -> bool {
        false
    }

    fn place<'a>(&self, view: &View<'a>) -> Decision<'a> {
        Decision::Load(view.load_at_hand())
    }
}

/// A request waits for a copy if that is shorter than a load (GPU-enabled FaaS, Algorithm 2).
#[derive(Debug)]
struct Lalb {
    skip_limit: u32,
}

impl PlacementRule for Lalb {
    fn skip_limit(&self) -> u32 {
        self.skip_limit
    }

    fn place<'a>(&self, view: &View<'a>) -> Decision<'a> {
        if let Some(copy) = view.idle_copy() {
            return Decision::Run(copy);
        }
        let load = view.load_at_hand();
        let complete = load.takes().saturating_add(load.evicting());
        match view.busy_copy() {
            Some(copy) if copy.done_in() < complete => Decision::Queue(copy),
            _ => Decision::Load(load),
        }
    }
}

/// As [`Lalb`], but a load costs its time and the worth of its evictions, and goes to the idle GPU with the least sum.
#[derive(Debug)]
struct EvictCostAware {
    skip_limit: u32,
}

impl PlacementRule for EvictCostAware {
    fn skip_limit(&self) -> u32 {
        self.skip_limit
    }

    fn place<'a>(&self, view: &View<'a>) -> Decision<'a> {
        if let Some(copy) = view.idle_copy() {
            return Decision::Run(copy);
        }
        let price = |load: &Load<'_>| match load.has_room() {
            true => load.takes().saturating_add(load.worth()),
            false => Duration::MAX,
        };
        let mut best = view.load_at_hand();
        for load in view.loads_elsewhere() {
            if price(&load) < price(&best) {
                best = load;
            }
        }
        let cost = best.takes().saturating_add(best.evicting()).saturating_add(best.worth());
        match view.busy_copy() {
            Some(copy) if copy.done_in() < cost => Decision::Queue(copy),
            _ => Decision::Load(best),
        }
    }
}
