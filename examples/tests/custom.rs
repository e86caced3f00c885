//! The README of this package shows its programs' output.

use std::process::Command;

#[test]
fn the_readme_shows_what_the_custom_host_prints() {
    let output = Command::new(env!("CARGO_BIN_EXE_custom")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.lines().count() > 6 && include_str!("../README.md").contains(&printed), "{printed}");
}
