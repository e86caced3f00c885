//! The thread that asks what the driver knows of a device: its answer may take long, and a process may name devices that there are not.

use crate::handle::Handle;
use crate::nvml::DeviceFacts;
use gshare_core::{ConnId, DeviceUuid};
use std::io;
use std::sync::mpsc::{Sender, channel};

/// A connection waits for what is known of a device, and says nothing else meanwhile: there are no more questions than connections.
pub(crate) type Question = (ConnId, DeviceUuid);

/// Answers from now on, until what this gives is dropped. The thread is not waited for then: its driver may never answer.
pub(crate) fn answer(mut facts: Box<dyn DeviceFacts>, handle: Handle) -> io::Result<Sender<Question>> {
    let (questions, asked) = channel::<Question>();
    let run = move || {
        for (conn, uuid) in asked {
            handle.found(conn, facts.find(uuid));
        }
    };
    std::thread::Builder::new().name("gshared-facts".into()).spawn(run)?;
    Ok(questions)
}
