//! The node daemon as a library, in another crate without a command line of it: a host's own socket, clock and metrics, several of them in
//! one process.

use gshare_core::Timestamp;
use gshared::{Config, Daemon, DaemonError, ManualClock};
use std::sync::Arc;

#[test]
fn a_host_has_daemons_of_its_own() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let [first, second] = ["first", "second"].map(|name| dir.path().join(name).with_extension("sock"));
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(5)));
    let ours = Daemon::builder(Config::at(&first)).clock(Arc::clone(&clock) as _).build()?.spawn()?;
    let theirs = Daemon::new(Config::at(&second))?.spawn()?;

    // The host owns the clock: it stands still until the host moves it.
    assert_eq!(ours.handle().snapshot()?.now_ns, Timestamp::from_millis(5));
    // Answered however soon one question follows another.
    for now in (6..1_000).map(Timestamp::from_millis) {
        clock.set(now);
        assert_eq!(ours.handle().snapshot()?.now_ns, now);
        assert_ne!(theirs.handle().snapshot()?.now_ns, now);
    }

    // The host owns the metrics as well.
    ours.handle().reload_failed();
    let refused =
        |daemon: &gshared::Running| daemon.handle().metrics().map(|text| text.contains("refused\"} 1"));
    assert!(refused(&ours)? && !refused(&theirs)?);

    // A second daemon leaves the first alone, and a socket is free again when its daemon has stopped.
    assert!(matches!(Daemon::new(Config::at(&first)), Err(DaemonError::InUse { .. })));
    let handle = ours.handle().clone();
    ours.stop()?;
    assert!(matches!(handle.snapshot(), Err(DaemonError::Stopped)));
    Daemon::new(Config::at(&first))?.spawn()?.stop()?;
    assert!(theirs.handle().snapshot()?.clients.is_empty());
    Ok(())
}
