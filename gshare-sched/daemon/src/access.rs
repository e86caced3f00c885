//! Access of users to the daemon: root, the daemon's own user, and the users in the configuration may connect.

use crate::config::Config;
use parking_lot::RwLock;

/// Users that may connect to the daemon. The admin thread shares this list, so a reload takes effect there too.
#[derive(Debug)]
pub(crate) struct Access(RwLock<Users>);

#[derive(Debug)]
struct Users {
    any: bool,
    listed: Vec<u32>,
}

impl Access {
    pub(crate) fn of(config: &Config) -> Self {
        Self(RwLock::new(Users { any: config.allow_any_user, listed: config.allow_uids.clone() }))
    }

    pub(crate) fn set(&self, config: &Config) {
        let users = Users { any: config.allow_any_user, listed: config.allow_uids.clone() };
        *self.0.write() = users;
    }

    /// Whether a user may connect. Root and the daemon's own user always may.
    pub(crate) fn allows(&self, uid: u32) -> bool {
        let users = self.0.read();
        users.any || uid == 0 || uid == rustix::process::geteuid().as_raw() || users.listed.contains(&uid)
    }
}
