//! Several processes on one simulated device.
#![allow(unsafe_code, clippy::macro_metavars_in_unsafe)] // a C client
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap)] // small numbers

mod common;

use std::ffi::c_void;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;

use common::*;

/// Compiles the C client against the library in `dir`.
fn client(dir: &Path, dlopen: bool) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/client.c");
    let out = dir.join(if dlopen { "client-dlopen" } else { "client-linked" });
    if !out.exists() {
        let mut gcc = Command::new("gcc");
        gcc.args(["-O1", "-Wall", "-o"]).arg(&out);
        if dlopen {
            gcc.arg("-DDLOPEN").arg(source).arg("-ldl");
        } else {
            gcc.arg(source).arg("-L").arg(dir.join("lib")).arg("-l:libcuda.so.1");
        }
        assert!(gcc.status().unwrap().success(), "gcc");
    }
    out
}

fn start_client(program: &Path, dir: &Path, args: &[&str]) -> Child {
    let mut command = Command::new(program);
    sim_env(&mut command, dir);
    // A spinning client ends with its input.
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn output(child: Child) -> String {
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// Kernels as wide as the device run one at a time, in turns: no process waits for more than one kernel of the other. A loaded machine
/// delays the processes themselves, not the turns.
#[test]
fn contending_processes_take_turns() {
    isolated("contending_processes_take_turns", &[], || {
        let dir = dir();
        let (linked, dlopened) = (client(&dir, false), client(&dir, true));
        let children: Vec<Child> = [&linked, &dlopened]
            .into_iter()
            .map(|program| start_client(program, &dir, &["spin", "spin_500us_full"]))
            .collect();
        let pids: Vec<u32> = children.iter().map(Child::id).collect();
        // Holds however late either process begins.
        let met = |pid: &u32| {
            let truth = truth();
            truth.processes.iter().any(|p| p.pid == *pid && p.gpus[0].queue_wait_ns > 0)
        };
        let begun = std::time::Instant::now();
        while !pids.iter().all(met) {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "they do not meet");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        for child in children {
            output(child);
        }
        // `watch` agrees with `truth`, for any initial slot, and reports nothing of a process which never was.
        let device =
            fake_cuda::sim::SimDevice::open(&dir.join("device"), &fake_cuda::Spec::default()).unwrap();
        let of = |pid| fake_cuda::sim::Watched { pid, slot: 200, busy_ns: 1 };
        let mut watched = [of(pids[1]), of(pids[0]), of(u32::MAX)];
        device.watch(0, &mut watched);
        let truth = truth();
        let busy = |pid: u32| truth.processes.iter().find(|p| p.pid == pid).map_or(0, |p| p.gpus[0].busy_ns);
        assert!(busy(pids[0]) > 0);
        for watched in watched {
            assert_eq!(watched.busy_ns, busy(watched.pid), "{watched:?}");
        }
        let mut total = 0;
        for pid in pids {
            let account = &truth.processes.iter().find(|p| p.pid == pid).unwrap().gpus[0];
            assert!(account.queue_wait_ns <= account.kernels * 500_000, "{account:?}");
            assert_eq!(account.kernel_ns, account.kernels * 500_000);
            total += account.kernels;
        }
        assert_eq!(truth.gpus[0].busy_ns, total * 500_000);
        assert_eq!(truth.gpus[0].memory_used_bytes, 0);
    });
}

/// An unused device of another profile is replaced by one of several simultaneous openers; the others find the new device.
#[test]
fn processes_that_start_at_once_share_the_device_that_one_of_them_makes() {
    isolated("processes_that_start_at_once_share_the_device_that_one_of_them_makes", &[], || {
        let dir = dir();
        let program = client(&dir, false);
        for round in 0..20 {
            // Of another profile.
            assert_ne!(truth().gpus[0].sms, 10);
            let mut children: Vec<Child> =
                (0..4).map(|_| start_client(&program, &dir, &["spin", "spin_20us_full"])).collect();
            for child in &mut children {
                let mut line = String::new();
                BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
                assert_eq!(line, "ready\n");
            }
            let truth = truth();
            let there = |child: &Child| truth.processes.iter().any(|p| p.live && p.pid == child.id());
            assert!(children.iter().all(there), "round {round}: {:?}", truth.processes);
            children.into_iter().for_each(|child| drop(output(child)));
            std::fs::remove_file(dir.join("device")).unwrap();
        }
    });
}

#[test]
fn memory_is_one_account_for_all_processes() {
    isolated("memory_is_one_account_for_all_processes", &[], || {
        start();
        let _held: CUdeviceptr = get!(cuMemAlloc_v2(100 << 20));
        let (context, all) = (16_u64 << 20, 1_u64 << 30);
        for dlopen in [false, true] {
            let text = output(start_client(&client(&dir(), dlopen), &dir(), &["memory", "200"]));
            let numbers: Vec<u64> = text.split_whitespace().map(|n| n.parse().unwrap()).collect();
            let before = all - 2 * context - (100 << 20);
            assert_eq!(numbers, [before, before - (200 << 20), all]);
        }
    });
}

/// `unshare --pid`, as root or in a user namespace of its own; `None` where neither is allowed.
fn in_own_pid_namespace() -> Option<&'static [&'static str]> {
    const WAYS: [&[&str]; 2] = [
        &["--pid", "--fork", "--kill-child"],
        &["--user", "--map-root-user", "--pid", "--fork", "--kill-child"],
    ];
    let allowed = |way: &&[&str]| {
        let out = Command::new("unshare").args(*way).args(["sh", "-c", "test $$ = 1"]).output();
        out.is_ok_and(|out| out.status.success())
    };
    let way = WAYS.into_iter().find(allowed);
    assert!(way.is_some() || std::env::var_os("GSHARE_CI").is_none(), "unshare --pid must work in CI");
    way
}

/// Containers that share a device file: each client is process 1 of its PID namespace.
#[test]
fn processes_of_several_pid_namespaces_share_the_device() {
    let Some(way) = in_own_pid_namespace() else {
        eprintln!("skipped: unshare --pid is not permitted here");
        return;
    };
    isolated("processes_of_several_pid_namespaces_share_the_device", &[], || {
        let dir = dir();
        let program = client(&dir, false);
        let start_one = || {
            let mut command = Command::new("unshare");
            sim_env(&mut command, &dir);
            command.args(way).arg(&program).args(["spin", "spin_20us_sm1"]);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "ready\n");
            child
        };
        let live = || {
            let processes = truth().processes.into_iter().filter(|process| process.live);
            processes.map(|process| (process.pid, process.gpus[0].kernels)).collect::<Vec<_>>()
        };
        let mut children = vec![start_one(), start_one(), start_one()];
        let before = live();
        let mut pids: Vec<u32> = before.iter().map(|(pid, _)| *pid).collect();
        pids.sort_unstable();
        pids.dedup();
        assert_eq!(pids.len(), 3, "each has a process id of this namespace: {before:?}");
        assert!(pids.iter().all(|pid| *pid > 1), "{before:?}");
        // All three go on.
        let begun = std::time::Instant::now();
        while !live().iter().zip(&before).all(|(now, before)| now.0 == before.0 && now.1 > before.1 + 20) {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{:?} from {before:?}", live());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        // The sweep removes the killed client and no other.
        let mut killed = children.remove(0);
        killed.kill().unwrap();
        killed.wait().unwrap();
        while live().len() != 2 {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{:?}", live());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        children.push(start_one());
        assert_eq!(live().len(), 3);
        // A client says that it is ready before its first launch.
        while !live().iter().all(|(_, kernels)| *kernels > 0) {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{:?}", live());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        for child in children {
            let launched: u64 = output(child).trim().parse().unwrap();
            assert!(launched > 0);
        }
    });
}

/// A kill at any moment, mid-kernel or inside the lock, delays no other process, and all memory comes back.
#[test]
fn two_hundred_kills_leave_the_device_usable() {
    isolated("two_hundred_kills_leave_the_device_usable", &[], || {
        start();
        let dir = dir();
        let program = client(&dir, false);
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        let quick = kernel("spin_20us_full");
        let mut round = 0_u64;
        // At least a hundred rounds, until a victim has died inside the lock.
        while round < 100 || truth().repairs == 0 {
            assert!(round < 10_000, "no victim died inside the lock");
            // Two victims: one with long kernels queued, one inside the lock most of the time.
            let victims: Vec<Child> = [&["spin", "spin_900ms_full"][..], &["hammer"]]
                .into_iter()
                .map(|args| {
                    let mut victim = start_client(&program, &dir, args);
                    let mut line = String::new();
                    BufReader::new(victim.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
                    assert_eq!(line, "ready\n");
                    victim
                })
                .collect();
            std::thread::sleep(std::time::Duration::from_micros(round * 37 % 3_000));
            for mut victim in victims {
                victim.kill().unwrap();
                victim.wait().unwrap();
            }
            assert_eq!(launch(quick, stream), OK);
            ok!(cuStreamSynchronize(stream));
            round += 1;
        }
        let truth = truth();
        assert_eq!(truth.processes.iter().filter(|p| p.live).count(), 1);
        assert_eq!(truth.gpus[0].memory_used_bytes, 16 << 20);
        assert_eq!(truth.gpus[0].sms_busy, 0);
    });
}

// --- Sharing between processes ---------------------------------------------------------------------

fn send_fd(socket: &UnixDatagram, fd: i32) {
    let mut byte = [0_u8];
    let mut control = [0_u64; 4];
    // SAFETY: a message of one byte with one descriptor, as in cmsg(3).
    unsafe {
        let mut io = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut io;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd);
        assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0), 1);
    }
}

