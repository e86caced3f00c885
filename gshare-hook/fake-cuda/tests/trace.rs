//! The lines of a program's calls in a trace.
#![allow(unsafe_code, clippy::macro_metavars_in_unsafe)] // a C client

mod common;

use std::ffi::{CString, c_void};
use std::process::{Output, Stdio};
use std::ptr::null_mut;

use common::*;

fn look_up(name: &str, version: c_int) {
    let name = CString::new(name).unwrap();
    let (mut found, mut status): (*mut c_void, c_uint) = (null_mut(), 0);
    ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut found, version, 0, &raw mut status));
}

/// The calls of the traced process.
fn program() {
    look_up("cuMemAlloc", 12080);
    look_up("cuNoSuchThing", 12080);
    look_up("cuMemAlloc", 1000);
    look_up("cuCtxGetDevResource", 13000);
    look_up("cuMulticastCreate", 12080);
    start();
    let address: CUdeviceptr = get!(cuMemAlloc_v2(4096));
    assert_ne!(address, 0);
    assert_eq!(launch(std::ptr::without_provenance_mut(1), null_mut()), CUresult::CUDA_ERROR_INVALID_HANDLE);
    let id = sys::CUuuid { bytes: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] };
    let mut table = std::ptr::null();
    let _ = cu!(cuGetExportTable(&raw mut table, &raw const id));
    // SAFETY: the child calls the driver once and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let _ = cu!(cuCtxSynchronize());
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    println!("forked: {child}");
}

/// Runs the program in a process of its own.
fn run(test: &str, dir: &std::path::Path, env: &[(&str, &str)]) -> Output {
    let mut command = command(dir, test, env);
    let out =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    assert!(out.status.success(), "{out:?}");
    out
}

/// The traces of the program and of its child, without the part in brackets.
fn traces(test: &str, words: &str) -> (String, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.%p");
    let out =
        run(test, dir.path(), &[("GSHARE_TRACE", words), ("GSHARE_TRACE_FILE", file.to_str().unwrap())]);
    let said = String::from_utf8(out.stdout).unwrap();
    let child = said.lines().find_map(|line| line.split_once("forked: ")).unwrap().1.to_owned();
    let mut traces = (String::new(), String::new());
    for entry in dir.path().read_dir().unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let Some(pid) = name.strip_prefix("trace.") else { continue };
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().all(|line| line.starts_with(&format!("[{pid}."))), "{text}");
        let plain = text.lines().map(|line| line.split_once("] ").unwrap().1.to_owned() + "\n").collect();
        if pid == child { traces.1 = plain } else { traces.0 = plain }
    }
    traces
}

fn is_program(test: &str) -> bool {
    std::env::var("SIM_TEST").is_ok_and(|name| name == test)
}

#[test]
fn calls_are_traced_with_arguments_and_results_also_in_a_child() {
    const TEST: &str = "calls_are_traced_with_arguments_and_results_also_in_a_child";
    if is_program(TEST) {
        return program();
    }
    let (trace, child) = traces(TEST, "calls");
    assert!(trace.contains("call cuInit(Flags=0) = 0 CUDA_SUCCESS\n"), "{trace}");
    let allocation = trace.lines().find(|line| line.starts_with("call cuMemAlloc_v2(")).unwrap();
    assert!(
        allocation.contains(" -> 0x") && allocation.ends_with(", bytesize=4096) = 0 CUDA_SUCCESS"),
        "{allocation}"
    );
    let launch =
        trace.lines().find(|line| line.starts_with("call cuLaunchKernel(f=0x1, gridDimX=1, ")).unwrap();
    assert!(launch.ends_with(" = 400 CUDA_ERROR_INVALID_HANDLE"), "{launch}");
    assert!(trace.lines().all(|line| line.starts_with("call ")), "{trace}");
    assert!(child.starts_with("call cuCtxSynchronize() = ") && child.lines().count() == 1, "{child}");
}

#[test]
fn lookups_say_what_was_not_found_and_why() {
    const TEST: &str = "lookups_say_what_was_not_found_and_why";
    if is_program(TEST) {
        return program();
    }
    let (trace, _) = traces(TEST, "lookups");
    let expected = "lookup cuMemAlloc version=12080 flags=0: cuMemAlloc_v2\n\
        lookup cuNoSuchThing version=12080 flags=0: UNKNOWN NAME\n\
        lookup cuMemAlloc version=1000 flags=0: NEWER THAN ASKED FOR\n";
    assert!(trace.starts_with(expected), "{trace}");
    assert!(
        trace.contains("lookup cuMulticastCreate version=12080 flags=0: cuMulticastCreate (NOT SIMULATED"),
        "{trace}"
    );
    assert!(!trace.contains("call "), "{trace}");
}

#[test]
fn tables_are_traced_by_their_identifier() {
    const TEST: &str = "tables_are_traced_by_their_identifier";
    if is_program(TEST) {
        return program();
    }
    let (trace, _) = traces(TEST, "tables");
    assert_eq!(trace, "table 00010203-0405-0607-0809-0a0b0c0d0e0f: UNKNOWN TABLE\n");
}

#[test]
fn unknown_words_are_reported_and_left_out() {
    const TEST: &str = "unknown_words_are_reported_and_left_out";
    if is_program(TEST) {
        return program();
    }
    let dir = tempfile::tempdir().unwrap();
    let out = run(TEST, dir.path(), &[("GSHARE_TRACE", "everything, tables")]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(
        said.contains("everything unknown; known are calls, lookups, tables, gate, memory, link, none"),
        "{said}"
    );
    assert!(said.contains(": UNKNOWN TABLE\n") && !said.contains("call "), "{said}");
    let out = run(TEST, dir.path(), &[]);
    assert!(!String::from_utf8(out.stderr).unwrap().contains("UNKNOWN TABLE"));
}

#[test]
fn a_file_that_cannot_be_opened_is_reported_and_the_trace_goes_to_stderr() {
    const TEST: &str = "a_file_that_cannot_be_opened_is_reported_and_the_trace_goes_to_stderr";
    if is_program(TEST) {
        return program();
    }
    let dir = tempfile::tempdir().unwrap();
    let out =
        run(TEST, dir.path(), &[("GSHARE_TRACE", "tables"), ("GSHARE_TRACE_FILE", "/no/such/folder/file")]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(said.contains("GSHARE_TRACE_FILE: No such file") && said.contains(": UNKNOWN TABLE\n"), "{said}");
}
