//! Parking: device memory goes to host memory and comes back to the same addresses, whatever the program does meanwhile.

use std::path::{Path, PathBuf};
use std::time::Duration as StdDuration;

use crate::common::daemon::{Daemon, Manners, Told};
use crate::common::{Done, Run, number, program};
use fake_cuda::sim::{ProcessTruth, SimDevice};
use gshare_core::reason::Obstacle;
use gshare_core::wire::Residence;
use gshare_core::{Bytes, Duration, ResourceSpec};

const MIB: u64 = 1 << 20;
/// The block of `park.c` in whole granules, and its memory that stays.
pub(crate) const BIG: u64 = 26 * MIB;
pub(crate) const SMALL: u64 = MIB;
/// One of the two segments that `park.c` maps by itself.
const SEGMENT: u64 = 16 * MIB;

fn park() -> PathBuf {
    program("park", &[])
}

pub(crate) fn limit() -> ResourceSpec {
    let spec = ResourceSpec::UNLIMITED;
    ResourceSpec::new(spec.quota(), spec.sm(), Some(Bytes::from_mib(512))).unwrap()
}

/// A run of a kind of `park.c` beside a daemon, with files as signals between test and program.
pub(crate) struct Bench {
    place: tempfile::TempDir,
    pub(crate) daemon: Option<Daemon>,
    pub(crate) device: PathBuf,
    run: std::thread::JoinHandle<Done>,
}

impl Bench {
    pub(crate) fn new(kind: &str, spec: ResourceSpec) -> Self {
        Self::with(kind, Manners { spec, token: Duration::from_millis(10), ..Manners::default() }, |run| run)
    }

    pub(crate) fn with(kind: &str, manners: Manners, change: impl FnOnce(Run) -> Run) -> Self {
        let place = tempfile::tempdir().unwrap();
        let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
        let run = Run::hooked(&park(), &[kind, place.path().to_str().unwrap()])
            .env("GSHARE_SIM_PROFILE", "tiny")
            .env("GSHARE_SIM_GPUS", "1")
            .env("GSHARE_PARK", "1")
            .env("GSHARE_SOCKET", &daemon.socket);
        let run = change(run);
        let device = run.device();
        let run = std::thread::spawn(move || run.finish());
        let bench = Self { place, daemon: Some(daemon), device, run };
        bench.await_file("ready");
        bench
    }

    pub(crate) fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    pub(crate) fn make(&self, name: &str) {
        std::fs::write(self.path(name), "").unwrap();
    }

    pub(crate) fn await_file(&self, name: &str) {
        for _ in 0..1_500 {
            if self.path(name).exists() || self.run.is_finished() {
                return;
            }
            std::thread::sleep(StdDuration::from_millis(10));
        }
        panic!("the program does not come to {name}");
    }

    /// Orders the program's memory to host memory, and waits until it is there.
    pub(crate) fn parked(&self) -> Told {
        self.daemon()
            .told_when("nothing is movable", |report| report.0 == Residence::Resident && report.1 > 0);
        self.daemon().park(true);
        self.daemon().told_when("not parked", |report| report.0 == Residence::Parked)
    }

    pub(crate) fn truth(&self) -> ProcessTruth {
        let device = SimDevice::open(&self.device, &fake_cuda::Spec::default()).unwrap();
        device.truth().processes.into_iter().find(|process| process.live).unwrap()
    }

    /// Device memory of the program without its contexts.
    pub(crate) fn on_device(&self) -> u64 {
        let gpu = &self.truth().gpus[0];
        gpu.memory_used_bytes - gpu.memory_bytes["context"]
    }

    /// Waits until the daemon's account of the process is this number of bytes.
    fn accounts_for(&self, bytes: u64) {
        let by = std::time::Instant::now() + StdDuration::from_secs(5);
        while self.daemon().told().memory_used != bytes && std::time::Instant::now() < by {
            std::thread::sleep(StdDuration::from_millis(5));
        }
        assert_eq!((self.daemon().told().memory_used, self.on_device()), (bytes, bytes));
    }

    pub(crate) fn finish(self) -> Done {
        self.run.join().unwrap()
    }
}

