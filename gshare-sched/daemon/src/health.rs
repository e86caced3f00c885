//! The thread that asks the driver for lost devices.

use crate::nvml::LostDevice;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Period of the question.
const PERIOD: Duration = Duration::from_secs(1);

/// Lost devices by the last answer; `None` before the first answer.
pub(crate) type Lost = Arc<Mutex<Option<Vec<LostDevice>>>>;

/// The source of news of devices that are lost or come back.
pub(crate) type Health = dyn FnMut() -> Option<Vec<LostDevice>> + Send;

/// Asks until the returned sender is dropped. The drop does not wait for the thread, since the driver may never answer.
pub(crate) fn watch(mut health: Box<Health>, lost: Lost) -> io::Result<Sender<()>> {
    let (stop, stopped) = channel();
    let run = move || {
        loop {
            if let Some(found) = health() {
                let before = lost.lock().replace(found.clone()).unwrap_or_default();
                for device in found.iter().filter(|device| !before.contains(device)) {
                    tracing::warn!(device.uuid, device.why, "a device is lost");
                }
                for device in before.iter().filter(|device| found.iter().all(|one| one.uuid != device.uuid)) {
                    tracing::warn!(device.uuid, "a device is back");
                }
            }
            if stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    };
    std::thread::Builder::new().name("gshared-health".into()).spawn(run)?;
    Ok(stop)
}
