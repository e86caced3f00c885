//! The thread that answers questions: the admin socket and the HTTP endpoint.
//!
//! One thread with one asynchronous runtime serves both, apart from the daemon's loop: a reader that is slow or silent
//! holds one connection, up to its time-out or until [`Crowd`] closes it for a newcomer, and nothing else.

use crate::access::Access;
use crate::crowd::Crowd;
use crate::handle::Handle;
use crate::peer::peer_of;
use crate::{admin, http};
use std::io;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;

/// Most connections of the admin socket, and of the metrics endpoint, that are served at a time.
const MOST: usize = 32;
/// Pause after a failed accept: most likely no descriptor is left, and other connections must end first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listeners that are not served yet.
#[derive(Debug)]
pub(crate) struct Listeners {
    pub(crate) admin: StdUnixListener,
    pub(crate) metrics: Option<http::Listener>,
}

/// Serves until it is dropped.
#[derive(Debug)]
pub(crate) struct Front {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    unlink: Option<PathBuf>,
}

impl Front {
    pub(crate) fn start(listeners: Listeners, handle: Handle, access: Arc<Access>) -> io::Result<Self> {
        let Listeners { admin, metrics } = listeners;
        let unlink = metrics.as_ref().and_then(http::Listener::path);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        admin.set_nonblocking(true)?;
        let (stop, stopped) = oneshot::channel();
        {
            let _inside = runtime.enter();
            runtime.spawn(serve_admin(UnixListener::from_std(admin)?, handle.clone(), access));
            match metrics {
                None => {}
                Some(http::Listener::Tcp(listener)) => {
                    listener.set_nonblocking(true)?;
                    runtime.spawn(serve_tcp(TcpListener::from_std(listener)?, handle));
                }
                Some(http::Listener::Unix(listener, _)) => {
                    listener.set_nonblocking(true)?;
                    runtime.spawn(serve_unix(UnixListener::from_std(listener)?, handle));
                }
            }
        }
        let thread = std::thread::Builder::new()
            .name("gshared-front".into())
            .stack_size(512 << 10)
            .spawn(move || drop(runtime.block_on(stopped)))?;
        Ok(Self { stop: Some(stop), thread: Some(thread), unlink })
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(path) = &self.unlink {
            let _ = std::fs::remove_file(path);
        }
    }
}

async fn serve_admin(listener: UnixListener, handle: Handle, access: Arc<Access>) {
    let mut crowd = Crowd::new(MOST);
    loop {
        let Some(stream) = accepted(listener.accept().await).await else { continue };
        let Ok(uid) = peer_of(&stream).map(|peer| peer.uid) else { continue };
        if access.allows(uid) {
            let task = tokio::spawn(admin::answer(stream, handle.clone()));
            crowd.enter(uid, task.abort_handle());
        } else {
            tracing::debug!(uid, "this user may not ask");
        }
    }
}

async fn serve_tcp(listener: TcpListener, handle: Handle) {
    let mut crowd = Crowd::new(MOST);
    let loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    loop {
        let Some(stream) = accepted(listener.accept().await).await else { continue };
        // The user behind a TCP connection is unknown: all count as one.
        crowd.enter(0, tokio::spawn(http::answer(stream, handle.clone(), loopback)).abort_handle());
    }
}

async fn serve_unix(listener: UnixListener, handle: Handle) {
    let mut crowd = Crowd::new(MOST);
    loop {
        let Some(stream) = accepted(listener.accept().await).await else { continue };
        let uid = peer_of(&stream).map_or(u32::MAX, |peer| peer.uid);
        crowd.enter(uid, tokio::spawn(http::answer(stream, handle.clone(), false)).abort_handle());
    }
}

async fn accepted<S, A>(result: io::Result<(S, A)>) -> Option<S> {
    match result {
        Ok((stream, _)) => Some(stream),
        Err(error) => {
            tracing::debug!(%error, "a connection was not accepted");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}