fn receive_fd(socket: &UnixDatagram) -> i32 {
    let mut byte = [0_u8];
    let mut control = [0_u64; 4];
    // SAFETY: as above.
    unsafe {
        let mut io = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut io;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        assert_eq!(libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0), 1);
        libc::CMSG_DATA(libc::CMSG_FIRSTHDR(&raw const message)).cast::<i32>().read_unaligned()
    }
}

const ROLE: &str = "SIM_TEST_ROLE";

fn prop() -> sys::CUmemAllocationProp {
    // SAFETY: all zero is a valid description.
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes.0 = 1;
    prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    prop
}

fn map(handle: u64, size: usize) -> CUdeviceptr {
    let at: CUdeviceptr = get!(cuMemAddressReserve(size, 0, 0, 0));
    ok!(cuMemMap(at, size, 0, handle, 0));
    let access = sys::CUmemAccessDesc {
        location: prop().location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    ok!(cuMemSetAccess(at, size, &raw const access, 1));
    at
}

#[test]
fn physical_memory_goes_over_a_socket() {
    const NAME: &str = "physical_memory_goes_over_a_socket";
    isolated(NAME, &[], || {
        let size = 4 << 20;
        let vmm = |pid: u32| {
            truth().processes.iter().find(|p| p.pid == pid).map_or(0, |p| p.gpus[0].memory_bytes["vmm"])
        };
        let (there, here) = (dir().join("there"), dir().join("here"));
        start();
        if std::env::var_os(ROLE).is_some() {
            let socket = UnixDatagram::bind(&there).unwrap();
            socket.send_to(b"!", &here).unwrap();
            let fd = receive_fd(&socket);
            let handle: u64 = get!(cuMemImportFromShareableHandle(
                fd as usize as *mut c_void,
                sys::CUmemAllocationHandleType_enum(1)
            ));
            let at = map(handle, size);
            let mut word = 0_u32;
            ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), at + 4, 4));
            assert_eq!(word, 0x0101_0101);
            ok!(cuMemsetD8_v2(at + 4, 2, 4));
            assert_eq!(vmm(std::process::id()), 0, "its maker pays");
            socket.send_to(b"!", &here).unwrap();
            let mut byte = [0];
            socket.recv(&mut byte).unwrap();
            assert_eq!(vmm(std::process::id()), size as u64, "the maker has gone");
            ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), at + 4, 4));
            assert_eq!(word, 0x0202_0202);
            return;
        }
        let socket = UnixDatagram::bind(&here).unwrap();
        let mut other = command(&dir(), NAME, &[(ROLE, "other")]).spawn().unwrap();
        let wanted = prop();
        let handle: u64 = get!(cuMemCreate(size, &raw const wanted, 0));
        let at = map(handle, size);
        ok!(cuMemsetD8_v2(at, 1, size));
        let mut fd = -1;
        let posix = sys::CUmemAllocationHandleType_enum(1);
        ok!(cuMemExportToShareableHandle((&raw mut fd).cast(), handle, posix, 0));
        let mut byte = [0];
        socket.recv(&mut byte).unwrap();
        socket.connect(&there).unwrap();
        send_fd(&socket, fd);
        socket.recv(&mut byte).unwrap();
        let mut word = 0_u32;
        ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), at + 4, 4));
        assert_eq!(word, 0x0202_0202);
        assert_eq!(vmm(std::process::id()), size as u64);
        ok!(cuMemUnmap(at, size));
        ok!(cuMemRelease(handle));
        assert_eq!(vmm(std::process::id()), 0);
        socket.send(b"!").unwrap();
        assert!(other.wait().unwrap().success());
        assert_eq!(truth().gpus[0].memory_used_bytes, 16 << 20);
    });
}

