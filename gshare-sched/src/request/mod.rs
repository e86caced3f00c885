//! Request scheduling: which GPU serves which request, and which models stay in its memory.
//!
//! The events, actions and errors are those of [`gshare_core::request`]; one engine, [`LocalityScheduler`], runs every
//! policy.
//!
//! | part | does |
//! |---|---|
//! | [`scheduler`] | gives requests to GPUs |
//! | [`placement`] | which GPU for which request: a [`Policy`]'s rule, or a host's own |
//! | cache manager | chooses what to evict: [`CachePolicy`]; memory states, pins, tiers |
//! | tenants | lets a tenant's requests into the queue: [`TenantLimits`](gshare_core::request::TenantLimits) and fairness |
//! | [`shared_state`] | what the nodes of a cluster tell each other: [`MemoryStore`], [`shared_state::reconcile`] |
//!
//! # When it matters
//! Only while loading is slow. With weights in pinned host memory (a tenth of the loading time) all policies, the
//! load-balancing baseline included, come within a few per cent of each other.

mod cache;
mod estimate;
mod names;
pub mod placement;
mod queue;
pub mod scheduler;
pub mod shared_state;
mod tenants;

pub use placement::PlacementRule;
pub use scheduler::LocalityScheduler;
pub use shared_state::MemoryStore;

use gshare_core::{BasisPoints, Bytes, ConfigError, Duration};

/// Which GPU serves which request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "policy", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Policy {
    /// The head of the queue goes to whichever GPU is idle: the baseline of GPU-enabled FaaS, section V-A.
    LoadBalance,
    /// Locality-aware load balancing, in order (section IV-A).
    Lalb,
    /// The same with out-of-order dispatch (section IV-B).
    LalbO3 {
        /// How often a request may be skipped. The paper's default is 25.
        skip_limit: u32,
    },
    /// Out-of-order dispatch that also prices what a miss evicts.
    EvictCostAware {
        /// How often a request may be skipped.
        skip_limit: u32,
    },
}

impl Policy {
    /// How often a request may be skipped.
    pub const fn skip_limit(self) -> u32 {
        match self {
            Self::LoadBalance | Self::Lalb => 0,
            Self::LalbO3 { skip_limit } | Self::EvictCostAware { skip_limit } => skip_limit,
        }
    }
}

/// Which models are evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CachePolicy {
    /// The least recently used (GPU-enabled FaaS, section III-D).
    #[default]
    Lru,
    /// The least by greedy-dual size and frequency: age + uses x loading time / size (FaasCache, ASPLOS'21).
    Gdsf,
    /// The least worth per byte in the whole cluster: see [`scheduler`].
    CostAware,
}

/// Settings of [`LocalityScheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct SchedulerConfig {
    /// Which GPU serves which request. `LalbO3` with the paper's limit of 25.
    pub policy: Policy,
    /// The policy that chooses the model to evict. `Lru`, as in the paper.
    pub cache: CachePolicy,
    /// Age from which a request is not skipped any more. 60 s: no request comes near it unless something is wrong.
    #[cfg_attr(feature = "serde", serde(rename = "skip_age_ns"))]
    pub skip_age: Duration,
    /// Age at which a request that still waits is rejected. None: clients have their own patience.
    #[cfg_attr(feature = "serde", serde(rename = "max_wait_ns"))]
    pub max_wait: Option<Duration>,
    /// Most requests of one model that run together. 1, as in the paper.
    pub max_batch: u16,
    /// Time of each further request of a batch, as a share of the first one's. 100 %: batching saves nothing.
    #[cfg_attr(feature = "serde", serde(rename = "batch_marginal_bp"))]
    pub batch_marginal: BasisPoints,
    /// Time to evict before a load. 0: part of the profiled loading time.
    #[cfg_attr(feature = "serde", serde(rename = "eviction_ns"))]
    pub eviction: Duration,
    /// Whether profiled times are corrected by observed ones. Yes.
    pub learn: bool,
    /// Mean deviations that are added to the time of each request in a local queue. 1.
    pub deviations: u32,
    /// How often a request is tried before it is rejected. 3.
    pub max_attempts: u8,
    /// Pinned memory of each node for models. 0: no such tier, as in the paper.
    #[cfg_attr(feature = "serde", serde(rename = "host_memory_bytes"))]
    pub host_memory: Bytes,
    /// Length of the window over which tenants' shares of time are settled. 60 s: tens of requests.
    #[cfg_attr(feature = "serde", serde(rename = "window_ns"))]
    pub window: Duration,
    /// How far a tenant may be ahead of the least served one; no fairness between tenants if none. None.
    #[cfg_attr(feature = "serde", serde(rename = "fairness_ns"))]
    pub fairness: Option<Duration>,
    /// Most requests that are here at once. 1,048,576.
    pub max_requests: u32,
    /// Number of GPUs. 65,536.
    pub max_gpus: u32,
    /// Number of models. 1,048,576.
    pub max_models: u32,
    /// Number of tenants. 65,536.
    pub max_tenants: u32,
}

