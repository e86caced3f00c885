//! Bounds on the connections of a service.
//!
//! # Problem
//! Some peers connect and stay silent, by mistake or on purpose. A full service that refuses newcomers is then closed to
//! everybody, and a service without a bound runs out of descriptors.
//!
//! # Algorithm
//! [`Crowd`] is for connections that end after one short answer. A newcomer always gets in: when no place is free, the crowd
//! closes the oldest connection of the user with the most connections. A flood by one user thus closes connections of this
//! user only.
//!
//! [`admits`] is for connections that last as long as their process and must not be closed for other users. A user may have
//! three times as many connections as are still free (dynamic thresholds, Choudhury and Hahne 1998). Example: of 4,096
//! connections the first user gets at most 3,072, the second 768 of the rest, and the third 192.

use std::collections::VecDeque;
use tokio::task::AbortHandle;

/// Most connections of a user for each connection still free.
const PER_FREE: u64 = 3;

/// Whether a user with `own` connections may have another, when `taken` of `most` are in use. One user alone may have up to
/// three quarters of `most`, rounded up; a user without connections is admitted as long as one is free.
pub(crate) fn admits(own: u32, taken: u32, most: u32) -> bool {
    u64::from(own) < PER_FREE * u64::from(most.saturating_sub(taken))
}

/// Connections being served, oldest first, with their users. See the [module](self).
#[derive(Debug)]
pub(crate) struct Crowd<U> {
    most: usize,
    open: VecDeque<(U, AbortHandle)>,
}

impl<U: Copy + PartialEq> Crowd<U> {
    /// A crowd of at most `most` connections.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, open: VecDeque::new() }
    }

    /// Adds a user's connection, served by a task, and closes another connection if need be.
    pub(crate) fn enter(&mut self, user: U, task: AbortHandle) {
        self.open.retain(|(_, task)| !task.is_finished());
        self.open.push_back((user, task));
        if self.open.len() > self.most {
            let users: Vec<U> = self.open.iter().map(|(user, _)| *user).collect();
            if let Some((_, task)) = victim(&users).and_then(|index| self.open.remove(index)) {
                task.abort();
            }
        }
    }
}

/// The first place of the most frequent user; of two such users, the user with the older connection.
fn victim<U: Copy + PartialEq>(users: &[U]) -> Option<usize> {
    let count = |user: U| users.iter().filter(|other| **other == user).count();
    (0..users.len()).rev().max_by_key(|index| count(users[*index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_user_with_the_most_makes_room() {
        assert_eq!(victim::<u32>(&[]), None);
        assert_eq!(victim(&[7]), Some(0));
        assert_eq!(victim(&[7, 9, 9]), Some(1));
        assert_eq!(victim(&[7, 9, 9, 7]), Some(0));
        assert_eq!(victim(&[5, 9, 7, 9, 9]), Some(1));
    }

    #[test]
    fn no_number_of_users_below_six_locks_the_next_one_out() {
        let (most, mut taken) = (4096, 0);
        let mut had = Vec::new();
        for _ in 0..6 {
            let mut own = 0;
            while admits(own, taken, most) {
                (own, taken) = (own + 1, taken + 1);
            }
            had.push(own);
        }
        assert_eq!(had, [3072, 768, 192, 48, 12, 3]);
        assert!(admits(0, 1, 2) && !admits(0, 2, 2) && !admits(0, 3, 2));
    }
}
