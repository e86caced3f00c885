//! The `ResourceSlice` with the GPUs of a node, which the driver publishes.

use super::{DRIVER, Gpu, Node};
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, ResourcePool,
    ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use std::collections::BTreeMap;

/// SM partition, in per cent of the SMs.
pub const SM: &str = "sm";
/// Guaranteed share of GPU time, in per cent.
pub const QUOTA: &str = "quota";
/// GPU memory.
pub const MEMORY: &str = "memory";

/// Where a capacity is no sum but a bound on each claim: the whole of a hundred shares, as there are at most.
const BOUND: &str = "10k";
const MIB: u64 = 1 << 20;

/// The slice of `node`, which goes with the Node object `owner`.
pub fn slice(node: &Node, owner: OwnerReference, generation: i64) -> ResourceSlice {
    let (name, owner_references) = (Some(name(node)), Some(vec![owner]));
    ResourceSlice {
        metadata: ObjectMeta { name, owner_references, ..ObjectMeta::default() },
        spec: ResourceSliceSpec {
            driver: DRIVER.into(),
            node_name: Some(node.name.clone()),
            pool: ResourcePool { name: node.name.clone(), generation, resource_slice_count: 1 },
            devices: Some(node.gpus.iter().map(|gpu| device(gpu, node.injected.mps.is_some())).collect()),
            ..ResourceSliceSpec::default()
        },
    }
}

/// Name of the slice, the same at each start.
pub fn name(node: &Node) -> String {
    format!("{}-{DRIVER}", node.name)
}

fn device(gpu: &Gpu, side_by_side: bool) -> Device {
    let text = |text: &str| DeviceAttribute { string: Some(text.into()), ..DeviceAttribute::default() };
    let attributes = [
        // The same key as NVIDIA's driver, for selectors that know it.
        ("uuid", text(&gpu.uuid)),
        ("productName", text(&gpu.model)),
        ("index", DeviceAttribute { int: Some(gpu.index.into()), ..DeviceAttribute::default() }),
        ("mps", DeviceAttribute { bool: Some(side_by_side), ..DeviceAttribute::default() }),
    ];
    // Quantities as the API server stores them: its slice is then equal to the wanted slice.
    let percent = |summed: bool| capacity(if summed { "100" } else { BOUND }, "1", "100");
    // Whole MiB, as the policy counts in steps.
    let mib = gpu.memory.get() / MIB;
    let memory = if mib.is_multiple_of(1024) { format!("{}Gi", mib / 1024) } else { format!("{mib}Mi") };
    let memory = capacity(&memory, "1Mi", &memory);
    let capacity = [(SM, percent(side_by_side)), (QUOTA, percent(!side_by_side)), (MEMORY, memory)];
    Device {
        name: gpu.name(),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes.map(|(key, value)| (key.to_owned(), value)).into()),
        capacity: Some(capacity.map(|(key, value)| (key.to_owned(), value)).into()),
        ..Device::default()
    }
}

/// A claim asks for steps up to a maximum, which a claim without a request gets.
fn capacity(value: &str, step: &str, max: &str) -> DeviceCapacity {
    let quantity = |text: &str| Quantity(text.to_owned());
    let (min, step) = (quantity(step), Some(quantity(step)));
    let policy = CapacityRequestPolicy {
        default: Some(quantity(max)),
        valid_range: Some(CapacityRequestPolicyRange { min, max: Some(quantity(max)), step }),
        ..CapacityRequestPolicy::default()
    };
    DeviceCapacity { value: quantity(value), request_policy: Some(policy) }
}

/// The writes that leave the API server with exactly this node's slice: the names of slices to delete, and the slice to make, or to replace
/// at the version that was read.
pub fn plan(
    node: &Node,
    owner: &OwnerReference,
    found: &[ResourceSlice],
) -> (Vec<String>, Option<ResourceSlice>) {
    let newest = found.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    let mut wanted = slice(node, owner.clone(), newest);
    let (kept, extra): (Vec<_>, Vec<_>) =
        found.iter().partition(|slice| slice.metadata.name == wanted.metadata.name);
    let is_right = |old: &&ResourceSlice| {
        let mut owners = old.metadata.owner_references.iter().flatten();
        old.spec == wanted.spec && owners.any(|other| other.uid == owner.uid)
    };
    let write = !kept.iter().any(is_right);
    wanted.spec.pool.generation += 1;
    wanted.metadata.resource_version = kept.first().and_then(|old| old.metadata.resource_version.clone());
    let delete = extra.into_iter().filter_map(|slice| slice.metadata.name.clone()).collect();
    (delete, write.then_some(wanted))
}

/// Whether the API server kept the field for shared devices, which it silently drops without its feature gate.
pub fn is_shareable(slice: &ResourceSlice) -> bool {
    slice.spec.devices.iter().flatten().all(|device| {
        device.allow_multiple_allocations == Some(true)
            && device.capacity.iter().flat_map(BTreeMap::values).all(|c| c.request_policy.is_some())
    })
}

#[cfg(test)]
mod tests {
    use super::super::claim::whole;
    use super::super::tests::node;
    use super::*;

    fn owner() -> OwnerReference {
        OwnerReference { uid: "u1".into(), name: "n1".into(), ..OwnerReference::default() }
    }

    #[test]
    fn a_slice_is_made_once_kept_while_it_is_right_and_replaced_when_it_is_not() {
        let node = node();
        let first = plan(&node, &owner(), &[]);
        let made = first.1.unwrap();
        assert_eq!(made.spec.pool.generation, 1);
        assert!(is_shareable(&made));
        assert_eq!(plan(&node, &owner(), std::slice::from_ref(&made)), (Vec::new(), None));

        let mut grown = node.clone();
        grown.gpus.pop();
        let mut read = made.clone();
        read.metadata.resource_version = Some("7".into());
        let mut stray = made.clone();
        stray.metadata.name = Some("stray".into());
        stray.spec.pool.generation = 5;
        let third = plan(&grown, &owner(), &[stray, read]);
        let replaced = third.1.unwrap();
        assert_eq!(replaced.spec.pool.generation, 6, "above every generation there is");
        assert_eq!(replaced.metadata.resource_version.as_deref(), Some("7"));
        assert_eq!(third.0, ["stray"]);
    }

    #[test]
    fn policies_keep_to_what_the_api_server_asks_of_them() {
        for mps in [true, false] {
            let mut node = node();
            node.injected.mps = mps.then(|| ("/p".into(), "/s".into()));
            for device in slice(&node, owner(), 1).spec.devices.unwrap() {
                for (key, capacity) in device.capacity.unwrap() {
                    let number = |q: &Quantity| whole(&q.0).unwrap();
                    let policy = capacity.request_policy.unwrap();
                    let (range, default) = (policy.valid_range.unwrap(), number(&policy.default.unwrap()));
                    let (min, max) = (number(&range.min), number(&range.max.unwrap()));
                    let (step, value) = (number(&range.step.unwrap()), number(&capacity.value));
                    assert!(min <= default && default <= max && max <= value, "{key}");
                    assert!(max % step == 0 && default % step == 0 && min + step <= value, "{key}");
                    let summed = if mps { key != QUOTA } else { key != SM };
                    assert_eq!(max == value, summed, "{key}: summed over the claims, or a bound on each");
                }
            }
        }
    }
}
