//! The header agrees with the library: a C program that uses all of it is compiled and run, and no function is missing.

use gshare_modelstore::server::{Server, ServerConfig};
use std::path::{Path, PathBuf};
use std::process::Command;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where cargo puts the shared library beside this test.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let deps = program.parent().unwrap();
    let places = [deps.to_owned(), deps.parent().unwrap().to_owned()];
    places
        .iter()
        .map(|place| place.join("libgshare_store.so"))
        .find(|path| path.exists())
        .expect("libgshare_store.so")
}

#[test]
fn a_c_program_stores_a_model_and_takes_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("store.sock");
    let store = Server::new(ServerConfig::at(&socket)).unwrap().spawn().unwrap();
    let program = dir.path().join("client");
    let library = library();
    let compiled = Command::new("gcc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(here().join("tests/client.c"))
        .arg("-I")
        .arg(here().join("include"))
        .arg(&library)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program)
        .arg(&socket)
        .env("LD_LIBRARY_PATH", library.parent().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    store.stop();
}

#[test]
fn the_header_declares_what_the_library_defines() {
    let names = |text: &str, before: &str| -> Vec<String> {
        let mut names: Vec<String> = (text.split(before).skip(1))
            .filter_map(|rest| rest.split('(').next())
            .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
            .map(str::to_owned)
            .collect();
        names.sort();
        names.dedup();
        names
    };
    let defined = names(&std::fs::read_to_string(here().join("src/lib.rs")).unwrap(), "extern \"C\" fn ");
    let header = std::fs::read_to_string(here().join("include/gshare_store.h")).unwrap();
    // Declarations stand at the beginning of a line, with the name after the type.
    let declared: Vec<String> = (header.lines())
        .filter(|line| line.contains('(') && !line.starts_with([' ', '/', '#', '*']))
        .filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next().map(str::to_owned))
        .collect();
    let mut declared = declared;
    declared.sort();
    assert_eq!(declared, defined);
}