#[test]
fn parked_memory_is_off_the_device_and_comes_back_for_a_launch_with_the_same_bytes_and_addresses() {
    for (kind, spec) in [("hold", limit()), ("launch", limit()), ("launch", ResourceSpec::UNLIMITED)] {
        let bench = Bench::new(kind, spec);
        assert_eq!(bench.on_device(), BIG + SMALL, "{kind}");
        let told = bench.parked();
        assert_eq!(told.parking.last(), Some(&(Residence::Parked, BIG, None)), "{kind}");
        assert_eq!(bench.on_device(), SMALL, "{kind}: small memory stays");
        bench.make("go");
        bench.await_file("synchronised");
        assert_eq!(bench.on_device(), SMALL, "{kind}: synchronising needs no memory");
        bench.accounts_for(SMALL);
        bench.make("on");
        bench.await_file("looked");
        assert_eq!(bench.on_device(), BIG + SMALL, "{kind}");
        bench.make("end");
        let done = bench.finish();
        assert_eq!(done.code, Some(0), "{kind}: {}{}", done.stdout, done.stderr);
        assert!(done.stdout.contains("big: 0, equal\nsmall: 0, equal\n"), "{kind}: {}", done.stdout);
    }
}

/// Only the guard holds such a call, since it needs no credit. The second program has allocated, and done nothing else.
#[test]
fn a_look_at_a_pointer_waits_for_the_memory_and_asks_for_it() {
    let query = "cuPointerGetAttribute(&memory, 2, big) = 0\nbig: 0, equal\n";
    for (kind, told) in [("query", query), ("unused", "big: 0, equal\n")] {
        let bench = Bench::new(kind, limit());
        bench.parked();
        bench.make("go");
        let done = bench.finish();
        assert_eq!(done.stdout, told, "{}", done.stderr);
    }
}

/// Others park for such a program, so the memory that they hold now counts as free. The limit is 900 of 1024 MiB.
#[test]
fn a_program_sees_the_memory_that_it_may_have_and_its_own_part_wherever_it_is() {
    for (kept, most) in [(0, 900), (100, 900), (300, 724)] {
        let memory = Some(Bytes::from_mib(900));
        let spec = ResourceSpec::new(limit().quota(), limit().sm(), memory).unwrap();
        let manners = Manners { spec, kept: kept * MIB, ..Manners::default() };
        let neighbour = Bench::new("hold", limit());
        let bench = Bench::with("figures", manners, |run| run.env("GSHARE_SIM_DEVICE", &neighbour.device));
        bench.parked();
        bench.make("go");
        let figures = [("first", 0), ("here", 27), ("away", 27), ("back", 27)].map(|(when, used)| {
            let free = most - used;
            format!("{when}: {free} of 900 free; {free} of 900 free, {used} used\n")
        });
        assert_eq!(bench.finish().stdout, figures.concat(), "{kept}");
        ["go", "on", "end"].iter().for_each(|name| neighbour.make(name));
        neighbour.finish();
    }
}

#[test]
fn an_order_to_come_back_needs_no_launch() {
    let bench = Bench::new("hold", limit());
    bench.parked();
    bench.daemon().park(false);
    bench.daemon().told_when("not back", |report| *report == (Residence::Resident, BIG, None));
    assert_eq!(bench.on_device(), BIG + SMALL);
    for name in ["go", "on", "end"] {
        bench.make(name);
    }
    assert!(bench.finish().stdout.contains("big: 0, equal"));
}

#[test]
fn memory_is_allocated_and_freed_while_other_memory_is_parked() {
    let bench = Bench::new("allocate", limit());
    bench.parked();
    bench.make("go");
    bench.await_file("done");
    assert_eq!(bench.on_device(), SMALL + 12 * MIB);
    bench.make("on");
    let done = bench.finish();
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
    assert!(done.stdout.contains("other: 0, equal"), "{}", done.stdout);
    assert!(!done.stdout.contains("= 2"), "{}", done.stdout);
}

