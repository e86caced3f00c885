//! The bell by which the program's threads wake the helper thread: a pipe, made again when the program has closed it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::pipe::{PipeFlags, pipe_with};

use crate::sys::descriptor::Descriptor;
use crate::sys::lock::Lock;

/// Both ends of a pipe.
#[derive(Debug)]
pub(crate) struct Rope {
    heard: Descriptor,
    pulled: Descriptor,
}

impl Rope {
    fn new() -> Option<Arc<Self>> {
        let (heard, pulled) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        Some(Arc::new(Self { heard: Descriptor::new(heard), pulled: Descriptor::new(pulled) }))
    }

    fn is_ours(&self) -> bool {
        self.heard.is_ours() && self.pulled.is_ours()
    }

    /// Makes the pipe unreadable until the next ring.
    pub(crate) fn hush(&self) {
        while self.heard.is_ours() && matches!(rustix::io::read(&self.heard, &mut [0u8; 64]), Ok(64)) {}
    }
}

/// The helper thread polls the end that becomes readable.
impl AsFd for Rope {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.heard.as_fd()
    }
}

/// Wakes the helper thread.
#[derive(Debug)]
pub(crate) struct Bell(Lock<Option<Arc<Rope>>>);

impl Bell {
    pub(crate) fn new() -> Self {
        Self(Lock::new(Rope::new()))
    }

    /// The pipe; `None` while the process has no descriptors to spare.
    pub(crate) fn rope(&self) -> Option<Arc<Rope>> {
        let mut rope = self.0.lock();
        if !rope.as_ref().is_some_and(|rope| rope.is_ours()) {
            *rope = Rope::new();
        }
        rope.clone()
    }

    /// Wakes the helper thread, or lets it find its work at its next look.
    pub(crate) fn ring(&self) {
        if let Some(rope) = self.rope() {
            // A full pipe means an earlier ring, so the helper thread has been woken already.
            let _ = rustix::io::write(&rope.pulled, &[1]);
        }
    }
}
