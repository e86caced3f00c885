//! Which users may connect: root, the daemon's own user, and those that the configuration names.

use crate::config::Config;
use parking_lot::RwLock;

/// Which users may talk to the daemon. Shared with the admin thread, so that a reload is in force there too.
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

    /// Root and the daemon's own user always.
    pub(crate) fn allows(&self, uid: u32) -> bool {
        let users = self.0.read();
        users.any || uid == 0 || uid == rustix::process::geteuid().as_raw() || users.listed.contains(&uid)
    }
}