#[test]
fn a_capture_refuses_to_park_and_is_not_spoiled() {
    let bench = Bench::new("capture", limit());
    bench.daemon().told_when("nothing is movable", |report| report.1 > 0);
    bench.daemon().park(true);
    let refused = (Residence::Resident, BIG, Some(Obstacle::Capture));
    bench.daemon().told_when("not refused", |report| *report == refused);
    bench.make("go");
    bench.await_file("done");
    bench.parked_again();
    bench.make("on");
    let done = bench.finish();
    assert!(done.stdout.contains("cuStreamEndCapture(stream, &graph) = 0"), "{}", done.stdout);
    assert!(done.stdout.contains("big: 0, equal"), "{}", done.stdout);
}

impl Bench {
    fn parked_again(&self) {
        self.daemon().park(true);
        self.daemon().told_when("not parked", |report| report.0 == Residence::Parked);
    }
}

/// Work that waits for a later launch of the program would keep its memory on the device for ever.
#[test]
fn work_that_does_not_end_refuses_to_park_and_lets_the_program_go_on() {
    let bench = Bench::new("stuck", limit());
    bench.daemon().told_when("nothing is movable", |report| report.1 > 0);
    bench.daemon().park(true);
    bench.daemon().told_when("does not begin", |report| report.0 == Residence::Parking);
    bench.make("parking");
    bench.daemon().told_when("not refused", |report| report.2 == Some(Obstacle::Work));
    let done = bench.finish();
    assert!(done.stdout.contains("big: 0, equal"), "{}{}", done.stdout, done.stderr);
}

#[test]
fn a_forked_child_has_nothing_of_parked_memory_and_its_parent_gets_it_back() {
    let bench = Bench::new("fork", limit());
    bench.parked();
    bench.make("go");
    let done = bench.finish();
    assert_eq!(done.stdout, "child: 3\nbig: 0, equal\n", "{}", done.stderr);
}

#[test]
fn a_parked_process_exits_and_its_contexts_end_as_others_do() {
    let bench = Bench::new("exit", limit());
    bench.parked();
    bench.make("go");
    assert_eq!(bench.finish().code, Some(0));
    let bench = Bench::new("destroy", limit());
    bench.parked();
    bench.make("go");
    bench.await_file("done");
    assert_eq!(bench.on_device(), 0);
    bench.make("on");
    let done = bench.finish();
    assert_eq!(
        (done.code, done.stdout.trim_end()),
        (Some(0), "cuDevicePrimaryCtxReset_v2(0) = 0"),
        "{}",
        done.stderr
    );
}

/// A device of 64 MiB for programs of [`BIG`] and [`SMALL`]. The daemon does not know that the contexts of two programs take 16 MiB.
fn narrow(folder: &Path) -> (PathBuf, Manners) {
    let profile = folder.join("narrow.toml");
    let text = format!("base = \"tiny\"\nmemory_bytes = {}\ncontext_bytes = {}\n", 64 * MIB, 8 * MIB);
    std::fs::write(&profile, text).unwrap();
    let spec = ResourceSpec::new(limit().quota(), limit().sm(), Some(Bytes::from_mib(64))).unwrap();
    let token = Duration::from_millis(10);
    (profile, Manners { spec, token, room: 64 * MIB, ..Manners::default() })
}

impl Bench {
    /// Another program on the device of this one, with the same daemon.
    fn beside(&self, kind: &str, manners: Manners, profile: &Path) -> Self {
        Self::with(kind, manners, |run| {
            run.env("GSHARE_SIM_PROFILE", profile)
                .env("GSHARE_SIM_DEVICE", &self.device)
                .env("GSHARE_SOCKET", &self.daemon().socket)
        })
    }
}

/// The driver refuses memory that the daemon has granted, to an allocation first, and then to the return of each program.
#[test]
fn others_park_where_the_driver_has_less_memory_than_the_daemon_knows() {
    let place = tempfile::tempdir().unwrap();
    let (profile, manners) = narrow(place.path());
    let one = Bench::with("hold", manners, |run| run.env("GSHARE_SIM_PROFILE", &profile));
    one.daemon().told_when("nothing is movable", |report| report.1 == BIG);
    let other = one.beside("hold", manners, &profile);
    for bench in [&one, &other] {
        bench.make("go");
        bench.make("on");
        bench.await_file("looked");
    }
    assert!(one.daemon().told().memory <= 64 * MIB);
    for bench in [one, other] {
        bench.make("end");
        let done = bench.finish();
        assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
        assert!(done.stdout.contains("big: 0, equal\nsmall: 0, equal\n"), "{}", done.stdout);
    }
}

