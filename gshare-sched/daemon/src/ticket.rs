//! Tickets, by which a process that has become another user connects again as the user it was.
//!
//! The kernel states the user of a connection as it is at the connection. A server may start as root, use the device, and then drop
//! its privileges. Under its later user it could neither return to its instance nor, where the daemon serves listed users only,
//! connect at all. A ticket proves the earlier user. It is a keyed hash of user and pid, so it is of no use to another process, and
//! the daemon keeps nothing but the key. The key lies beside the socket, where the next daemon finds it.

use gshare_sched::node::Peer;
use rustix::fs::{Mode, OFlags, open};
use rustix::process::geteuid;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// The key of tickets.
#[derive(Clone)]
pub(crate) struct Tickets([u8; 32]);

gshare_core::debug_fields!(Tickets {});

impl Tickets {
    /// The key in a file of this user, which is made if need be. A file that others can read is replaced.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        if let Some(key) = kept(path) {
            return Ok(Self(key));
        }
        let _ = std::fs::remove_file(path);
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        File::from(open(path, flags, Mode::RUSR | Mode::WUSR)?).write_all(&key)?;
        Ok(Self(key))
    }

    /// The ticket of a process; `None` where its pid cannot be seen.
    pub(crate) fn of(&self, Peer { pid, uid }: Peer) -> Option<u128> {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&uid.to_le_bytes());
        bytes[4..].copy_from_slice(&pid.to_le_bytes());
        let hash = blake3::keyed_hash(&self.0, &bytes);
        let (half, _) = hash.as_bytes().split_first_chunk().expect("a hash has 32 bytes");
        (pid != 0).then(|| u128::from_le_bytes(*half))
    }
}

/// The key in a file, if only this user can have written or read it.
fn kept(path: &Path) -> Option<[u8; 32]> {
    let mut file =
        File::from(open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()).ok()?);
    let about = file.metadata().ok()?;
    let mut key = [0; 32];
    file.read_exact(&mut key).ok()?;
    (about.is_file() && about.uid() == geteuid().as_raw() && about.mode() & 0o077 == 0).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_of_one_user_process_and_key_and_a_key_that_others_can_read_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let peer = Peer { pid: 7, uid: 0 };
        let ticket = Tickets::at(&path).unwrap().of(peer).unwrap();
        let again = Tickets::at(&path).unwrap();
        assert_eq!(again.of(peer), Some(ticket), "the next daemon knows it");
        assert_ne!(again.of(Peer { uid: 1, ..peer }), Some(ticket));
        assert_ne!(again.of(Peer { pid: 8, ..peer }), Some(ticket));
        assert_eq!(again.of(Peer { pid: 0, ..peer }), None);
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert_ne!(Tickets::at(&path).unwrap().of(peer), Some(ticket));
    }
}
