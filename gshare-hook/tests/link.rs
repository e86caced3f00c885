//! Daemons which die, hang, refuse, answer late or change their minds, and programs which cut the hook off from them.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration as StdDuration, Instant};

use crate::common::daemon::{Daemon, Manners};
use crate::common::{Done, Run, assert_same, program, side_by_side};
use gshare_core::wire::{RefusalCode, ToClient};
use gshare_core::{Bytes, Duration, Quota, QuotaRange, ResourceSpec};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

fn limited_to(bytes: Bytes) -> ResourceSpec {
    let spec = ResourceSpec::UNLIMITED;
    ResourceSpec::new(spec.quota(), spec.sm(), Some(bytes)).unwrap()
}

fn limited(percent: u16) -> ResourceSpec {
    let limit = Quota::from_percent(percent).unwrap();
    ResourceSpec::UNLIMITED.with_quota(QuotaRange::new(Quota::ZERO, limit).unwrap())
}

/// A hooked run with waits for a daemon, at a launch or an allocation, of at most a second.
fn impatient(program: &Path, arguments: &[&str]) -> Run {
    Run::hooked(program, arguments).env("GSHARE_DAEMON_WAIT", "1s")
}

/// Waits until the condition holds, at most ten seconds.
fn until(so: impl Fn() -> bool) {
    let end = Instant::now() + StdDuration::from_secs(10);
    while !so() && Instant::now() < end {
        std::thread::sleep(StdDuration::from_millis(5));
    }
}

/// A socket to which one can connect.
fn listener(socket: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    rustix::net::listen(&listener, 64).unwrap();
    listener
}

/// Duration of the failed launch, in ms.
fn failed_after(stdout: &str) -> Option<u64> {
    stdout.strip_prefix("802 after ")?.strip_suffix(" ms\n")?.parse().ok()
}

#[test]
fn launches_wait_for_a_daemon_that_died_as_long_as_the_environment_says() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_as(&place.path().join("g.sock"), Manners::default());
    let run = impatient(&program, &["works", "20000"])
        .env("GSHARE_SOCKET", &daemon.socket)
        .env("GSHARE_ON_DAEMON_LOSS", "closed");
    let done = std::thread::scope(|scope| {
        let run = scope.spawn(|| run.finish());
        until(|| daemon.told().returned > 0 || daemon.told().launches > 100);
        drop(daemon);
        run.join().unwrap()
    });
    let waited = failed_after(&done.stdout);
    assert!(waited.is_some_and(|ms| (900..4_000).contains(&ms)), "{}{}", done.stdout, done.stderr);
    assert_eq!(done.stderr, "");
}

#[test]
fn launches_wait_as_long_for_a_daemon_that_says_nothing() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("g.sock");
    let _listens = listener(&socket);
    let run = impatient(&program, &["works", "20000"]).env("GSHARE_SOCKET", &socket);
    let done = run.env("GSHARE_ON_DAEMON_LOSS", "closed").finish();
    let waited = failed_after(&done.stdout);
    // The wait began before the launch.
    assert!(waited.is_some_and(|ms| (400..4_000).contains(&ms)), "{}{}", done.stdout, done.stderr);
}

/// A daemon of an earlier release refuses in its own format; without this line the process would silently wait for another daemon.
#[test]
fn a_daemon_that_speaks_another_version_is_named_once_with_both_versions() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("g.sock");
    let (listener, ended) = (listener(&socket), AtomicBool::new(false));
    let (connections, done) = std::thread::scope(|scope| {
        let old = scope.spawn(|| {
            let mut connections = 0;
            while !ended.load(Ordering::Acquire) {
                if let Ok(client) = rustix::net::accept(&listener) {
                    connections += 1;
                    let _ = rustix::net::send(&client, &[3; 16], SendFlags::NOSIGNAL);
                }
                std::thread::sleep(StdDuration::from_millis(5));
            }
            connections
        });
        let run = impatient(&program, &["works", "300"]).env("GSHARE_SOCKET", &socket);
        let done = run.env("GSHARE_ON_DAEMON_LOSS", "closed").finish();
        ended.store(true, Ordering::Release);
        (old.join().unwrap(), done)
    });
    assert!(connections > 1, "{connections} connections");
    assert!(failed_after(&done.stdout).is_some(), "{}{}", done.stdout, done.stderr);
    let said = "speaks version 3, and this library version 4: upgrade the older one\n";
    assert_eq!(done.stderr.matches(said).count(), 1, "{}", done.stderr);
}

