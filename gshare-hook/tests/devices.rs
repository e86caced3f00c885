//! Several devices, other processes' memory, green contexts, all views of a limit, and the policies for a lost daemon.

use crate::common::daemon::{Daemon, Told};
use crate::common::{Done, Run, assert_same, built, program};
use gshare_core::{Bytes, Duration, ResourceSpec};

fn limited_to(bytes: Bytes) -> ResourceSpec {
    let spec = ResourceSpec::UNLIMITED;
    ResourceSpec::new(spec.quota(), spec.sm(), Some(bytes)).unwrap()
}

#[test]
fn each_device_has_its_own_account_whichever_is_current() {
    let program = program("devices", &[]);
    for kind in ["two", "green", "green_second"] {
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
        // One attachment per device in use, with the work of both reported.
        let (told, devices) = (daemon.told(), if kind == "green" { 1 } else { 2 });
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
fn a_green_context_that_is_current_is_measured_and_may_go() {
    let program = program("devices", &[]);
    let bare = Run::bare(&program, &["green_current"]).finish();
    let place = tempfile::tempdir().unwrap();
    let daemon =
        Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
    let served = Run::hooked(&program, &["green_current"]).env("GSHARE_SOCKET", &daemon.socket).finish();
    assert_same("green_current", &bare, &served);
    let (used, truth) = (daemon.told().used, served.truth[0].gpus[0].busy_ns);
    assert!(used >= truth * 9 / 10 && used <= truth * 11 / 10, "used {used}, device {truth}");
}

/// The second line of `mig`.
fn uuid(run: &Done) -> &str {
    run.stdout.lines().nth(1).unwrap_or_else(|| panic!("{}{}", run.stdout, run.stderr))
}

#[test]
fn each_mig_device_is_a_device_of_its_own() {
    let program = program("devices", &[]);
    let place = tempfile::tempdir().unwrap();
    let device = place.path().join("shared");
    let cut = |run: Run| {
        run.env("GSHARE_SIM_PROFILE", "a100")
            .env("GSHARE_SIM_MIG", "3g.40gb,1g.10gb")
            .env("GSHARE_SIM_DEVICE", &device)
    };
    // Without a list a process sees only the first slice, with a list the first slice named.
    let first = cut(Run::bare(&program, &["mig"])).finish();
    let told = first.stdout.lines().next().unwrap_or_default();
    assert_eq!(
        told, "1 device: NVIDIA A100-SXM4-80GB MIG 3g.40gb (simulated), 40192 MiB",
        "{}",
        first.stderr
    );
    let listed = cut(Run::bare(&program, &["mig_list"])).finish().stdout;
    let listed: Vec<&str> = listed.lines().collect();
    assert_eq!((listed.len(), listed[0]), (2, uuid(&first)));
    let two = cut(Run::bare(&program, &["mig"]))
        .env("CUDA_VISIBLE_DEVICES", format!("{},{}", listed[1], listed[0]))
        .finish();
    assert_eq!(uuid(&two), listed[1]);
    assert!(two.stdout.contains("MIG 1g.10gb (simulated), 9856 MiB\n"), "{}{}", two.stdout, two.stderr);
    assert!(two.stdout.contains("nvml: 9856 MiB of the slice, 81155 MiB of the GPU\n"), "{}", two.stdout);

    let daemon = Daemon::start(
        &place.path().join("g.sock"),
        limited_to(Bytes::from_mib(256)),
        Duration::from_millis(10),
    );
    let served = |uuid: &str| {
        let run = cut(Run::hooked(&program, &["mig"])).env("CUDA_VISIBLE_DEVICES", uuid);
        run.env("GSHARE_SOCKET", &daemon.socket).finish()
    };
    for bare in [&first, &two] {
        let hooked = served(uuid(bare));
        assert_eq!(hooked.code, Some(0), "{}", hooked.stderr);
        assert_eq!(uuid(&hooked), uuid(bare));
        // The limit is on the slice; the GPU has none.
        assert!(hooked.stdout.contains("256 MiB\n"), "{}", hooked.stdout);
        assert!(
            hooked.stdout.contains("nvml: 256 MiB of the slice, 81155 MiB of the GPU\n"),
            "{}",
            hooked.stdout
        );
    }
    let told: Vec<String> = daemon.told().devices.iter().map(|uuid| format!("{uuid:x?}")).collect();
    assert!(told.len() == 2 && told[0] != told[1], "one device a slice: {told:?}");
    assert!(told.iter().all(|uuid| uuid.starts_with("MIG-")), "{told:?}");
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
fn under_a_limit_nvml_tells_how_busy_ones_own_processes_are_and_nobody_elses() {
    let program = program("devices", &[]);
    let bare = Run::bare(&program, &["utilisation"]).finish();
    let told = |mine: usize, others: usize, run: &Done| {
        let count = |line: &str| run.stdout.lines().filter(|found| *found == line).count();
        for view in ["sample", "rate"] {
            let found = [1, 0].map(|own| count(&format!("{view}: mine {own} busy 1")));
            assert_eq!(found, [mine, others], "{view}: {}{}", run.stdout, run.stderr);
        }
        assert!(run.stdout.ends_with("later: 6\n"), "{}", run.stdout);
    };
    told(1, 1, &bare);
    told(1, 0, &Run::hooked(&program, &["utilisation"]).env("GSHARE_MEM", "256MiB").finish());
    // Without a limit the hook leaves NVML's answers alone.
    told(1, 1, &Run::hooked(&program, &["utilisation"]).finish());
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
        .env("GSHARE_DAEMON_WAIT", "1s")
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

/// A client which asks only after its kernel has nothing to run until the answer, and loses its turn.
#[test]
fn a_program_that_waits_for_a_long_kernel_asks_for_the_next_token_meanwhile() {
    let program = program("devices", &[]);
    let place = tempfile::tempdir().unwrap();
    let daemon =
        Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
    let run = Run::hooked(&program, &["waits"]).env("GSHARE_SOCKET", &daemon.socket).finish();
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let told = daemon.told();
    assert!(told.used >= 590_000_000, "{told:?}");
    // One or two tokens, against 19 if a waiting client counts as idle.
    assert!(told.empty_handed <= 10, "{} of 20 tokens: {told:?}", told.empty_handed);
}

const SLACK: Duration = Duration::from_millis(10);

/// Runs two programs side by side, each with `count` kernels, and returns the daemon's record. Tokens go in turns, and expire `slack` after
/// their GPU time.
fn in_turns(token: Duration, slack: Duration, kernel: &str, count: &str) -> Told {
    let program = program("devices", &[]);
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in_turns(&place.path().join("g.sock"), token, slack);
    let run = || Run::hooked(&program, &["queues", kernel, count]).env("GSHARE_SOCKET", &daemon.socket);
    let first = run();
    let second = run().env("GSHARE_SIM_DEVICE", first.device());
    std::thread::scope(|scope| {
        for run in [first, second].map(|run| scope.spawn(|| run.finish())) {
            let run = run.join().unwrap();
            assert_eq!(run.code, Some(0), "{}", run.stderr);
        }
    });
    let told = daemon.told();
    assert_eq!(told.twice, 0, "an extension that comes too late opens nothing");
    told
}

/// One thread spends credit while another decides on the lease: spent credit must also be seen as queued work.
#[test]
fn a_token_is_held_while_its_kernel_runs() {
    // One kernel to a token, and no token that expires: an expired one is returned with its kernel still running, and the
    // rest of the kernel is charged to the next token.
    let turns = in_turns(Duration::from_millis(5), Duration::from_secs(60), "spin_8ms", "200").turns;
    // Of 400 kernels. A process that is kept from its CPU can measure one as shorter than it is, and launch two.
    assert!(turns.len() >= 200, "{} turns", turns.len());
    for (turn, &(held, used)) in turns.iter().enumerate() {
        // Half a millisecond before its end. Once a few of 400 tokens were returned 5 ms early.
        assert!(used < held + 2_000_000, "turn {turn}: used {used} ns, held {held} ns");
    }
    // The first four tokens of a program end before they are handed over. One program may begin earlier, so these are surely among its
    // first.
    assert!(
        turns[..4].iter().all(|&(held, _)| held >= 8_000_000),
        "these were to be over: {:?}",
        &turns[..4]
    );
}

/// Its token expires during the kernel, and its return reports the whole kernel.
#[test]
fn a_kernel_of_which_nothing_was_known_is_charged_to_its_token() {
    let turns = in_turns(Duration::from_millis(5), SLACK, "spin_30ms", "3").turns;
    assert!(turns[..2].iter().all(|&(_, used)| used >= 29_000_000), "{turns:?}");
}

#[test]
fn what_two_programs_use_in_turns_is_what_the_device_did() {
    let told = in_turns(Duration::from_millis(3), SLACK, "spin_10us", "80000");
    // 1.6 s.
    assert!((1_550_000_000..=1_650_000_000).contains(&told.used), "{told:?}");
}

/// The loader's own option hooks one program as a line in `/etc/ld.so.preload` hooks all, without root.
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
    // A file beside the library holds in an empty environment, and has precedence over the other file.
    let place = tempfile::tempdir().unwrap();
    let copy = place.path().join("libgshare_hook.so");
    std::fs::copy(&built().hook, &copy).unwrap();
    std::fs::write(place.path().join("share.env"), "# of the container\nGSHARE_MEM=32MiB\n").unwrap();
    let mut told = arguments;
    told[1] = copy.to_str().expect("a UTF-8 path");
    for run in [Run::bare(loader, &told), Run::bare(loader, &told).env("GSHARE_MEM", "64MiB")] {
        let nobody = run.device().with_file_name("nobody.sock");
        let kept = run.env("GSHARE_SOCKET", nobody).finish();
        let expected = "took 32 MiB; then free 32 total 32 device 32\n".repeat(2);
        assert_eq!(kept.stdout, expected, "{}", kept.stderr);
    }
    // The kill switch works there too; and programs without CUDA never notice.
    let off = run().env("GSHARE_MEM", "64MiB").env("GSHARE_DISABLE", "1").finish();
    assert_same("switched off", &Run::bare(&program, &["1"]).finish(), &off);
    let other =
        Run::bare(loader, &["--preload", arguments[1], "/bin/echo", "hello"]).env("GSHARE_MEM", "1").finish();
    assert_eq!((other.stdout.as_str(), other.stderr.as_str(), other.code), ("hello\n", "", Some(0)));
}
