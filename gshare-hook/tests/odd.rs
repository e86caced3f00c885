//! Programs that are within their rights and that a meter easily hangs, loses or stops to measure.

mod common;

use common::daemon::Daemon;
use common::{Run, assert_same, program};
use gshare_core::{Duration, ResourceSpec};

/// What waits fills the bound on work in flight; what it waits for has yet to be launched.
#[test]
fn work_that_waits_for_a_later_launch_does_not_wait_for_ever() {
    let program = program("odd", &[]);
    for kind in ["waits_for_word", "waits_on_host"] {
        let bare = Run::bare(&program, &[kind]).finish();
        assert_eq!(bare.code, Some(0), "{kind}: {} {}", bare.stdout, bare.stderr);
        let alone = Run::hooked(&program, &[kind]).env("GSHARE_QUOTA", "0.9").finish();
        assert_same(kind, &bare, &alone);
        let place = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
        let served = Run::hooked(&program, &[kind]).env("GSHARE_SOCKET", &daemon.socket).finish();
        assert_same(kind, &bare, &served);
        let (used, truth) = (daemon.told().used_ns(), served.truth[0].gpus[0].busy_ns);
        assert!(used >= truth / 2 && used <= truth * 2, "{kind}: used {used}, device {truth}");
    }
}

/// A default stream is another one under another context, and events of one context are no good in another.
#[test]
fn contexts_that_take_turns_in_a_thread_are_measured() {
    let program = program("odd", &[]);
    for how in ["set", "push", "devices"] {
        let run = |run: Run| run.env("GSHARE_SIM_PROFILE", "tiny").finish();
        let bare = run(Run::bare(&program, &["turns", how]));
        assert_eq!(bare.code, Some(0), "{how}: {} {}", bare.stdout, bare.stderr);
        let place = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::start(&place.path().join("g.sock"), ResourceSpec::UNLIMITED, Duration::from_millis(10));
        let served = run(Run::hooked(&program, &["turns", how]).env("GSHARE_SOCKET", &daemon.socket));
        assert_same(how, &bare, &served);
        let truth: u64 = served.truth[0].gpus.iter().map(|gpu| gpu.busy_ns).sum();
        let used = daemon.told().used_ns();
        // Measured no more once the pool was used up by events that belong together with none: less than half of it.
        assert!(used >= truth * 9 / 10 && used <= truth * 11 / 10, "{how}: used {used}, device {truth}");
    }
}

/// By the clock its helper thread had been silent for as long as it was stopped, and was taken for gone: no limit from then on.
#[test]
fn a_process_that_was_stopped_is_metered_when_it_goes_on() {
    let program = program("odd", &[]);
    let done = Run::hooked(&program, &["stopped"]).env("GSHARE_QUOTA", "0.05").finish();
    assert_eq!((done.stdout.as_str(), done.stderr.as_str(), done.code), ("goes on\n", "", Some(0)));
    let busy = done.truth[0].gpus[0].busy_ns;
    assert!(busy < 400_000_000, "5 % of some seconds, not {busy} ns");
}

#[test]
fn physical_memory_counts_before_there_is_a_context() {
    let program = program("odd", &[]);
    let done = Run::hooked(&program, &["physical_first"]).env("GSHARE_MEM", "256MiB").finish();
    let expected = "4 of 64 MiB\nfree 0 of 256 MiB\nfree 256 of 256 MiB\n";
    assert_eq!((done.stdout.as_str(), done.code), (expected, Some(0)), "{}", done.stderr);
}
