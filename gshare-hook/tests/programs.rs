//! One small C program per behaviour, run bare and under the hook on a simulated device: both print the same, and the hook's account agrees
//! with the device's work.

use crate::common::daemon::Daemon;
use crate::common::{Run, assert_same, program, side_by_side};
use gshare_core::{Bytes, Duration, ResourceSpec};

const LAUNCHES: [&str; 19] = [
    "kernel",
    "default_stream",
    "kernel_ptsz",
    "per_thread_handle",
    "ex",
    "ex_ptsz",
    "cooperative",
    "cooperative_ptsz",
    "multi_device",
    "graph",
    "graph_ptsz",
    "captured",
    "old",
    "old_grid",
    "old_grid_async",
    "streams",
    "memcpy",
    "memset",
    "refused",
];

#[test]
fn every_kind_of_launch_is_transparent_and_metered() {
    let program = program("launch", &[]);
    for kind in LAUNCHES.into_iter().chain(["sync_each", "sync_longer", "sync_turns"]) {
        let bare = Run::bare(&program, &[kind]);
        let place = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
        let hooked = Run::hooked(&program, &[kind]).env("GSHARE_SOCKET", &daemon.socket);
        let (bare, hooked) = side_by_side(bare, hooked);
        assert_eq!(bare.code, Some(0), "{kind}: {} {}", bare.stdout, bare.stderr);
        assert_same(kind, &bare, &hooked);
        let (told, truth) = (daemon.told(), &hooked.truth[0].gpus[0]);
        // Copies on the device count as its work like kernels do.
        let worked = truth.busy_ns.max(truth.copy_ns);
        let used = told.used;
        println!("{kind}: used {used} ns, device {worked} ns, {} returns", told.returned);
        // The benchmarks measure how exact the meter is; here it must only have seen the work, and invented none.
        if kind.starts_with("mem") {
            // The simulated device moves the bytes on the host, within the call, in a hundred times the time.
            assert!(used > 0, "{kind}");
            continue;
        }
        assert!(used >= worked / 2, "{kind}: used {used}, device {worked}");
        assert!(used <= worked * 2 + 1_000_000, "{kind}: used {used}, device {worked}");
    }
}

const ALLOCATIONS: [&str; 17] = [
    "plain",
    "pitch",
    "managed",
    "host",
    "async",
    "async_plain_free",
    "pool",
    "physical",
    "exported",
    "array",
    "array3d",
    "mipmap",
    "graph",
    "context_takes_it_along",
    "detached_context_takes_it_along",
    "reset_takes_it_along",
    "many",
];

#[test]
fn every_kind_of_memory_is_transparent_and_counted_to_the_byte() {
    let program = program("alloc", &[]);
    for kind in ALLOCATIONS {
        // The program prints its memory by cuMemGetInfo: the device's figure in the bare run, the rest of the limit in the hooked run.
        let bare = Run::bare(&program, &[kind]).finish();
        let hooked = Run::hooked(&program, &[kind]).env("GSHARE_MEM", "1GiB").finish();
        assert_same(kind, &bare, &hooked);
        let place = tempfile::tempdir().unwrap();
        let spec = ResourceSpec::UNLIMITED;
        let spec = ResourceSpec::new(spec.quota(), spec.sm(), Some(Bytes::from_gib(1))).unwrap();
        let daemon = Daemon::start(&place.path().join("g.sock"), spec, Duration::from_millis(10));
        let hooked = Run::hooked(&program, &[kind]).env("GSHARE_SOCKET", &daemon.socket).finish();
        assert_same(kind, &bare, &hooked);
    }
}

#[test]
fn a_memory_limit_is_out_of_memory_and_every_view_agrees() {
    let program = program("limit", &[]);
    let place = tempfile::tempdir().unwrap();
    let spec = ResourceSpec::UNLIMITED;
    let spec = ResourceSpec::new(spec.quota(), spec.sm(), Some(Bytes::from_mib(256))).unwrap();
    let expected = "took 256 MiB; then free 256 total 256 device 256\n".repeat(2);
    for threads in ["1", "8"] {
        let alone = Run::hooked(&program, &[threads]).env("GSHARE_MEM", "256MiB").finish();
        assert_eq!(alone.stdout, expected, "{threads} threads, no daemon; {}", alone.stderr);
        let daemon = Daemon::start(&place.path().join("g.sock"), spec, Duration::from_millis(10));
        let served = Run::hooked(&program, &[threads])
            .env("GSHARE_SOCKET", &daemon.socket)
            .env("GSHARE_MEM", "256MiB")
            .finish();
        assert_eq!(served.stdout, expected, "{threads} threads, with a daemon; {}", served.stderr);
        let told = daemon.told();
        assert!(told.memory_peak <= 256 << 20, "{told:?}");
        assert!(told.memory_requests < 200, "small allocations draw on leased chunks: {told:?}");
    }
}

#[test]
fn processes_and_threads_come_and_go() {
    let program = program("process", &[]);
    for kind in
        ["fork_before", "fork_after", "double_fork", "vfork", "exec", "threads", "exit_in_thread", "signals"]
    {
        let bare = Run::bare(&program, &[kind]).finish();
        let hooked = Run::hooked(&program, &[kind]).env("GSHARE_QUOTA", "0.9").finish();
        assert_same(kind, &bare, &hooked);
        let place = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
        let served = Run::hooked(&program, &[kind]).env("GSHARE_SOCKET", &daemon.socket).finish();
        assert_same(kind, &bare, &served);
    }
}

#[test]
fn sixty_four_processes_at_once_are_served_and_leave_nothing() {
    let (launches, holds) = (program("launch", &[]), program("alloc", &[]));
    let place = tempfile::tempdir().unwrap();
    let daemon =
        Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
    let run = |program, kind| {
        Run::hooked(program, &[kind])
            .env("GSHARE_SOCKET", &daemon.socket)
            .env("GSHARE_SIM_DEVICE", place.path().join("device"))
            .finish()
    };
    std::thread::scope(|scope| {
        let visit = |number| {
            let (program, kind) = if number % 2 == 0 { (&launches, "kernel") } else { (&holds, "plain") };
            scope.spawn(move || (kind, run(program, kind)))
        };
        let visits: Vec<_> = (0..64).map(visit).collect();
        for visit in visits {
            let (kind, done) = visit.join().unwrap();
            assert_eq!(done.code, Some(0), "{kind}: {} {}", done.stdout, done.stderr);
        }
    });
    let told = daemon.told();
    assert_eq!((told.attached.len(), told.memory), (64, 0), "{told:?}");
}

#[test]
fn a_switched_off_hook_does_nothing() {
    let program = program("launch", &[]);
    let bare = Run::bare(&program, &["kernel", "5"]).finish();
    let off =
        Run::hooked(&program, &["kernel", "5"]).env("GSHARE_DISABLE", "1").env("GSHARE_MEM", "1").finish();
    assert_same("GSHARE_DISABLE", &bare, &off);
    let idle = Run::hooked(&program, &["kernel", "5"]).finish();
    assert_same("no limit and no daemon", &bare, &idle);
    assert_eq!(idle.stderr, "");
}