/// The daemon's sockets exist without an answer: a wait for a token would last for ever.
#[test]
fn a_daemon_that_is_stopped_is_as_good_as_gone() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let manners = Manners { stops_after: Some(5), ..Manners::default() };
    let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
    let run = || impatient(&program, &["works", "300"]).env("GSHARE_SOCKET", &daemon.socket);
    let open = run().finish();
    assert_eq!(open.code, Some(0), "{}{}", open.stdout, open.stderr);
    drop(daemon);
    let manners = Manners { stops_after: Some(5), ..Manners::default() };
    let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
    let run = impatient(&program, &["works", "300"]).env("GSHARE_SOCKET", &daemon.socket);
    let closed = run.env("GSHARE_ON_DAEMON_LOSS", "closed").finish();
    assert!(failed_after(&closed.stdout).is_some(), "{}{}", closed.stdout, closed.stderr);
}

#[test]
fn a_daemon_that_keeps_others_waiting_is_not() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let manners = Manners { keeps_waiting: StdDuration::from_millis(2_500), ..Manners::default() };
    let began = Instant::now();
    let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
    let done = impatient(&program, &["works", "100"]).env("GSHARE_SOCKET", &daemon.socket).finish();
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
    assert!(
        began.elapsed() >= StdDuration::from_millis(2_500),
        "it was not waited for: {:?}",
        began.elapsed()
    );
    let told = daemon.told();
    assert_eq!(told.attached.len(), 1, "and it was asked whether it is there: {told:?}");
    assert!(told.names.len() > 1, "{told:?}");
}

/// The first process of every container has number 1.
#[test]
fn processes_of_two_containers_are_not_taken_for_one() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_as(&place.path().join("g.sock"), Manners::default());
    let (path, flags) = (program.to_str().unwrap(), ["--user", "--map-root-user", "--pid", "--fork"]);
    let can = std::process::Command::new("unshare").args(flags).arg("true").status();
    if !can.is_ok_and(|status| status.success()) {
        println!("left out: no namespaces here");
        return;
    }
    let arguments: Vec<&str> = flags.into_iter().chain([path, "works", "1000"]).collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let run = Run::hooked(Path::new("unshare"), &arguments).env("GSHARE_SOCKET", &daemon.socket);
            scope.spawn(|| assert_eq!(run.finish().code, Some(0)));
        }
    });
    let told = daemon.told();
    assert_eq!(told.names.len(), 2, "{told:?}");
    assert!(told.names.iter().all(|name| name.starts_with("link-1@")), "{told:?}");
    assert!(told.names[0] != told.names[1] && told.runs[0] != told.runs[1], "{told:?}");
}

/// A daemon with this answer and a close, and with Hello unread; returns the number of the program's connections.
fn turned_away_at_the_door(answer: &ToClient, ms: &str) -> (Done, u32) {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("g.sock");
    let listens = listener(&socket);
    let (over, mut comes) = (AtomicBool::new(false), 0);
    let done = std::thread::scope(|scope| {
        let run = impatient(&program, &["works", ms]).env("GSHARE_SOCKET", &socket);
        let run = scope.spawn(|| {
            let done = run.finish();
            over.store(true, Ordering::Release);
            done
        });
        let mut frame = Vec::new();
        answer.encode(0, &mut frame);
        while !over.load(Ordering::Acquire) {
            if let Ok(peer) = rustix::net::accept(&listens) {
                let _ = rustix::net::send(&peer, &frame, SendFlags::NOSIGNAL);
                comes += 1;
            }
            std::thread::sleep(StdDuration::from_millis(1));
        }
        run.join().unwrap()
    });
    (done, comes)
}

/// The process sets no limits, so alone it would have the whole device.
#[test]
fn a_process_that_is_refused_launches_nothing() {
    for (code, waits) in [(RefusalCode::NotAllowed, false), (RefusalCode::DuplicateName, true)] {
        let (done, comes) =
            turned_away_at_the_door(&ToClient::Refused { code, text: "not you".to_owned() }, "20000");
        let waited = failed_after(&done.stdout);
        assert!(waited.is_some_and(|ms| (ms >= 400) == waits && ms < 4_000), "{}", done.stdout);
        let line =
            format!("gshare: the daemon refused this process: not you ({code:?}); its launches fail\n");
        assert_eq!(done.stderr, line);
        assert!(comes <= 10, "{comes} times");
        assert_eq!(done.truth[0].gpus.iter().map(|gpu| gpu.busy_ns).sum::<u64>(), 0, "{code:?}");
    }
}

