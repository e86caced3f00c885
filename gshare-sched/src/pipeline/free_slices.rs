//! The GPUs of a node, with their free and busy slices.

use crate::mig::{GpuModel, MigError, SliceAt};
use gshare_core::{GpuId, ProfileId};

/// One GPU of a [`Node`]: its slices. Memory slices in neither list are not cut up.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct NodeGpu {
    pub gpu: GpuId,
    /// Existing slices that no instance uses.
    pub free: Vec<SliceAt>,
    /// Slices in use.
    #[cfg_attr(feature = "serde", serde(default))]
    pub busy: Vec<SliceAt>,
}

/// The GPUs of one invoker, all of one model. Slices of different GPUs may be mixed in a pipeline (FluidFaaS, Figure 4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    model: GpuModel,
    gpus: Vec<NodeGpu>,
}

/// The most GPUs of one [`Node`].
pub const MAX_NODE_GPUS: usize = 64;

impl Node {
    /// A node with checked slices.
    ///
    /// # Errors
    /// [`NodeError`]: impossible slices, a GPU twice, too many GPUs.
    pub fn new(model: GpuModel, mut gpus: Vec<NodeGpu>) -> Result<Self, NodeError> {
        if gpus.len() > MAX_NODE_GPUS {
            return Err(NodeError::TooManyGpus { count: gpus.len(), limit: MAX_NODE_GPUS });
        }
        gpus.sort_by_key(|gpu| gpu.gpu);
        for pair in gpus.windows(2) {
            if pair[0].gpu == pair[1].gpu {
                return Err(NodeError::DuplicateGpu { gpu: pair[0].gpu });
            }
        }
        for gpu in &mut gpus {
            gpu.free.sort_unstable();
            let all: Vec<SliceAt> = gpu.busy.iter().chain(&gpu.free).copied().collect();
            model.validate(&all).map_err(|cause| NodeError::BadSlices { gpu: gpu.gpu, cause })?;
        }
        Ok(Self { model, gpus })
    }

    /// A node on which just these slices are free, by name, laid on as few GPUs as come out when each goes to the first
    /// GPU that still has room for it.
    ///
    /// ```
    /// use gshare_sched::mig::GpuModel;
    /// use gshare_sched::pipeline::Node;
    ///
    /// let node = Node::with_free(GpuModel::find("A100-80")?, &["4g.40gb", "2g.20gb", "1g.10gb", "4g.40gb"])?;
    /// assert_eq!(node.gpus().len(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`NodeError::BadName`] for a profile the model does not have, [`NodeError::TooManyGpus`].
    pub fn with_free(model: GpuModel, names: &[&str]) -> Result<Self, NodeError> {
        let mut sets: Vec<Vec<ProfileId>> = Vec::new();
        for name in names {
            let profile = model.profile(name).map_err(|source| NodeError::BadName { source })?;
            let room = sets.iter().position(|set| {
                let mut with = set.clone();
                with.push(profile);
                model.arrange(&with).is_some()
            });
            match room {
                Some(gpu) => sets[gpu].push(profile),
                None if sets.len() == MAX_NODE_GPUS => {
                    return Err(NodeError::TooManyGpus { count: sets.len() + 1, limit: MAX_NODE_GPUS });
                }
                None => sets.push(vec![profile]),
            }
        }
        let gpu = |(gpu, set): (u32, &Vec<ProfileId>)| NodeGpu {
            gpu: GpuId::new(gpu),
            free: model.arrange(set).unwrap_or_default(),
            busy: Vec::new(),
        };
        let gpus = (0..).zip(&sets).map(gpu).collect();
        Self::new(model, gpus)
    }

    /// The model of the node's GPUs.
    pub fn model(&self) -> &GpuModel {
        &self.model
    }

    /// The node's GPUs, by id.
    pub fn gpus(&self) -> &[NodeGpu] {
        &self.gpus
    }

    /// The idle memory slices of a GPU, cut up or not, as a bit mask.
    pub fn idle(&self, gpu: &NodeGpu) -> u8 {
        let all = u8::MAX >> (8 - self.model.family.memory_slices());
        let mask =
            |slice: &SliceAt| self.model.get(slice.profile).and_then(|profile| profile.mask_at(slice.start));
        gpu.busy.iter().filter_map(mask).fold(all, |idle, mask| idle & !mask)
    }

    /// Number of free slices of each profile of the model.
    pub fn free_counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.model.profiles.len()];
        for slice in self.gpus.iter().flat_map(|gpu| &gpu.free) {
            counts[slice.profile.index()] += 1;
        }
        counts
    }
}

/// Why a node was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum NodeError {
    /// More GPUs than a node may have.
    #[error("{count} GPUs or more: at most {limit}")]
    TooManyGpus { count: usize, limit: usize },
    /// The same GPU twice.
    #[error("{gpu} is given twice")]
    DuplicateGpu { gpu: GpuId },
    /// A name without a profile of the model.
    #[error(transparent)]
    BadName { source: MigError },
    /// Slices that do not go together on a GPU.
    #[error("{gpu}: {cause}")]
    BadSlices { gpu: GpuId, cause: MigError },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_with_slices_that_cannot_be_is_refused() {
        let model = GpuModel::find("A100-80").unwrap();
        let four = SliceAt { start: 0, profile: model.profile("4g.40gb").unwrap() };
        let gpu =
            |gpu, free: &[SliceAt]| NodeGpu { gpu: GpuId::new(gpu), free: free.to_vec(), busy: vec![four] };
        let refused = |gpus| Node::new(model.clone(), gpus).unwrap_err().to_string();
        assert_eq!(refused(vec![gpu(3, &[four])]), "gpu3: 4g.40gb at memory slice 0 overlaps another slice");
        assert_eq!(refused(vec![gpu(1, &[]), gpu(1, &[])]), "gpu1 is given twice");
        assert_eq!(refused((0..65).map(|id| gpu(id, &[])).collect()), "65 GPUs or more: at most 64");
        let many = vec!["7g.80gb"; 65];
        assert!(matches!(Node::with_free(model.clone(), &many), Err(NodeError::TooManyGpus { .. })));
        let error = Node::with_free(model, &["1g.6gb"]).unwrap_err().to_string();
        assert!(error.starts_with("A100-80 has no MIG profile `1g.6gb`: it has "), "{error}");
    }
}
