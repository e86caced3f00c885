//! Programs' ways to the driver's functions under the hook: each yields exactly the requested variant.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Run, assert_same, built, program};
use gshare_cuda_abi::{Class, SYMBOLS, by_name};

/// Unwrapped names of class launch and alloc, with the reason (see the library's `exports`).
const WAIVED: [(&str, &str); 2] = [("cuMemAllocHost", "host memory"), ("cuMemHostAlloc", "host memory")];
const WAIVED_TOO: [(&str, &str); 1] = [("cuMemHostRegister", "host memory")];

/// The driver functions exported by the hook.
fn wrapped() -> BTreeSet<String> {
    let listed =
        Command::new("nm").args(["-D", "--defined-only"]).arg(&built().hook).output().expect("nm runs");
    let text = String::from_utf8(listed.stdout).expect("symbols are ASCII");
    text.lines().filter_map(|line| line.split(' ').next_back()).map(str::to_owned).collect()
}

#[test]
fn every_launch_and_allocation_is_wrapped_or_waived_with_a_reason() {
    let wrapped = wrapped();
    let waived = |base: &str| {
        WAIVED.iter().chain(&WAIVED_TOO).any(|(name, reason)| *name == base && !reason.is_empty())
    };
    let missing: Vec<_> = SYMBOLS
        .iter()
        .filter(|symbol| matches!(symbol.class, Class::Launch | Class::Alloc | Class::Copy))
        .filter(|symbol| !wrapped.contains(symbol.name) && !waived(symbol.base))
        .map(|symbol| symbol.name)
        .collect();
    assert!(missing.is_empty(), "neither wrapped nor waived: {missing:?}");
    for (name, _) in WAIVED.iter().chain(&WAIVED_TOO) {
        assert!(!wrapped.contains(*name), "{name} is waived and wrapped");
    }
}

#[test]
fn the_hook_exports_dlsym_dlvsym_and_driver_functions_and_nothing_else() {
    for name in wrapped() {
        assert!(name == "dlsym" || name == "dlvsym" || by_name(&name).is_some(), "{name} is exported");
    }
}

/// The look-ups of a runtime at its start: every base name at the release of each of its variants, with both flags.
fn start_up() -> String {
    let mut lines = String::new();
    let asked: BTreeSet<_> = SYMBOLS.iter().map(|symbol| (symbol.base, symbol.introduced)).collect();
    for (base, release) in asked {
        for flags in [0, 1, 2] {
            writeln!(lines, "{base} {release} {flags}").expect("writing to a string");
        }
    }
    for (base, release, flags) in [
        ("cuNoSuchFunction", 12000, 0),
        ("cudnnCreate", 12000, 0),
        ("cuMemAlloc_v2", 12000, 0),
        ("cuLaunchKernel", 1000, 0),
        ("cuLaunchKernel", 3999, 2),
        ("cuLaunchKernel", 99000, 0),
        ("cuLaunchKernel", 12000, 77),
        ("cuGetExportTable", 12000, 0),
        ("cuCtxSynchronize", 12080, 0),
    ] {
        writeln!(lines, "{base} {release} {flags}").expect("writing to a string");
    }
    lines
}

#[test]
fn start_up_look_ups_give_exactly_the_variant_asked_for() {
    let program = program("resolve", &[]);
    let wrapped = wrapped();
    let lines = start_up();
    for driver in ["12.0", "12.8", "13.0"] {
        let bare =
            Run::bare(&program, &["replay"]).env("GSHARE_SIM_DRIVER_VERSION", driver).finish_with(&lines);
        let hooked = Run::hooked(&program, &["replay"])
            .env("GSHARE_SIM_DRIVER_VERSION", driver)
            .env("GSHARE_QUOTA", "0.5")
            .finish_with(&lines);
        assert_eq!(bare.code, Some(0), "{}", bare.stderr);
        let (mut same, mut ours) = (0, 0);
        for (bare, hooked) in bare.stdout.lines().zip(hooked.stdout.lines()) {
            // Results, statuses and symbol names agree; the hook owns exactly the names it wraps.
            let (bare, hooked): (Vec<_>, Vec<_>) = (bare.split(' ').collect(), hooked.split(' ').collect());
            assert_eq!(bare.len(), hooked.len(), "{bare:?} {hooked:?}");
            for at in 0..bare.len() {
                let owned_by = hooked[at].trim_end_matches(',');
                if owned_by == "libgshare_hook.so" {
                    assert!(wrapped.contains(bare[at - 1]), "{bare:?} {hooked:?}");
                    ours += 1;
                } else {
                    assert_eq!(bare[at], hooked[at], "{bare:?} {hooked:?}");
                    same += 1;
                    let symbol = at.checked_sub(1).map_or("", |before| bare[before]);
                    let is_owner = bare[at].trim_end_matches(',').starts_with("lib");
                    assert!(!is_owner || !wrapped.contains(symbol), "{symbol} slipped by: {hooked:?}");
                }
            }
        }
        assert!(ours > 200 && same > 2000, "driver {driver}: {ours} wrappers, {same} others");
    }
}

