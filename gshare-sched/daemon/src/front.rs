//! The thread that answers questions: the admin socket and the HTTP endpoint.
//!
//! One thread with one asynchronous runtime serves both, apart from the daemon's loop. A slow or silent reader only holds one
//! connection, until its time-out or until [`Crowd`] closes it for a newcomer.

use crate::access::Access;
use crate::crowd::Crowd;
use crate::handle::Handle;
use crate::peer::peer_of;
use crate::{admin, http};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::oneshot;

/// Most connections served at a time by the admin socket, and by the metrics endpoint.
const MOST: usize = 32;
/// Pause after a failed accept. Most likely no descriptor is left, and other connections must end first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bound listeners before the thread serves them.
#[derive(Debug)]
pub(crate) struct Listeners {
    pub(crate) admin: StdUnixListener,
    pub(crate) metrics: Option<http::Listener>,
}

/// The running thread. Dropping it stops the thread and removes the socket file of the metrics endpoint.
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
            let task = tokio::spawn(admin::answer(stream, uid, handle.clone()));
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
        let user = user_of(&stream);
        crowd.enter(user, tokio::spawn(http::answer(stream, handle.clone(), loopback)).abort_handle());
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

/// The peer of a TCP connection: its address and, on this host, its user. The user is needed so that no local user closes
/// the connections of another.
fn user_of(stream: &TcpStream) -> Option<(IpAddr, Option<u32>)> {
    let (peer, own) = (stream.peer_addr().ok()?, stream.local_addr().ok()?);
    let table = |name| std::fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
    let uid = uid_in(&table("tcp"), peer, own).or_else(|| uid_in(&table("tcp6"), peer, own));
    Some((peer.ip(), uid))
}

/// The user of the socket from `peer` to `own` in a kernel table, which has addresses as hexadecimal words of the machine.
fn uid_in(table: &str, peer: SocketAddr, own: SocketAddr) -> Option<u32> {
    let written = |address: SocketAddr| {
        let bytes = match address.ip() {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let words =
            bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        words.map(|word| format!("{word:08X}")).collect::<String>() + &format!(":{:04X}", address.port())
    };
    let (from, to) = (written(peer), written(own));
    table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let found = fields.next() == Some(&from) && fields.next() == Some(&to);
        fields.nth(4).filter(|_| found)?.parse().ok()
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_behind_a_connection_is_known() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:2506 0100007F:D431 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0\n\
            1: 0100007F:D431 0100007F:2506 01 00000000:00000000 00:00000000 00000000  1000        0 2 1 0\n";
        let (peer, own) = ("127.0.0.1:54321".parse().unwrap(), "127.0.0.1:9478".parse().unwrap());
        assert_eq!(uid_in(table, peer, own), Some(1000));
        assert_eq!(uid_in(table, own, peer), Some(0));
        assert_eq!(uid_in(table, peer, "127.0.0.2:9478".parse().unwrap()), None);
    }
}
