//! The thread that asks the driver for lost devices and sensors.

use crate::nvml::News;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Period of the question.
const PERIOD: Duration = Duration::from_secs(1);

/// The last answer; `None` before the first.
pub(crate) type Last = Arc<Mutex<Option<News>>>;

/// The source of news of devices that are lost or come back.
pub(crate) type Health = dyn FnMut() -> Option<News> + Send;

/// Asks until the returned sender is dropped. The drop does not wait for the thread, since the driver may never answer.
pub(crate) fn watch(mut health: Box<Health>, last: Last) -> io::Result<Sender<()>> {
    let (stop, stopped) = channel();
    let run = move || {
        loop {
            if let Some(news) = health() {
                let found = news.0.clone();
                let before = last.lock().replace(news).unwrap_or_default().0;
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
