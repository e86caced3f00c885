//! Several devices, other processes' memory, green contexts, all views of a limit, and the policies for a lost daemon.

mod common;

use common::daemon::Daemon;
use common::{Run, assert_same, built, program};
use gshare_core::{Bytes, Duration, ResourceSpec};

fn limited_to(bytes: Bytes) -> ResourceSpec {
    let spec = ResourceSpec::UNLIMITED;
    ResourceSpec::new(spec.quota(), spec.sm(), Some(bytes)).unwrap()
}

#[test]
fn each_device_has_its_own_account_whichever_is_current() {
    let program = program("devices", &[]);
    for kind in ["two", "green"] {
        let bare = Run::bare(&program, &[kind]).env("GSHARE_SIM_PROFILE", "tiny").finish();
        assert_eq!(bare.code, Some(0), "{kind}: {}", bare.stdout);
        let hooked = Run::hooked(&program, &[kind])
            .env("GSHARE_SIM_PROFILE", "tiny")
            .env("GSHARE_MEM", "512MiB")
            .env("GSHARE_QUOTA", "0.9")
            .finish();
        assert_same(kind, &bare, &hooked);
        let place = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
        let served = Run::hooked(&program, &[kind])
            .env("GSHARE_SIM_PROFILE", "tiny")
            .env("GSHARE_SOCKET", &daemon.socket)
            .finish();
        assert_same(kind, &bare, &served);
        // One attachment per device that is used, and the work of both is told.
        let (told, devices) = (daemon.told(), if kind == "two" { 2 } else { 1 });
        assert_eq!(told.attached.len(), devices, "{told:?}");
    }
}

#[test]
fn a_device_named_by_uuid_is_metered_as_itself() {
    let program = program("devices", &[]);
    let place = tempfile::tempdir().unwrap();
    // All on one device file: the UUIDs are the file's.
    let device = place.path().join("shared");
    let on = |run: Run| run.env("GSHARE_SIM_PROFILE", "tiny").env("GSHARE_SIM_DEVICE", &device);
    let second = on(Run::bare(&program, &["uuid_of_second"])).finish().stdout;
    let bare = on(Run::bare(&program, &["by_uuid"])).env("CUDA_VISIBLE_DEVICES", second.trim()).finish();
    assert!(bare.stdout.ends_with("1 device\n"), "{}", bare.stdout);
    let hooked = on(Run::hooked(&program, &["by_uuid"]))
        .env("CUDA_VISIBLE_DEVICES", second.trim())
        .env("GSHARE_QUOTA", "0.9")
        .env("GSHARE_MEM", "512MiB")
        .finish();
    assert_same("by_uuid", &bare, &hooked);
}

#[test]
fn memory_that_another_process_shares_is_charged_to_its_owner_alone() {
    let program = program("devices", &[]);
    let bare = Run::bare(&program, &["ipc"]).finish();
    assert_eq!(bare.stdout, "open: 0\nown: 0\nfree, close: 0 0\nparent frees: 0\n");
    let hooked = Run::hooked(&program, &["ipc"]).env("GSHARE_MEM", "96MiB").finish();
    assert_same("ipc", &bare, &hooked);
}

#[test]
fn the_driver_nvml_and_its_list_of_processes_tell_the_same() {
    let program = program("devices", &[]);
    let expected = "driver: total 256 256 used 64\nnvml: total 256 256 used 64 64\nlist: 7, 1\nprocess: mine 1 used 64\n";
    let alone = Run::hooked(&program, &["views"]).env("GSHARE_MEM", "256MiB").finish();
    assert_eq!(alone.stdout, expected, "{}", alone.stderr);
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(
        &place.path().join("g.sock"),
        limited_to(Bytes::from_mib(256)),
        Duration::from_millis(10),
    );
    let served = Run::hooked(&program, &["views"]).env("GSHARE_SOCKET", &daemon.socket).finish();
    assert_eq!(served.stdout, expected, "{}", served.stderr);
    // With the hook switched off everything is physical.
    let bare = Run::bare(&program, &["views"]).finish();
    let off =
        Run::hooked(&program, &["views"]).env("GSHARE_MEM", "256MiB").env("GSHARE_DISABLE", "1").finish();
    assert_same("switched off", &bare, &off);
    assert_ne!(bare.stdout, expected);
}

#[test]
fn a_process_that_has_lost_its_daemon_goes_on_or_fails_as_it_was_told() {
    let program = program("devices", &[]);
    let bare = Run::bare(&program, &["launches"]).finish();
    let open = Run::hooked(&program, &["launches"]).env("GSHARE_QUOTA", "0.9").finish();
    assert_same("open", &bare, &open);
    let closed = Run::hooked(&program, &["launches"])
        .env("GSHARE_QUOTA", "0.9")
        .env("GSHARE_ON_DAEMON_LOSS", "closed")
        .finish();
    assert_eq!(
        closed.code,
        Some(0),
        "the program decides what to do about a failed launch: {}",
        closed.stderr
    );
    assert!(!closed.stdout.contains("0, 0) = 0"), "every launch fails: {}", closed.stdout);
    assert!(closed.stdout.ends_with("cuCtxSynchronize() = 0\n"), "{}", closed.stdout);
}

/// What a line in `/etc/ld.so.preload` does for every program, the loader's own option does for one, without root.
#[test]
fn the_loader_preloads_it_without_the_environment() {
    let program = program("limit", &[]);
    let loader = std::path::Path::new("/lib64/ld-linux-x86-64.so.2");
    let arguments = [
        "--preload",
        built().hook.to_str().expect("a UTF-8 path"),
        program.to_str().expect("a UTF-8 path"),
        "1",
    ];
    let run = || {
        let run = Run::bare(loader, &arguments);
        let nobody = run.device().with_file_name("nobody.sock");
        run.env("GSHARE_SOCKET", nobody)
    };
    let limited = run().env("GSHARE_MEM", "64MiB").finish();
    assert_eq!(
        limited.stdout,
        "took 64 MiB; then free 64 total 64 device 64\n".repeat(2),
        "{}",
        limited.stderr
    );
    // The kill switch works there too; and programs without CUDA never notice.
    let off = run().env("GSHARE_MEM", "64MiB").env("GSHARE_DISABLE", "1").finish();
    assert_same("switched off", &Run::bare(&program, &["1"]).finish(), &off);
    let other =
        Run::bare(loader, &["--preload", arguments[1], "/bin/echo", "hello"]).env("GSHARE_MEM", "1").finish();
    assert_eq!((other.stdout.as_str(), other.stderr.as_str(), other.code), ("hello\n", "", Some(0)));
}