#[test]
fn memory_and_event_handles_work_between_processes() {
    const NAME: &str = "memory_and_event_handles_work_between_processes";
    isolated(NAME, &[], || {
        start();
        let file = dir().join("handles");
        if std::env::var_os(ROLE).is_some() {
            let bytes = std::fs::read(&file).unwrap();
            // SAFETY: both handles are 64 bytes of anything.
            let (memory, event) = unsafe {
                (
                    bytes.as_ptr().cast::<sys::CUipcMemHandle>().read_unaligned(),
                    bytes.as_ptr().add(64).cast::<sys::CUipcEventHandle>().read_unaligned(),
                )
            };
            let event: sys::CUevent = get!(cuIpcOpenEventHandle(event));
            let at: CUdeviceptr = get!(cuIpcOpenMemHandle_v2(memory, 1));
            let stream: sys::CUstream = get!(cuStreamCreate(1));
            ok!(cuStreamWaitEvent(stream, event, 0));
            ok!(cuStreamSynchronize(stream));
            ok!(cuEventQuery(event));
            let mut word = 0_u32;
            ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), at, 4));
            assert_eq!(word, 77);
            ok!(cuMemsetD32_v2(at, 78, 1));
            assert_eq!(mine().gpus[0].memory_bytes["plain"], 0);
            ok!(cuIpcCloseMemHandle(at));
            assert_eq!(
                cu!(cuMemcpyDtoH_v2((&raw mut word).cast(), at, 4)),
                CUresult::CUDA_ERROR_INVALID_VALUE
            );
            return;
        }
        let at: CUdeviceptr = get!(cuMemAlloc_v2(1000));
        ok!(cuMemsetD32_v2(at, 77, 1));
        let event: sys::CUevent = get!(cuEventCreate(2 | 4));
        assert_eq!(launch(kernel("spin_300ms"), null_mut()), OK);
        ok!(cuEventRecord(event, null_mut()));
        let memory: sys::CUipcMemHandle = get!(cuIpcGetMemHandle(at));
        let handle: sys::CUipcEventHandle = get!(cuIpcGetEventHandle(event));
        let mut bytes = Vec::new();
        // SAFETY: as above.
        unsafe {
            bytes.extend_from_slice(std::slice::from_raw_parts((&raw const memory).cast::<u8>(), 64));
            bytes.extend_from_slice(std::slice::from_raw_parts((&raw const handle).cast::<u8>(), 64));
        }
        std::fs::write(&file, bytes).unwrap();
        let mut same = 0;
        assert_eq!(
            cu!(cuIpcOpenMemHandle_v2(&raw mut same, memory, 1)),
            CUresult::CUDA_ERROR_INVALID_CONTEXT
        );
        assert!(command(&dir(), NAME, &[(ROLE, "other")]).status().unwrap().success());
        let mut word = 0_u32;
        ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), at, 4));
        assert_eq!(word, 78);
        ok!(cuMemFree_v2(at));
        assert_eq!(truth().gpus[0].memory_used_bytes, 16 << 20);
    });
}