/// If the operator lets strangers run, they keep to the daemon's limits.
#[test]
fn a_process_that_is_not_served_but_may_run_keeps_the_limits_that_the_daemon_names() {
    let answer = ToClient::Unserved {
        code: RefusalCode::NotAllowed,
        text: "not you".to_owned(),
        spec: Some(limited(10)),
    };
    let (done, comes) = turned_away_at_the_door(&answer, "1500");
    assert_eq!(done.stdout, "done\n");
    let line =
        "gshare: the daemon refused this process: not you (NotAllowed); it runs within its own limits\n";
    assert_eq!(done.stderr, line);
    assert!(comes <= 3, "{comes} times");
    let busy = done.truth[0].gpus[0].busy_ns;
    assert!((50_000_000..300_000_000).contains(&busy), "10 % of 1.5 s, not {busy} ns");
}

#[test]
fn a_device_that_is_refused_costs_the_others_nothing() {
    let program = program("devices", &[]);
    let bare = Run::bare(&program, &["two"]).env("GSHARE_SIM_PROFILE", "tiny").finish();
    for hangs_up in [false, true] {
        let place = tempfile::tempdir().unwrap();
        let manners = Manners { lacks: Some(0), hangs_up, ..Manners::default() };
        let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
        let run = Run::hooked(&program, &["two"]).env("GSHARE_SIM_PROFILE", "tiny");
        let run = run.env("GSHARE_QUOTA", "0.9").env("GSHARE_SOCKET", &daemon.socket);
        let served = run.finish();
        assert_same("refused", &bare, &served);
        assert_eq!(
            served.stderr,
            "gshare: the daemon refused device 0: no such device (UnknownDevice); it runs within its own limits\n"
        );
        let told = daemon.told();
        assert_eq!(told.names.len(), if hangs_up { 2 } else { 1 }, "{told:?}");
        assert_eq!(told.devices.len(), 2, "each once: {told:?}");
        assert!(told.used > 0, "{told:?}");
    }
}

/// Requests and returns between Attach and its answer are reported after the answer.
#[test]
fn memory_is_limited_and_accounted_for_while_a_daemon_thinks() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let (spec, attach_pause) = (limited_to(Bytes::from_mib(64)), StdDuration::from_secs(3));
    let daemon =
        Daemon::start_as(&place.path().join("g.sock"), Manners { spec, attach_pause, ..Manners::default() });
    let run = Run::hooked(&program, &["holds", "32", "2000", "300"]).env("GSHARE_SOCKET", &daemon.socket);
    let done = run.env("GSHARE_MEM", "64MiB").finish();
    assert_eq!((done.stdout.as_str(), done.code), ("free 64 of 64 MiB\n", Some(0)), "{}", done.stderr);
    let told = daemon.told();
    assert!((32 << 20..=64 << 20).contains(&told.memory_peak), "{told:?}");
    assert!(told.memory <= 8 << 20, "{told:?}");
}

/// Memory from the time without a daemon is reported with Attach; memory returned meanwhile, after the answer.
#[test]
fn memory_given_back_while_a_daemon_thinks_is_told_it() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("g.sock");
    let (spec, attach_pause) = (limited_to(Bytes::from_mib(64)), StdDuration::from_secs(2));
    let run = Run::hooked(&program, &["holds", "32", "2000", "2500"]).env("GSHARE_SOCKET", &socket);
    let run = run.env("GSHARE_MEM", "64MiB");
    let (done, told) = std::thread::scope(|scope| {
        let run = scope.spawn(|| run.finish());
        std::thread::sleep(StdDuration::from_millis(1000));
        let daemon = Daemon::start_as(&socket, Manners { spec, attach_pause, ..Manners::default() });
        (run.join().unwrap(), daemon.told())
    });
    assert_eq!((done.stdout.as_str(), done.code), ("free 64 of 64 MiB\n", Some(0)), "{}", done.stderr);
    assert_eq!(told.attached, [32 << 20], "{told:?}");
    assert!(told.memory <= 8 << 20, "{told:?}");
}

