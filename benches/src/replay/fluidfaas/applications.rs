//! The applications in their three variants, and their times on a slice.
//!
//! The paper prints no profiles. Each model takes the profile of a published network of its kind: latencies on slices of an A100-80
//! of eleven networks by slice and batch, one process per slice (`ParvaGPU`, SC 2024, the files `prof_data` of its artifact at
//! commit 5f3de1e1). Classification is ResNet-50 in the paper too, and segmentation is `DeepLabV3` on a ResNet-101. Super
//! resolution and deblurring convolve whole images, as the networks of the VGG kind do. Depth is a deep residual network, and
//! background removal joins the features of all its levels, as a `DenseNet` does. Published times are for images of 224 by 224;
//! here each image takes [`IMAGE`] times as long. So the speed-up of a slice is always a published speed-up: of 2g over 1g it is
//! 0.94 to 1.96 in batches of 1, and 1.85 to 1.97 in batches of 8.
//!
//! Memory is such that the paper's Table 5 holds.

use super::SloOf;
use anyhow::{Context, Result, bail};
use gshare_core::dag::{Component, Dag};
use gshare_core::{BasisPoints, Bytes, Duration};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::Goal;

pub(super) const SLICES: [&str; 5] = ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"];
const BATCHES: [u32; 3] = [1, 8, 32];
/// Time of an image over the published time of a 224 by 224 image.
const IMAGE: u64 = 5;

/// A model, and the published microseconds of a network of its kind, for each of [`BATCHES`] on each of [`SLICES`]. 0: the network
/// did not run there.
pub(super) struct Model {
    name: &'static str,
    published_us: [[u64; 5]; 3],
}

/// VGG-19.
const SUPER_RESOLUTION: Model = Model {
    name: "super_resolution",
    published_us: [
        [9_019, 4_770, 3_172, 2_546, 1_788],
        [39_172, 19_841, 12_770, 10_342, 6_215],
        [142_481, 72_187, 45_619, 36_947, 22_111],
    ],
};
/// ResNet-101.
const SEGMENTATION: Model = Model {
    name: "segmentation",
    published_us: [
        [9_501, 9_226, 9_288, 9_012, 8_922],
        [34_390, 17_789, 11_711, 9_587, 9_034],
        [119_963, 62_003, 38_417, 32_298, 20_069],
    ],
};
/// ResNet-50.
const CLASSIFICATION: Model = Model {
    name: "classification",
    published_us: [
        [5_082, 4_687, 4_684, 4_656, 5_107],
        [22_329, 11_641, 7_460, 6_189, 5_000],
        [77_652, 40_557, 24_769, 21_453, 13_354],
    ],
};
/// VGG-16.
const DEBLUR: Model = Model {
    name: "deblur",
    published_us: [
        [8_108, 4_127, 2_682, 2_185, 1_509],
        [33_407, 17_429, 10_946, 8_949, 5_492],
        [122_151, 61_964, 39_028, 32_278, 19_077],
    ],
};
/// ResNet-152.
const DEPTH: Model = Model {
    name: "depth",
    published_us: [
        [13_076, 13_244, 13_204, 13_105, 14_267],
        [47_562, 24_496, 16_113, 13_604, 13_470],
        [0, 85_527, 52_594, 44_618, 27_753],
    ],
};
/// DenseNet-121.
const BACKGROUND: Model = Model {
    name: "background",
    published_us: [
        [11_508, 12_228, 11_934, 12_148, 11_925],
        [26_983, 14_558, 12_284, 12_257, 12_618],
        [100_629, 52_822, 32_501, 28_642, 17_530],
    ],
};

/// Table 4. The last application has a branch: super resolution for half of the images.
pub(super) const APPLICATIONS: [(&str, &[&Model]); 4] = [
    ("image_classification", &[&SUPER_RESOLUTION, &SEGMENTATION, &CLASSIFICATION]),
    ("depth_recognition", &[&DEBLUR, &SUPER_RESOLUTION, &DEPTH]),
    ("background_elimination", &[&SUPER_RESOLUTION, &DEBLUR, &BACKGROUND]),
    ("expanded_classification", &[&DEBLUR, &SUPER_RESOLUTION, &BACKGROUND, &SEGMENTATION, &CLASSIFICATION]),
];
const BRANCHED: usize = 3;

/// A variant: batch, memory of a component, bytes between two.
pub(super) struct Variant {
    pub(super) name: &'static str,
    pub(super) batch: u32,
    pub(super) memory: Bytes,
    bytes: Bytes,
    pub(super) applications: usize,
}

pub(super) const VARIANTS: [Variant; 3] = [
    Variant {
        name: "light",
        batch: 1,
        memory: Bytes::from_mib(2_200),
        bytes: Bytes::from_mib(4),
        applications: 4,
    },
    Variant {
        name: "medium",
        batch: 8,
        memory: Bytes::from_gib(5),
        bytes: Bytes::from_mib(16),
        applications: 4,
    },
    // The large variant of the expanded classification fits no slice as a whole: left out, as in the paper.
    Variant {
        name: "heavy",
        batch: 32,
        memory: Bytes::from_gib(11),
        bytes: Bytes::from_mib(48),
        applications: 3,
    },
];