#[test]
fn nvml_sees_processes_and_memory() {
    isolated("nvml_sees_processes_and_memory", &[], || {
        // SAFETY: loads the library under its other name and calls NVML's functions with its signatures.
        unsafe {
            let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null());
            let find = |name: &std::ffi::CStr| libc::dlsym(library, name.as_ptr());
            let init: extern "C" fn() -> u32 = std::mem::transmute(find(c"nvmlInit_v2"));
            let by_index: extern "C" fn(u32, *mut *mut c_void) -> u32 =
                std::mem::transmute(find(c"nvmlDeviceGetHandleByIndex_v2"));
            let memory: extern "C" fn(*mut c_void, *mut [u64; 3]) -> u32 =
                std::mem::transmute(find(c"nvmlDeviceGetMemoryInfo"));
            let running: extern "C" fn(*mut c_void, *mut u32, *mut [u64; 3]) -> u32 =
                std::mem::transmute(find(c"nvmlDeviceGetComputeRunningProcesses_v3"));
            let mig: extern "C" fn(*mut c_void, *mut u32, *mut u32) -> u32 =
                std::mem::transmute(find(c"nvmlDeviceGetMigMode"));
            let mut device = null_mut();
            assert_eq!(by_index(0, &raw mut device), 1, "not initialised");
            assert_eq!(init(), 0);
            assert_eq!(by_index(0, &raw mut device), 0);
            assert_eq!(by_index(2, &raw mut device), 2);
            start();
            let _held: CUdeviceptr = get!(cuMemAlloc_v2(1 << 20));
            let mut info = [0; 3];
            assert_eq!(memory(device, &raw mut info), 0);
            assert_eq!(info, [1 << 30, (1 << 30) - (17 << 20), 17 << 20]);
            let (mut count, mut list) = (0, [[0; 3]; 4]);
            assert_eq!(
                running(device, &raw mut count, list.as_mut_ptr()),
                7,
                "too small a list tells the number"
            );
            assert_eq!((count, running(device, &raw mut count, list.as_mut_ptr()), count), (1, 0, 1));
            assert_eq!((list[0][0] as u32, list[0][1]), (std::process::id(), 17 << 20));
            assert_eq!(mig(device, &raw mut count, &raw mut count), 3);
            let truth: extern "C" fn(*const i8, *mut i8, usize) -> isize =
                std::mem::transmute(find(c"gshare_sim_truth"));
            assert!(truth(std::ptr::null(), null_mut(), 0) > 100);
        }
    });
}

