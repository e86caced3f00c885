//! The thread that asks the driver about devices. The answer may take long, and a process may name devices that do not exist.

use crate::handle::Handle;
use crate::nvml::DeviceFact;
use gshare_core::{ConnId, DeviceUuid};
use std::io;
use std::sync::mpsc::{Sender, channel};

/// A connection and its device. The connection waits for the answer and sends nothing else, so at most one question per connection is open.
pub(crate) type Question = (ConnId, DeviceUuid);

/// The source of facts about a node's devices.
pub(crate) type Facts = dyn FnMut(DeviceUuid) -> Option<DeviceFact> + Send;

/// Answers questions until the returned sender is dropped. The drop does not wait for the thread, since the driver may never answer.
pub(crate) fn answer(mut facts: Box<Facts>, handle: Handle) -> io::Result<Sender<Question>> {
    let (questions, asked) = channel::<Question>();
    let run = move || {
        for (conn, uuid) in asked {
            handle.found(conn, facts(uuid));
        }
    };
    std::thread::Builder::new().name("gshared-facts".into()).spawn(run)?;
    Ok(questions)
}
