//! The thread that asks for lost devices.

use crate::nvml::{DeviceHealth, LostDevice};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// How often it asks.
const PERIOD: Duration = Duration::from_secs(1);

/// Devices that are lost, as last heard; `None` until something was heard.
pub(crate) type Lost = Arc<Mutex<Option<Vec<LostDevice>>>>;

/// Asks from now on, until what this gives is dropped. The thread is not waited for then: its driver may never answer.
pub(crate) fn watch(mut health: Box<dyn DeviceHealth>, lost: Lost) -> io::Result<Sender<()>> {
    let (stop, stopped) = channel();
    let run = move || {
        loop {
            if let Some(found) = health.lost() {
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