#[test]
fn a_profile_in_use_is_not_replaced() {
    isolated("a_profile_in_use_is_not_replaced", &[], || {
        start();
        let mut child = Command::new(client(&dir(), false));
        sim_env(&mut child, &dir());
        let out = child.env("GSHARE_SIM_PROFILE", "a100").args(["memory", "1"]).output().unwrap();
        let mut text = String::new();
        out.stderr.as_slice().read_to_string(&mut text).unwrap();
        assert!(text.contains("in use with another profile") && text.contains("802"), "{text}");
    });
}

// --- cudarc ----------------------------------------------------------------------------------------

#[test]
fn a_cudarc_program_runs() {
    isolated("a_cudarc_program_runs", &[], || {
        let context = cudarc::driver::CudaContext::new(0).unwrap();
        assert_eq!(context.name().unwrap(), "Tiny (simulated)");
        let stream = context.new_stream().unwrap();
        let numbers: Vec<f32> = (0..1000_u16).map(f32::from).collect();
        let there = stream.clone_htod(&numbers).unwrap();
        let back = stream.clone_dtoh(&there).unwrap();
        assert_eq!(back, numbers);
        let ptx = cudarc::nvrtc::Ptx::from_src(".version 7.0\n.entry spin_1ms() { ret; }\n");
        let function = context.load_module(ptx).unwrap().load_function("spin_1ms").unwrap();
        let config = cudarc::driver::LaunchConfig::for_num_elems(1000);
        let begin = stream.record_event(None).unwrap();
        // SAFETY: the kernel takes no arguments.
        unsafe { cudarc::driver::LaunchArgs::launch(&mut stream.launch_builder(&function), config).unwrap() };
        stream.synchronize().unwrap();
        drop(begin);
        assert_eq!(mine().gpus[0].kernel_ns, 1_000_000);
        let (free, total) = context.mem_get_info().unwrap();
        assert!(free < total && total == 1 << 30);
        assert!(stream.alloc_zeros::<u8>(2 << 30).is_err());
    });
}
