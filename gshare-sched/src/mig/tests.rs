use super::*;
use gshare_core::ProfileId;
use std::collections::BTreeSet;

fn model(name: &str) -> GpuModel {
    GpuModel::find(name).unwrap()
}

/// The profiles that NVIDIA's documents count configurations of: without `+me` and double memory.
fn base_profiles(gpu: &GpuModel) -> Vec<ProfileId> {
    let varies =
        |profile: &MigProfile| profile.media || (profile.compute_slices, profile.memory_slices) == (1, 2);
    gpu.ids().filter(|id| !varies(gpu.get(*id).unwrap())).collect()
}

/// Every legal layout of slices of `profiles`, the empty one included, each once, slices by place.
fn layouts(gpu: &GpuModel, profiles: &[ProfileId]) -> Vec<Vec<SliceAt>> {
    let mut all = vec![Vec::new()];
    for start in 0..gpu.family.memory_slices() {
        for layout in all.clone() {
            for &profile in profiles {
                let mut longer = layout.clone();
                longer.push(SliceAt { start, profile });
                if gpu.validate(&longer).is_ok() {
                    all.push(longer);
                }
            }
        }
    }
    all
}

/// The layouts to which no slice of `profiles` can be added.
fn maximal_layouts(gpu: &GpuModel, profiles: &[ProfileId]) -> Vec<Vec<SliceAt>> {
    let mut all = layouts(gpu, profiles);
    all.retain(|layout| {
        let mut slices =
            profiles.iter().flat_map(|&profile| (0..8).map(move |start| SliceAt { start, profile }));
        slices.all(|slice| gpu.validate(&[layout.as_slice(), &[slice]].concat()).is_err())
    });
    all
}

fn multisets(layouts: &[Vec<SliceAt>]) -> BTreeSet<Vec<ProfileId>> {
    let sorted = |layout: &Vec<SliceAt>| {
        let mut profiles: Vec<ProfileId> = layout.iter().map(|slice| slice.profile).collect();
        profiles.sort();
        profiles
    };
    layouts.iter().map(sorted).collect()
}

/// Whether `small` is part of `large`; both sorted.
fn is_part(small: &[ProfileId], large: &[ProfileId]) -> bool {
    let mut rest = large.iter();
    small.iter().all(|wanted| rest.any(|found| found == wanted))
}

/// Every subset of (profile, place), kept when no rule is broken: the rules by their letter, nothing shared with
/// `validate` but the table.
fn layouts_by_brute_force(model: &GpuModel, profiles: &[ProfileId]) -> BTreeSet<Vec<SliceAt>> {
    let all: Vec<SliceAt> = profiles
        .iter()
        .flat_map(|&profile| {
            model.get(profile).unwrap().start_places().map(move |start| SliceAt { start, profile })
        })
        .collect();
    let mut legal = BTreeSet::new();
    for chosen in 0u32..1 << all.len() {
        let slices: Vec<SliceAt> = all
            .iter()
            .enumerate()
            .filter(|(bit, _)| chosen >> bit & 1 == 1)
            .map(|(_, slice)| *slice)
            .collect();
        let size = |slice: &SliceAt| model.get(slice.profile).unwrap().memory_slices;
        let apart = slices.iter().enumerate().all(|(i, a)| {
            slices[i + 1..].iter().all(|b| a.start + size(a) <= b.start || b.start + size(b) <= a.start)
        });
        if apart {
            let mut slices = slices;
            slices.sort();
            legal.insert(slices);
        }
    }
    legal
}

#[test]
fn the_seven_slice_family_has_298_layouts_19_maximal_and_14_multisets() {
    for name in GpuModel::names() {
        let gpu = model(name);
        if gpu.family != Family::Seven {
            continue;
        }
        let base = base_profiles(&gpu);
        let (all, maximal) = (layouts(&gpu, &base), maximal_layouts(&gpu, &base));
        assert_eq!((all.len(), maximal.len(), multisets(&maximal).len()), (298, 19, 14), "{name}");
        assert_eq!(multisets(&all).len() - 1, 37, "{name}: multisets that are not empty");
        let sets = multisets(&all);
        let largest =
            sets.iter().filter(|set| !sets.iter().any(|other| *set != other && is_part(set, other)));
        assert_eq!(largest.count(), 12, "{name}: multisets that are part of no other");
        assert_eq!(
            all.iter().cloned().collect::<BTreeSet<_>>(),
            layouts_by_brute_force(&gpu, &base),
            "{name}"
        );
    }
}

#[test]
fn with_double_memory_there_are_723_layouts_and_78_maximal_ones() {
    let gpu = model("H100-80");
    let profiles: Vec<ProfileId> = gpu.ids().filter(|id| !gpu.get(*id).unwrap().media).collect();
    let all = layouts(&gpu, &profiles);
    assert_eq!((all.len(), maximal_layouts(&gpu, &profiles).len()), (723, 78));
    assert_eq!(multisets(&all).len() - 1, 77);
    for layout in &all {
        let compute: u8 = layout.iter().map(|slice| gpu.get(slice.profile).unwrap().compute_slices).sum();
        assert!(compute <= 7, "compute slices run out only where memory slices do: {layout:?}");
        for slice in layout {
            let same = layout.iter().filter(|other| other.profile == slice.profile).count();
            assert!(same <= usize::from(gpu.get(slice.profile).unwrap().max_count));
        }
    }
}