/// The driver's pool grows in steps of 32 MiB, for which the device has no room.
#[test]
fn others_park_for_a_step_of_the_drivers_pool() {
    let place = tempfile::tempdir().unwrap();
    let (profile, manners) = narrow(place.path());
    let one = Bench::with("hold", manners, |run| run.env("GSHARE_SIM_PROFILE", &profile));
    one.daemon().told_when("nothing is movable", |report| report.1 == BIG);
    let other = one.beside("pooled", manners, &profile);
    assert_eq!(other.finish().stdout, "cuMemAllocAsync(&big, MIB, stream) = 0\n");
    for name in ["go", "on", "end"] {
        one.make(name);
    }
    assert!(one.finish().stdout.contains("big: 0, equal"));
}

/// The first program stays, so the second gets the driver's error, and gives the memory back by which it looked for room.
#[test]
fn where_nothing_else_can_park_the_drivers_error_reaches_the_program() {
    let place = tempfile::tempdir().unwrap();
    let (profile, manners) = narrow(place.path());
    let stays = |run: Run| run.env("GSHARE_SIM_PROFILE", &profile).env("GSHARE_PARK", "0");
    let one = Bench::with("hold", manners, stays);
    let other = one.beside("refused", manners, &profile);
    let done = other.finish();
    assert_eq!(done.stdout, "cuMemAlloc_v2(&big, 26 * MIB) = 2\ncuMemAlloc_v2(&big, 16 * MIB) = 0\n");
    for name in ["go", "on", "end"] {
        one.make(name);
    }
    assert!(one.finish().stdout.contains("big: 0, equal"));
}

/// PyTorch's expandable segments are such memory.
#[test]
fn memory_that_the_program_maps_by_itself_moves_and_keeps_its_handles() {
    let bench = Bench::new("segments", limit());
    assert_eq!(bench.parked().parking.last(), Some(&(Residence::Parked, 2 * SEGMENT, None)));
    bench.accounts_for(SMALL);
    bench.make("go");
    bench.await_file("looked");
    bench.accounts_for(2 * SEGMENT + SMALL);
    bench.parked_again();
    bench.accounts_for(SMALL);
    bench.make("on");
    bench.await_file("unmapped");
    bench.accounts_for(SEGMENT + SMALL);
    bench.parked_again();
    bench.accounts_for(SMALL);
    bench.make("end");
    let done = bench.finish();
    let lines = [
        "segments: 0, equal",
        "cuMemAddressFree(range, 64 * MIB) = 1",
        "cuMemUnmap(range, 16 * MIB) = 0",
        "cuMemMap(moved, 16 * MIB, 0, first, 0) = 0",
        "cuMemSetAccess(moved, 16 * MIB, &ACCESS, 1) = 0",
        "moved: 0, equal",
        "cuMemGetAllocationPropertiesFromHandle(&props, first) = 0",
        "cuMemRetainAllocationHandle(&again, (void *)(moved + MIB)) = 0",
        "type 1, the same handle",
        "cuMemRelease(again) = 0",
        "cuMemExportToShareableHandle(&descriptor, first, 1, 0) = 1",
        "cuMemRelease(first) = 0",
        "cuMemUnmap(moved, 16 * MIB) = 0",
        "cuMemRelease(first) = 1",
        "second: 0, equal",
    ];
    assert_eq!(done.stdout.lines().collect::<Vec<_>>(), lines, "{}", done.stderr);
}

/// Each order to a move that fails, of the copies out (1 and 2) and back, leaves or brings back every byte.
#[test]
fn a_copy_that_fails_loses_nothing() {
    for (failed, refused) in [("1", true), ("2", true), ("2,3", false), ("3", false), ("4", false)] {
        let manners = Manners { spec: limit(), token: Duration::from_millis(10), ..Manners::default() };
        let bench = Bench::with("segments", manners, |run| run.env("GSHARE_SIM_FAILED_COPIES", failed));
        bench.daemon().told_when("nothing is movable", |report| report.1 == 2 * SEGMENT);
        bench.daemon().park(true);
        if refused {
            bench.is_refused(Obstacle::Copy);
        } else {
            bench.daemon().told_when("not parked", |report| report.0 == Residence::Parked);
            let left = if failed == "2,3" { SEGMENT } else { 0 };
            bench.accounts_for(left + SMALL);
        }
        bench.sees_its_segments();
    }
}