#[test]
fn another_limit_leaves_the_daemon_with_what_is_in_use() {
    let program = program("link", &[]);
    let changed = |first: Option<u64>, second| {
        let place = tempfile::tempdir().unwrap();
        let spec = first.map_or(ResourceSpec::UNLIMITED, |mib| limited_to(Bytes::from_mib(mib)));
        let daemon = Daemon::start_as(&place.path().join("g.sock"), Manners { spec, ..Manners::default() });
        let run = Run::hooked(&program, &["holds", "6", "2500", "300"]).env("GSHARE_SOCKET", &daemon.socket);
        let told = std::thread::scope(|scope| {
            let run = scope.spawn(|| run.finish());
            until(|| !daemon.told().attached.is_empty());
            std::thread::sleep(StdDuration::from_millis(1000));
            daemon.change(limited_to(Bytes::from_mib(second)));
            std::thread::sleep(StdDuration::from_millis(700));
            let told = daemon.told();
            let done = run.join().unwrap();
            assert_eq!((done.stdout, done.code), (format!("free {second} of {second} MiB\n"), Some(0)));
            told
        });
        let stated = if first.is_some() { told.memory } else { told.attached.iter().sum() };
        assert_eq!(stated, 6 << 20, "{told:?}");
    };
    std::thread::scope(|scope| {
        for (first, second) in [(Some(64), 32), (None, 64)] {
            scope.spawn(move || changed(first, second));
        }
    });
}

/// Its thread holds the lock needed by the helper to look a function up.
#[test]
fn a_library_may_work_on_the_device_while_it_is_loaded() {
    let (program, library) = (program("link", &[]), program("constructor", &["-shared"]));
    let library = library.to_str().unwrap();
    for arguments in [&["loads", library][..], &["loads", library, "later"]] {
        let bare = Run::bare(&program, arguments).finish();
        assert!(bare.stdout.ends_with("cuCtxSynchronize() = 0\nloaded\n"), "{}", bare.stdout);
        let alone = Run::hooked(&program, arguments).env("GSHARE_QUOTA", "0.5").finish();
        let place = tempfile::tempdir().unwrap();
        let daemon = Daemon::start_as(&place.path().join("g.sock"), Manners::default());
        let served = Run::hooked(&program, arguments).env("GSHARE_SOCKET", &daemon.socket).finish();
        for hooked in [alone, served] {
            assert_same("constructor", &bare, &hooked);
            assert_eq!(hooked.stderr, "");
        }
    }
}

#[test]
fn a_process_waits_for_a_daemon_that_was_named() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("g.sock");
    let run = Run::hooked(&program, &["works", "2500"]).env("GSHARE_SOCKET", &socket);
    let (done, told) = std::thread::scope(|scope| {
        let run = scope.spawn(|| run.finish());
        std::thread::sleep(StdDuration::from_millis(1000));
        let daemon = Daemon::start_as(&socket, Manners::default());
        (run.join().unwrap(), daemon.told())
    });
    assert_eq!((done.stdout.as_str(), done.stderr.as_str()), ("done\n", ""));
    assert!(told.used > 100_000_000, "{told:?}");
}

/// Other processes of the run may hold the limit. A process without a run has the limit for itself.
#[test]
fn memory_of_a_run_is_refused_in_words_when_no_daemon_has_come() {
    let program = program("link", &[]);
    let run = || impatient(&program, &["holds", "32", "0", "0"]).env("GSHARE_MEM", "64MiB");
    let began = Instant::now();
    let done = run().env("GSHARE_RUN", "7").finish();
    let waited = began.elapsed();
    assert_eq!((done.code, done.stdout.ends_with("failed: 2\n")), (Some(1), true), "{}", done.stdout);
    assert!(waited >= StdDuration::from_millis(900), "{waited:?}");
    let told = "gshare: out of memory: the processes of this run share a limit of 64 MiB, and no daemon has said within 1s";
    assert!(done.stderr.starts_with(told) && done.stderr.lines().count() == 1, "{}", done.stderr);
    let done = run().finish();
    assert_eq!((done.stdout.as_str(), done.stderr.as_str()), ("free 64 of 64 MiB\n", ""));
}