#[test]
fn the_a30_has_26_layouts_and_5_maximal_ones() {
    let gpu = model("A30-24");
    let base = base_profiles(&gpu);
    let (all, maximal) = (layouts(&gpu, &base), maximal_layouts(&gpu, &base));
    assert_eq!((all.len(), maximal.len(), multisets(&maximal).len()), (26, 5, 4));
    assert_eq!(all.into_iter().collect::<BTreeSet<_>>(), layouts_by_brute_force(&gpu, &base));
}

#[test]
fn a_multiset_fits_exactly_when_some_layout_has_it() {
    for name in ["A100-80", "A30-24"] {
        let gpu = model(name);
        let profiles: Vec<ProfileId> = gpu.ids().collect();
        let legal = multisets(&layouts(&gpu, &profiles));
        fn grow(prefix: &mut Vec<ProfileId>, profiles: &[ProfileId], visit: &mut impl FnMut(&[ProfileId])) {
            visit(prefix);
            if prefix.len() < 5 {
                for (index, &profile) in profiles.iter().enumerate() {
                    prefix.push(profile);
                    grow(prefix, &profiles[index..], visit);
                    prefix.pop();
                }
            }
        }
        let mut fitting = 0;
        grow(&mut Vec::new(), &profiles, &mut |set| {
            let arranged = gpu.arrange(set);
            assert_eq!(arranged.is_some(), legal.contains(set), "{name}: {set:?}");
            if let Some(slices) = arranged {
                assert!(gpu.validate(&slices).is_ok());
                assert!(slices.iter().map(|slice| slice.profile).eq(set.iter().copied()), "order is kept");
                fitting += 1;
            }
        });
        assert!(fitting > 10, "{name}: {fitting}");
    }
}

/// Each rule of the family's table, in both directions.
#[test]
fn each_rule_of_the_geometry_holds() {
    let gpu = model("A100-80");
    let id = |name: &str| gpu.profile(name).unwrap();
    let at = |name: &str, start| SliceAt { start, profile: id(name) };
    assert!(gpu.validate(&[at("1g.10gb", 6)]).is_ok());
    assert!(matches!(gpu.validate(&[at("1g.10gb", 7)]), Err(MigError::IllegalStart { .. })), "7 holds no 1g");
    assert_eq!(
        gpu.validate(&[at("2g.20gb", 6)]).unwrap_err().to_string(),
        "2g.20gb cannot begin at memory slice 6: it may at 0, 2, 4"
    );
    assert!(gpu.validate(&[at("1g.20gb", 6)]).is_ok(), "double memory may lie at 6");
    assert!(gpu.validate(&[at("4g.40gb", 0), at("3g.40gb", 4)]).is_ok(), "FluidFaaS, section 2");
    assert!(
        gpu.validate(&[at("4g.40gb", 0), at("2g.20gb", 4), at("1g.10gb", 6)]).is_ok(),
        "FluidFaaS, section 2"
    );
    assert!(matches!(gpu.validate(&[at("4g.40gb", 4)]), Err(MigError::IllegalStart { .. })));
    assert_eq!(
        gpu.validate(&[at("4g.40gb", 0), at("1g.10gb", 3)]).unwrap_err().to_string(),
        "1g.10gb at memory slice 3 overlaps another slice"
    );
    assert_eq!(
        gpu.validate(&[at("1g.10gb+me", 0), at("1g.10gb+me", 1)]).unwrap_err().to_string(),
        "more than 1 of 1g.10gb+me on one GPU"
    );
    let a30 = model("A30-24");
    let (one, two) = (a30.profile("1g.6gb+me").unwrap(), a30.profile("2g.12gb+me").unwrap());
    let both = [SliceAt { start: 0, profile: one }, SliceAt { start: 2, profile: two }];
    assert_eq!(a30.validate(&both).unwrap_err().to_string(), "more than 1 of +me on one GPU");
    let stray = SliceAt { start: 0, profile: ProfileId::new(200) };
    assert!(matches!(gpu.validate(&[stray]), Err(MigError::ProfileOutOfRange { profile: 200, .. })));
    assert!(matches!(
        gpu.validate(&[at("1g.10gb", 0), at("1g.10gb", 255)]),
        Err(MigError::IllegalStart { .. })
    ));
}

#[test]
fn a_slice_name_of_another_gpu_is_refused_by_name() {
    assert_eq!(
        model("A30-24").profile("1g.10gb").unwrap_err().to_string(),
        "A30-24 has no MIG profile `1g.10gb`: it has 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb"
    );
    assert!(
        GpuModel::find("V100")
            .unwrap_err()
            .to_string()
            .starts_with("unknown GPU model `V100`: known are A100-40")
    );
    assert_eq!(model("h200-141").name, "H200-141");
}

#[test]
fn tables_are_whole_and_names_agree_with_the_geometry() {
    for name in GpuModel::names() {
        let gpu = model(name);
        assert_eq!(gpu.profiles.len(), if gpu.family == Family::Seven { 7 } else { 5 }, "{name}");
        for profile in &gpu.profiles {
            let compute: u8 = profile.name.split_once('g').unwrap().0.parse().unwrap();
            assert_eq!(compute, profile.compute_slices, "{name} {}", profile.name);
            assert_eq!(profile.media, profile.name.ends_with("+me"));
            assert!(profile.start_places().all(|p| p + profile.memory_slices <= gpu.family.memory_slices()));
            assert!(profile.memory > Bytes::from_gib(4), "{name} {}", profile.name);
        }
        let names: BTreeSet<&str> = gpu.profiles.iter().map(|profile| &*profile.name).collect();
        assert_eq!(names.len(), gpu.profiles.len(), "{name}: no name twice");
    }
}