gshare_core::with_fields!(SchedulerConfig {
    with_policy(policy: Policy),
    with_cache(cache: CachePolicy),
    with_skip_age(skip_age: Duration),
    with_max_wait(max_wait: Option<Duration>),
    with_max_batch(max_batch: u16),
    with_batch_marginal(batch_marginal: BasisPoints),
    with_eviction(eviction: Duration),
    with_learn(learn: bool),
    with_deviations(deviations: u32),
    with_max_attempts(max_attempts: u8),
    with_host_memory(host_memory: Bytes),
    with_window(window: Duration),
    with_fairness(fairness: Option<Duration>),
    with_max_requests(max_requests: u32),
    with_max_gpus(max_gpus: u32),
    with_max_models(max_models: u32),
    with_max_tenants(max_tenants: u32),
});

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            policy: Policy::LalbO3 { skip_limit: 25 },
            cache: CachePolicy::Lru,
            skip_age: Duration::from_secs(60),
            max_wait: None,
            max_batch: 1,
            batch_marginal: BasisPoints::WHOLE,
            eviction: Duration::ZERO,
            learn: true,
            deviations: 1,
            max_attempts: 3,
            host_memory: Bytes::ZERO,
            window: Duration::from_secs(60),
            fairness: None,
            max_requests: 1 << 20,
            max_gpus: 1 << 16,
            max_models: 1 << 20,
            max_tenants: 1 << 16,
        }
    }
}

impl SchedulerConfig {
    /// The paper's settings for a policy.
    pub fn paper(policy: Policy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Pricing what is evicted, in the choice of the GPU, of the victims, and of waiting or loading.
    pub fn evict_cost_aware() -> Self {
        let policy = Policy::EvictCostAware { skip_limit: 25 };
        Self { policy, cache: CachePolicy::CostAware, ..Self::default() }
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let hour = Duration::from_secs(3600);
        ConfigError::unless(
            !self.skip_age.is_zero(),
            "skip_age",
            self.skip_age,
            "need more than 0 (Lalb skips nobody)",
        )?;
        if let Some(wait) = self.max_wait {
            ConfigError::unless(!wait.is_zero(), "max_wait", wait, "need more than 0, or none")?;
        }
        ConfigError::unless(
            (1..=1024).contains(&self.max_batch),
            "max_batch",
            self.max_batch,
            "need 1 to 1024",
        )?;
        ConfigError::unless(self.eviction <= hour, "eviction", self.eviction, "need at most 3600s")?;
        ConfigError::unless(self.deviations <= 100, "deviations", self.deviations, "need at most 100")?;
        ConfigError::unless(self.max_attempts > 0, "max_attempts", self.max_attempts, "need more than 0")?;
        ConfigError::unless(
            self.window >= Duration::from_millis(1) && self.window <= hour,
            "window",
            self.window,
            "need 1ms to 3600s",
        )?;
        ConfigError::unless(
            (1..=1 << 26).contains(&self.max_requests),
            "max_requests",
            self.max_requests,
            "need 1 to 67108864",
        )?;
        for (field, value) in
            [("max_gpus", self.max_gpus), ("max_models", self.max_models), ("max_tenants", self.max_tenants)]
        {
            ConfigError::unless((1..=1 << 24).contains(&value), field, value, "need 1 to 16777216")?;
        }
        Ok(())
    }
}