#[test]
fn without_host_memory_a_program_stays_on_the_device() {
    let bench = Bench::new("poor", limit());
    bench.daemon().told_when("nothing is movable", |report| report.1 == 2 * SEGMENT);
    bench.daemon().park(true);
    bench.is_refused(Obstacle::HostMemory);
    bench.sees_its_segments();
}

impl Bench {
    /// The order to park has failed, and all memory is there.
    fn is_refused(&self, why: Obstacle) {
        let refused = (Residence::Resident, 2 * SEGMENT, Some(why));
        self.daemon().told_when("not refused", |report| *report == refused);
        self.accounts_for(2 * SEGMENT + SMALL);
    }

    /// The bytes of `segments` are all there, and can go and come once more.
    fn sees_its_segments(self) {
        self.make("go");
        self.await_file("looked");
        self.accounts_for(2 * SEGMENT + SMALL);
        self.parked_again();
        self.accounts_for(SMALL);
        for name in ["on", "end"] {
            self.make(name);
        }
        let done = self.finish();
        for part in ["segments: 0, equal", "moved: 0, equal", "second: 0, equal"] {
            assert!(done.stdout.contains(part), "{part}: {}{}", done.stdout, done.stderr);
        }
    }
}

/// CuPy's and PyTorch's asynchronous allocators take such memory.
#[test]
fn large_allocations_from_pools_move_and_the_figures_of_pools_are_true() {
    let bench = Bench::new("pools", limit());
    bench.accounts_for(16 * MIB + SMALL);
    assert_eq!(bench.parked().parking.last(), Some(&(Residence::Parked, 16 * MIB, None)));
    bench.accounts_for(SMALL);
    bench.make("go");
    bench.await_file("looked");
    bench.accounts_for(16 * MIB + SMALL);
    bench.make("on");
    bench.await_file("spare");
    // The driver's pool keeps a step of its own for the small allocation.
    bench.accounts_for((6 + 10 + 32) * MIB + SMALL);
    bench.parked_again();
    bench.accounts_for(32 * MIB + SMALL);
    bench.make("parked");
    bench.await_file("gone");
    bench.accounts_for(SMALL);
    bench.make("end");
    let done = bench.finish();
    let lines = [
        "in use: 9437191 of 10485760 bytes, at most 9437191 of 10485760",
        "first: 0, equal",
        "second: 0, equal",
        "cuMemFreeAsync(second, stream) = 0",
        "freed: 0 of 10485760 bytes, at most 9437191 of 10485760",
        "cuMemAllocFromPoolAsync(&third, 9 * MIB, pool, other) = 0",
        "another stream: other memory",
        "cuMemFreeAsync(third, other) = 0",
        "cuMemAllocFromPoolAsync(&third, 9 * MIB, pool, stream) = 0",
        "the same stream: the same memory",
        "cuMemFreeAsync(third, stream) = 0",
        "cuMemFreeAsync(third, stream) = 1",
        "the legacy stream: the same memory",
        "the thread's stream: the same memory",
        "synchronised: 0 of 0 bytes, at most 9437191 of 20971520",
        "with small: 10485760 of 44040192 bytes, at most 10485760 of 44040192",
        "below the threshold: 0 of 44040192 bytes, at most 10485760 of 44040192",
        "after parking: 0 of 33554432 bytes, at most 10485760 of 44040192",
        "cuMemPoolTrimTo(pool, 0) = 0",
        "trimmed: 0 of 0 bytes, at most 10485760 of 44040192",
        "cuMemAlloc_v2(&second, 400 * MIB) = 0",
        "cuMemFreeAsync(second, stream) = 0",
        "cuMemPoolDestroy(pool) = 0",
        "without a pool: 0, equal",
        "cuMemFree_v2(first) = 0",
        "cuMemFreeAsync(second, stream) = 0",
    ];
    assert_eq!(done.stdout.lines().collect::<Vec<_>>(), lines, "{}", done.stderr);
}