#[test]
fn exported_names_found_by_dlsym_are_wrapped_by_exact_name() {
    let program = program("resolve", &[]);
    let wrapped = wrapped();
    let names: Vec<&str> = ["dlsym"].into_iter().chain(SYMBOLS.iter().map(|symbol| symbol.name)).collect();
    let hooked = Run::hooked(&program, &names).env("GSHARE_QUOTA", "0.5").finish();
    assert_eq!(hooked.code, Some(0), "{}", hooked.stderr);
    assert_eq!(hooked.stdout.lines().count(), SYMBOLS.len());
    for line in hooked.stdout.lines() {
        let [asked, found, owner] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert_eq!(asked, found, "{line}");
        assert_eq!(owner == "libgshare_hook.so", wrapped.contains(asked), "{line}");
    }
}

#[test]
fn look_ups_lead_to_functions_that_work() {
    let program = program("resolve", &[]);
    for kind in ["next", "dlclose", "call"] {
        let bare = Run::bare(&program, &[kind]).finish();
        let hooked = Run::hooked(&program, &[kind]).env("GSHARE_QUOTA", "0.5").finish();
        assert_eq!(bare.code, Some(0));
        assert_same(kind, &bare, &hooked);
    }
}

/// `resolve.c`, not linked with the driver.
fn without_driver(place: &Path) -> PathBuf {
    built(); // what it opens
    let binary = place.join("resolve");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/resolve.c");
    assert!(Command::new("gcc").args(["-o"]).arg(&binary).args([file, "-ldl"]).status().unwrap().success());
    binary
}

#[test]
fn without_a_driver_nobody_pretends_that_there_is_one() {
    let place = tempfile::tempdir().unwrap();
    let program = without_driver(place.path());
    let bare = Run::bare(&program, &["absent"]).finish();
    let hooked = Run::hooked(&program, &["absent"]).env("GSHARE_QUOTA", "0.5").finish();
    assert_eq!(bare.stdout, "0 0 1\nerror: 1\n");
    assert_same("absent", &bare, &hooked);
}

/// Regression: functions looked up earlier were called at the driver's old address.
#[test]
fn a_driver_that_was_closed_and_opened_again_works() {
    let place = tempfile::tempdir().unwrap();
    let program = without_driver(place.path());
    let bare = Run::bare(&program, &["elsewhere"]).finish();
    let hooked = Run::hooked(&program, &["elsewhere"]).env("GSHARE_QUOTA", "0.5").finish();
    assert_eq!(bare.stdout, "1\n0\n0\n");
    assert_same("elsewhere", &bare, &hooked);
}

#[test]
fn a_deepbind_library_works_as_without_the_hook() {
    let library = program("deepbind", &["-shared"]);
    let program = program("deep_user", &[]);
    let argument = [library.to_str().expect("a UTF-8 path")];
    let bare = Run::bare(&program, &argument).finish();
    let hooked = Run::hooked(&program, &argument).env("GSHARE_QUOTA", "0.5").finish();
    assert_eq!(bare.stdout, "1\n");
    assert_same("deepbind", &bare, &hooked);
}

#[test]
fn a_second_preload_library_finds_its_next_on_either_side() {
    let library = program("second", &["-shared"]);
    let program = program("launch", &[]);
    let bare = Run::bare(&program, &["kernel", "3"]).preload(&library, true).finish();
    assert!(bare.stdout.contains("second: call 1"), "{}", bare.stdout);
    for before in [true, false] {
        let hooked = Run::hooked(&program, &["kernel", "3"])
            .env("GSHARE_QUOTA", "0.9")
            .preload(&library, before)
            .finish();
        assert_same("second preload library", &bare, &hooked);
    }
}