#[test]
fn files_of_a_program_that_closed_the_hooks_descriptors_are_its_own() {
    let program = program("link", &[]);
    let bare = Run::bare(&program, &["closes"]).finish();
    assert!(bare.stdout.ends_with("0 files used, 0\n"), "{}", bare.stdout);
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_as(&place.path().join("g.sock"), Manners::default());
    let served = Run::hooked(&program, &["closes"]).env("GSHARE_SOCKET", &daemon.socket).finish();
    assert_same("closes", &bare, &served);
    assert_eq!(served.stderr, "");
}

/// The program closes all descriptors, as `closefrom` does in a daemon or a shell. Regression: it then had the whole device.
#[test]
fn a_program_that_closed_the_hooks_descriptors_is_metered_as_before() {
    let program = program("link", &[]);
    let kinds = ["closes_and_works", "3000"];
    let alone = Run::hooked(&program, &kinds).env("GSHARE_QUOTA", "0.2");
    let place = tempfile::tempdir().unwrap();
    // Each client gets a token of 4 ms once in 20 ms.
    let manners = Manners {
        token: Duration::from_millis(4),
        every: StdDuration::from_millis(20),
        ..Manners::default()
    };
    let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
    let served = Run::hooked(&program, &kinds).env("GSHARE_SOCKET", &daemon.socket);
    let (alone, served) = side_by_side(alone, served);
    let told = daemon.told();
    assert_eq!(told.names.len(), 2, "it connected again: {told:?}");
    for done in [alone, served] {
        assert_eq!((done.stdout.as_str(), done.stderr.as_str()), ("done\n", ""));
        let busy = done.truth[0].gpus[0].busy_ns;
        assert!((200_000_000..800_000_000).contains(&busy), "20 % of 3 s, not {busy} ns");
    }
}

/// The daemon revokes the token while the kernel runs, and the process ends right after the kernel. The next process of the name pays for
/// the use beyond the token.
#[test]
fn what_a_process_used_beyond_its_token_is_reported_before_it_ends() {
    let program = program("link", &[]);
    let used = std::thread::scope(|scope| {
        let one = || {
            let place = tempfile::tempdir().unwrap();
            let revokes_after = Some(Duration::from_millis(20));
            let manners = Manners { spec: limited(20), revokes_after, ..Manners::default() };
            let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
            let done =
                Run::hooked(&program, &["once", "spin_400ms"]).env("GSHARE_SOCKET", &daemon.socket).finish();
            assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
            (daemon.told_in_all().used, done.truth[0].gpus[0].busy_ns)
        };
        // A few at a time: at its end a process waits 200 ms at most for its helper thread, and this thread may have to wait for a CPU.
        let few = || -> Vec<_> { (0..5).map(|_| scope.spawn(one)).collect() };
        (0..6)
            .flat_map(|_| few().into_iter().map(|run| run.join().unwrap()).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    });
    let short = used.iter().filter(|(told, busy)| *told < busy * 9 / 10).count();
    assert_eq!(short, 0, "of what was told and done: {used:?}");
}

#[test]
fn a_process_that_was_stopped_still_gets_its_memory() {
    let program = program("link", &[]);
    let place = tempfile::tempdir().unwrap();
    let (spec, memory_pause) = (limited_to(Bytes::from_mib(64)), StdDuration::from_millis(2_500));
    let daemon =
        Daemon::start_as(&place.path().join("g.sock"), Manners { spec, memory_pause, ..Manners::default() });
    let run = impatient(&program, &["stopped"]).env("GSHARE_SOCKET", &daemon.socket);
    let done = run.finish();
    assert_eq!(
        done.stdout, "cuCtxSynchronize() = 0\ncuMemAlloc_v2(&memory, 1 << 20) = 0\n",
        "{}",
        done.stderr
    );
}

#[test]
fn a_program_with_much_thread_local_storage_is_metered() {
    let program = program("storage", &[]);
    let began = Instant::now();
    let done = Run::hooked(&program, &[]).env("GSHARE_QUOTA", "0.2").finish();
    assert_eq!((done.stdout.as_str(), done.code), ("cuCtxSynchronize() = 0\n", Some(0)), "{}", done.stderr);
    assert!(began.elapsed() > StdDuration::from_millis(1500), "400 ms at 20 %: {:?}", began.elapsed());
}
