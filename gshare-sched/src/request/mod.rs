//! Request scheduling: the choice of a GPU for each request, and of the models in each GPU's memory.
//!
//! # Problem
//! An inference request needs its model in the memory of the GPU that serves it, and a load takes longer than the request.
//! A [`RequestScheduler`] chooses the GPU for each request, the models to load, and the models to evict for room
//! (GPU-enabled FaaS, sections III and IV).
//!
//! # Terms
//! - **kind**: GPUs that are alike in speed and memory; models are profiled per kind;
//! - **copy**: a model in the memory of one GPU: loading, resident or evicting;
//! - **hit, miss**: a request is served by a copy that is present or being loaded, or needs a new copy; a **false miss** is
//!   a miss although another GPU has a copy;
//! - **global queue**: requests without a GPU, by arrival; **local queue**: requests that wait for one GPU.
//!
//! # Life of a request
//! ```text
//! Arrived ─▶ (queued) ─▶ Dispatch ─▶ Completed            a hit
//! Arrived ─▶ (queued) ─▶ Evict* ─▶ Evicted* ─▶ Load ─▶ Loaded ─▶ Dispatch ─▶ Completed     a miss
//!                        Load ─▶ LoadFailed ─▶ (queued again, at the place of its arrival)
//!                        Dispatch ─▶ NotResident ─▶ Load ─▶ ...     the model was not there after all
//! GpuLost: all that ran or waited there is queued again, at the place of its arrival
//! Reject{reason}: instead of any of these; final
//! ```
//! A GPU does one thing at a time: it makes room, loads, or runs one request (or one batch of the same model). Its manager
//! carries actions out one after the other and reports the end of each.
//!
//! # Parts
//! One engine, [`LocalityScheduler`], runs every policy.
//!
//! | part | does |
//! |---|---|
//! | [`scheduler`] | gives requests to GPUs |
//! | a [`Policy`] | which GPU for which request |
//! | cache manager | chooses what to evict: [`CachePolicy`]; memory states, pins, tiers |
//!
//! # When it matters
//! Only while loading is slow. With weights in pinned host memory (a tenth of the loading time) all policies, the
//! load-balancing baseline included, come within a few per cent of each other.

mod cache;
mod estimate;
mod names;
mod queue;
mod request_scheduler;
pub mod scheduler;

pub use request_scheduler::*;
pub use scheduler::LocalityScheduler;

use gshare_core::{BasisPoints, Bytes, ConfigError, Duration};

/// Which GPU serves which request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "policy", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Policy {
    /// The head of the queue goes to any idle GPU: the baseline of GPU-enabled FaaS, section V-A.
    LoadBalance,
    /// Locality-aware load balancing, in order (section IV-A).
    Lalb,
    /// The same with out-of-order dispatch (section IV-B).
    LalbO3 {
        /// How often a request may be skipped. The paper's default is 25.
        skip_limit: u32,
    },
    /// Out-of-order dispatch in which the cost of a miss includes its evictions.
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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

crate::settings_table::settings! {
    /// Settings of [`LocalityScheduler`].
    #[derive(Copy)]
    pub struct SchedulerConfig {
        /// Which GPU serves which request. `LalbO3` with the paper's limit of 25.
        pub policy: Policy = Policy::LalbO3 { skip_limit: 25 }, with_policy;
        /// The policy that chooses the model to evict. `Lru`, as in the paper.
        pub cache: CachePolicy = CachePolicy::Lru, with_cache;
        /// Age from which a request is not skipped any more. 60 s: no request comes near it unless something is wrong.
        #[cfg_attr(feature = "serde", serde(rename = "skip_age_ns"))]
        pub skip_age: Duration = Duration::from_secs(60), with_skip_age;
        /// Most requests of one model that run together. 1, as in the paper.
        pub max_batch: u16 = 1, with_max_batch;
        /// Time of each further request of a batch, as a share of the first one's. 100 %: batching saves nothing.
        #[cfg_attr(feature = "serde", serde(rename = "batch_marginal_bp"))]
        pub batch_marginal: BasisPoints = BasisPoints::WHOLE, with_batch_marginal;
        /// Whether profiled times are corrected by observed ones. Yes.
        pub learn: bool = true, with_learn;
        /// How many loads for a request may fail before it is rejected. 3.
        pub max_loads: u8 = 3, with_max_loads;
        /// Pinned memory of each node for models. 0: no such tier, as in the paper.
        #[cfg_attr(feature = "serde", serde(rename = "host_memory_bytes"))]
        pub host_memory: Bytes = Bytes::ZERO, with_host_memory;
        /// Most requests that are here at once. 1,048,576.
        pub max_requests: u32 = 1 << 20, with_max_requests;
    }
}

impl SchedulerConfig {
    /// The paper's settings for a policy.
    pub fn paper(policy: Policy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// The settings that price evictions: for the GPU, for the victims, and for a wait or a load.
    pub fn evict_cost_aware() -> Self {
        let policy = Policy::EvictCostAware { skip_limit: 25 };
        Self { policy, cache: CachePolicy::CostAware, ..Self::default() }
    }

    fn validate(&self) -> Result<(), ConfigError> {
        gshare_core::check_fields!(self {
            skip_age in Duration::from_nanos(1).., "need more than 0 (Lalb skips no request)";
            max_batch in 1..=1024, "need 1 to 1024";
            max_loads in 1.., "need more than 0";
            max_requests in 1..=1 << 26, "need 1 to 67108864";
        })
    }
}
