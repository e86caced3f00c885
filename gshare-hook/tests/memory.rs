//! Memory with a size or an owner other than the call's.

use std::path::{Path, PathBuf};

use crate::common::daemon::Daemon;
use crate::common::{Run, assert_same, program};
use gshare_core::{Bytes, Duration, ResourceSpec};

/// The program exports its functions to its other half, `between.c`.
fn memory() -> PathBuf {
    program("memory", &["-rdynamic"])
}

/// Runs a kind of `memory.c` under a limit of 256 MiB.
fn run(kind: &str, to_run: Run) -> String {
    let done = to_run.env("GSHARE_SIM_PROFILE", "tiny").env("GSHARE_MEM", "256MiB").finish();
    assert_eq!(done.code, Some(0), "{kind}: {}{}", done.stdout, done.stderr);
    done.stdout
}

/// Runs the kind alone and with a daemon.
fn limited(kind: &str) -> String {
    let alone = run(kind, Run::hooked(&memory(), &[kind]));
    let place = tempfile::tempdir().unwrap();
    let spec = ResourceSpec::UNLIMITED;
    let spec = ResourceSpec::new(spec.quota(), spec.sm(), Some(Bytes::from_mib(256))).unwrap();
    let daemon = Daemon::start(&place.path().join("g.sock"), spec, Duration::from_millis(10));
    let served = run(kind, Run::hooked(&memory(), &[kind]).env("GSHARE_SOCKET", &daemon.socket));
    assert_eq!(served, alone, "{kind}: with a daemon (left) and without");
    let requests = daemon.told().memory_requests;
    assert!(kind == "pool_threads" || requests < 60, "{kind}: the daemon was asked {requests} times");
    alone
}

/// Runs kinds of `memory.c` bare and hooked, with two devices.
fn same(kinds: &[&str], behind: Option<&Path>) {
    let program = memory();
    for kind in kinds {
        let run = |run: Run| run.env("GSHARE_SIM_PROFILE", "tiny").finish();
        let bare = run(Run::bare(&program, &[kind]));
        assert_eq!(bare.code, Some(0), "{kind}: {} {}", bare.stdout, bare.stderr);
        let mut hooked = Run::hooked(&program, &[kind]).env("GSHARE_MEM", "512MiB");
        if let Some(library) = behind {
            hooked = hooked.preload(library, false);
        }
        assert_same(kind, &bare, &run(hooked));
    }
}

/// Runs a kind of `memory.c` with a driver that calls back in the middle of a call.
fn interrupted(kind: &str) -> String {
    let between = program("between", &["-shared"]);
    run(kind, Run::hooked(&memory(), &[kind]).preload(&between, false))
}

/// Regression: memory kept by a pool counted as room, so the pool grew beyond the limit without a charge.
#[test]
fn a_pool_does_not_grow_beyond_the_limit_because_it_keeps_what_it_cannot_use() {
    let told = "start: 0 bytes taken\nreserved 192 MiB\n64 MiB: 0\n48 MiB: 2\naddress: 0\nreserved 256 MiB\n20 MiB: 0\n\
        held: 268435456 bytes taken\nfreed: 0 bytes taken\n";
    assert_eq!(limited("pieces"), told);
    assert_eq!(limited("kept"), "160 MiB: 0\nreserved 160 MiB\n");
}

/// Regression: a program which frees its memory after a failed allocation freed the memory of others.
#[test]
fn an_allocation_that_is_undone_leaves_the_callers_pointer_as_it_was() {
    let told = "1000 times 1040: 2\naddress: 0, pitch: 7\n1 MiB: 0\n";
    assert_eq!(limited("pitch_beyond"), told);
}

#[test]
fn threads_that_share_pools_at_the_limit_leave_nothing_charged() {
    assert_eq!(limited("pool_threads"), "start: 0 bytes taken\nend: 0 bytes taken\n256 MiB: 0\n");
}

#[test]
fn what_came_out_of_a_pool_is_charged_until_it_is_freed_also_when_the_pool_is_gone() {
    same(&["destroyed"], None);
}

/// Regression: graph memory beyond the limit was not charged at all, not even the part within the limit.
#[test]
fn memory_of_graphs_beyond_the_limit_leaves_nothing_for_others() {
    assert_eq!(limited("graph_beyond"), "graph: 0\n1 MiB: 2\ncuDeviceGraphMemTrim(0) = 0\n256 MiB: 0\n");
}

#[test]
fn memory_of_graphs_counts_whichever_call_made_the_node_and_on_its_own_device() {
    same(&["graph_node", "graph_node_v2"], None);
    // The tests' daemon has one account for all devices.
    let alone = run("graph_devices", Run::hooked(&memory(), &["graph_devices"]));
    assert_eq!(alone, "128 MiB: 2\n128 MiB of device 0: 0\n256 MiB: 0\n");
}

#[test]
fn pools_are_charged_to_their_own_device() {
    same(&["stream_of_other", "pool_of_other", "host_pools"], None);
    // Drivers before 12.8 do not report a stream's device.
    same(&["stream_of_other"], Some(&program("between", &["-shared"])));
}

#[test]
fn arrays_without_memory_of_their_own_cost_nothing() {
    same(&["sparse"], None);
}

#[test]
fn the_heap_of_kernels_counts_and_goes_with_its_context() {
    same(&["heap"], None);
    let told =
        "cuCtxSetLimit(2, 128 * MIB) = 0\ncuCtxSetLimit(2, 512 * MIB) = 2\n128 MiB\n136 MiB: 0\n1 MiB: 2\n";
    assert_eq!(limited("heap_beyond"), told);
}

#[test]
fn a_name_of_physical_memory_may_be_given_to_another_thread_while_it_is_unmapped() {
    let told = "start: 0 bytes taken\nsame name: 1\nanother's: 67108864 bytes taken\nend: 0 bytes taken\n";
    assert_eq!(interrupted("name_again"), told);
    same(&["unmap_refused"], None);
}

/// Regression: the free of the second memory counted for the first, so the second was charged for ever.
#[test]
fn memory_at_an_address_that_came_out_of_a_pool_before_is_charged_until_it_is_freed() {
    assert_eq!(interrupted("address_again"), "start: 0 bytes taken\nsame address: 1\nend: 0 bytes taken\n");
}

#[test]
fn a_pool_is_not_destroyed_while_the_hook_trims_it_and_devices_do_not_wait_for_each_other() {
    let told = interrupted("trim_and_destroy");
    assert_eq!(told, "destroys the pool: waits\ntrimmed: 0, in capture mode 2\n128 MiB: 0\n");
    assert_eq!(interrupted("two_at_once"), "allocates on the other device: done\n");
}