#[test]
fn memory_that_cannot_move_stays_and_is_named() {
    let bench = Bench::new("others", limit());
    // The largest part of the memory is named, once it is there.
    let handles = (Residence::Resident, 0, Some(Obstacle::Handles));
    bench.daemon().told_when("not named", |report| *report == handles);
    bench.make("go");
    assert_eq!(bench.finish().stdout, "range: 0, equal\n");
    let several = Bench::with("hold", Manners { spec: limit(), ..Manners::default() }, |run| {
        run.env("GSHARE_SIM_GPUS", "2")
    });
    several
        .daemon()
        .told_when("not named", |report| *report == (Residence::Resident, 0, Some(Obstacle::Devices)));
    for name in ["go", "on", "end"] {
        several.make(name);
    }
    let done = several.finish();
    assert!(
        done.stderr.contains("this process cannot be parked: it sees several devices"),
        "{}",
        done.stderr
    );
}

/// Blocks beyond so many MiB are few.
const LARGE: u32 = 64;

/// Parks and brings back a random program as often as it can, with orders that cross its launches.
fn random(seed: u64, threads: u32, largest: u32, spec: ResourceSpec) -> usize {
    let place = tempfile::tempdir().unwrap();
    let large = place.path().join("large.toml");
    // Two large blocks, and another while they are in host memory.
    let memory = (3 * u64::from(largest)).max(1024) * MIB;
    let operations = if largest > LARGE { "24" } else { "120" };
    std::fs::write(&large, format!("base = \"tiny\"\nmemory_bytes = {memory}\n")).unwrap();
    let manners = Manners { spec, token: Duration::from_millis(3), ..Manners::default() };
    let bench = Bench::with("random", manners, |run| {
        run.env("SEED", seed.to_string())
            .env("THREADS", threads.to_string())
            .env("OPERATIONS", operations)
            .env("LARGEST", largest.to_string())
            .env("GSHARE_SIM_PROFILE", large)
    });
    let mut state = seed;
    while !bench.path("done").exists() && !bench.run.is_finished() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bench.daemon().park(state >> 40 & 1 != 0);
        std::thread::sleep(StdDuration::from_millis(state >> 33 & 7));
    }
    let reports = bench.daemon().told().parking.len();
    // The account is true in host memory and on the device.
    for residence in [Residence::Parked, Residence::Resident] {
        if bench.run.is_finished() {
            break;
        }
        bench.daemon().park(residence == Residence::Parked);
        bench.daemon().told_when("not moved", |report| report.0 == residence);
        bench.accounts_for(bench.on_device());
    }
    bench.make("end");
    let told = bench.daemon().told();
    let done = bench.finish();
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (Some(0), "all bytes are equal\n"),
        "seed {seed}: {}; {:?}",
        done.stderr,
        told.parking[..reports].iter().rev().take(20).collect::<Vec<_>>()
    );
    let away = |report: &(Residence, _, _)| !matches!(report.0, Residence::Resident | Residence::Parking);
    told.parking.windows(2).filter(|pair| !away(&pair[0]) && away(&pair[1])).count()
}

/// `GSHARE_TEST_PARKS=10000` goes on until so many moves, and `GSHARE_TEST_MIB=4096` has blocks of up to 4 GiB, which need 20 GiB of
/// memory here and `GSHARE_TEST_SECONDS=600`.
#[test]
fn random_programs_keep_every_byte_and_address_however_often_they_are_parked() {
    let (parks, largest) = (number("GSHARE_TEST_PARKS", 10), number("GSHARE_TEST_MIB", 5));
    let (mut parked, mut programs) = (0, 0u32);
    while programs < 3 || parked < parks as usize {
        let threads = if largest > LARGE { 1 } else { 2 + programs % 3 };
        let bounded = programs.is_multiple_of(2) && largest <= LARGE;
        let spec = if bounded { limit() } else { ResourceSpec::UNLIMITED };
        parked += random(10_000 + u64::from(programs), threads, largest, spec);
        programs += 1;
    }
    eprintln!("{programs} programs parked {parked} times");
}