pub(super) fn application(index: usize, variant: &Variant) -> Result<Dag> {
    let (name, models) = APPLICATIONS[index];
    let batch =
        BATCHES.iter().position(|batch| *batch == variant.batch).context("a batch without profiles")?;
    let mut dag = Dag::builder(name);
    for &model in models {
        let mut component = Component::new(model.name);
        for (slice, us) in SLICES.iter().zip(model.published_us[batch]).filter(|(_, us)| *us > 0) {
            let time = Duration::from_micros(us * IMAGE);
            component = component.with_profile(*slice, variant.batch, time, variant.memory);
        }
        if index == BRANCHED && model.name == SUPER_RESOLUTION.name {
            component = component.with_runs(BasisPoints::from_percent(50).context("share")?);
        }
        dag = dag.component(component);
    }
    for pair in models.windows(2) {
        dag = dag.edge(pair[0].name, pair[1].name, variant.bytes);
    }
    if index == BRANCHED {
        dag = dag.edge(DEBLUR.name, BACKGROUND.name, variant.bytes);
    }
    Ok(dag.build()?)
}

/// Time of some components on a slice, every branch taken; none where they do not fit.
fn together(components: &[Component], model: &GpuModel, slice: &str, batch: u32) -> Option<Duration> {
    let profile = model.get(model.profile(slice).ok()?)?;
    let all: Option<Vec<_>> = components.iter().map(|one| one.profile(slice, batch)).collect();
    let all = all?;
    let memory = all.iter().map(|one| one.memory.get()).sum::<u64>() + Goal::default().runtime_memory.get();
    (memory <= profile.memory.get()).then(|| all.iter().map(|one| one.time).sum())
}

/// Time of the whole on a slice, every branch taken; none where it does not fit.
pub(super) fn whole(dag: &Dag, model: &GpuModel, slice: &str, variant: &Variant) -> Option<Duration> {
    together(dag.components(), model, slice, variant.batch)
}

/// 1.5 times the time of the application alone on the smallest slices that will do (section 6).
pub(super) fn slo(dag: &Dag, model: &GpuModel, variant: &Variant, of: SloOf) -> Result<Duration> {
    let smallest = |components: &[Component]| {
        SLICES.iter().find_map(|slice| together(components, model, slice, variant.batch))
    };
    let alone = match of {
        SloOf::Whole => smallest(dag.components()),
        SloOf::Parts => dag.components().iter().map(|one| smallest(std::slice::from_ref(one))).sum(),
    };
    let Some(alone) = alone else { bail!("{}: it fits no slice", dag.name()) };
    Ok(Duration::from_nanos(alone.as_nanos() * 3 / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FluidFaaS, Table 5: the smallest slice for each variant, as a whole and for its largest part.
    #[test]
    fn variants_need_the_slices_of_table_5() {
        let model = GpuModel::find("A100-80").unwrap();
        for (variant, smallest) in VARIANTS.iter().zip([
            ["1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb"],
            ["2g.20gb", "2g.20gb", "2g.20gb", "4g.40gb"],
            ["3g.40gb", "3g.40gb", "3g.40gb", ""],
        ]) {
            for (index, smallest) in smallest.into_iter().enumerate().take(variant.applications) {
                let dag = application(index, variant).unwrap();
                let fits = SLICES.iter().find(|slice| whole(&dag, &model, slice, variant).is_some()).unwrap();
                // 3g.40gb and 4g.40gb have the same memory.
                let expected = if smallest == "4g.40gb" { "3g.40gb" } else { smallest };
                assert_eq!(*fits, expected, "{} {}", variant.name, dag.name());
            }
            let one = variant.memory.get() + Goal::default().runtime_memory.get();
            let part = SLICES
                .iter()
                .find(|slice| model.get(model.profile(slice).unwrap()).unwrap().memory.get() >= one);
            assert_eq!(*part.unwrap(), if variant.name == "heavy" { "2g.20gb" } else { "1g.10gb" });
        }
    }

    /// On the slices that Table 5 gives to the parts a pipeline is in time by [`SloOf::Parts`] alone: a component of the
    /// medium variant takes 1.8 to 2 times as long on 1g as on 2g, and the deadline is 1.5 times the time there.
    #[test]
    fn deadlines_of_the_whole_leave_no_pipeline_of_smallest_slices() {
        let model = GpuModel::find("A100-80").unwrap();
        let medium = &VARIANTS[1];
        for index in 0..BRANCHED {
            let dag = application(index, medium).unwrap();
            let on_1g: Duration =
                dag.components().iter().map(|one| one.profile("1g.10gb", 8).unwrap().time).sum();
            assert!(on_1g > slo(&dag, &model, medium, SloOf::Whole).unwrap());
            assert_eq!(on_1g.as_nanos() * 3 / 2, slo(&dag, &model, medium, SloOf::Parts).unwrap().as_nanos());
        }
    }
}
