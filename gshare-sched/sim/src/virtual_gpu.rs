//! A GPU in virtual time: kernels take turns on its SMs.
//!
//! # Problem
//! A scheduler of tokens is right only if the device below it, without any knowledge of tokens, ends up shared as promised. A
//! simulation therefore needs a device with the essential behaviour: a launched kernel cannot be taken back, one client's kernels
//! run in order, and several clients' kernels run at once while their SMs suffice.
//!
//! # Algorithm
//! 1. Each client has one queue (its stream). Only the head of a queue can start.
//! 2. When a kernel arrives or ends, the device tries the heads in the order of their launches, and each head with enough free SMs
//!    starts. A head without enough SMs is passed over: the hardware's block scheduler gives free SMs to any kernel able to use
//!    them, and knows no fairness.
//! 3. A started kernel runs for its duration.
//!
//! Example: A (60 % of the SMs, 2 ms), B (60 %, 1 ms) and C (40 %, 1 ms) are launched at 0. A and C start at 0, B
//! waits until 2 ms and ends at 3 ms; A was busy for 2 ms, B and C for 1 ms each.
//!
//! # Invariants
//! The running kernels' SMs never add up to more than the device's SMs; a client's kernels end in the order of their launches.
//!
//! # Cost
//! `O(clients)` per launch and per completion.
//!
//! # Differences from hardware
//! A kernel starts as a whole or not at all (hardware starts as many blocks as fit), and neighbours do not slow each
//! other down through caches and memory.

use gshare_core::{ClientId, Duration, SmShare, Timestamp};
use std::collections::{BTreeMap, VecDeque};

/// One kernel launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// The client of the launch.
    pub client: ClientId,
    /// A number returned to the host at the kernel's end (a lease, a request).
    pub tag: u64,
    /// The kernel's time once it runs.
    pub duration: Duration,
    /// The SMs in use while the kernel runs.
    pub sm: SmShare,
}

/// An ended kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The kernel with its tag.
    pub kernel: Kernel,
    /// The beginning of its run.
    pub started: Timestamp,
    /// The end of its run.
    pub ended: Timestamp,
}

/// A device that runs kernels in virtual time. See the [module](self).
#[derive(Debug, Clone, Default)]
pub struct VirtualGpu {
    queues: BTreeMap<ClientId, VecDeque<(u64, Kernel)>>,
    running: Vec<Completion>,
    now: Timestamp,
    launched: u64,
}

impl VirtualGpu {
    /// An idle device.
    pub fn new() -> Self {
        Self::default()
    }

    /// Launches a kernel at `now`; it runs in its turn.
    pub fn launch(&mut self, now: Timestamp, kernel: Kernel) {
        debug_assert!(
            now >= self.now && self.next_completion().is_none_or(|end| end >= now),
            "advance first"
        );
        self.now = now;
        let queue = self.queues.entry(kernel.client).or_default();
        queue.push_back((self.launched, kernel));
        self.launched += 1;
        // A kernel behind another kernel of its queue changes nothing for now.
        if queue.len() == 1 {
            self.start_what_fits();
        }
    }

    /// The end of the next kernel to end.
    pub fn next_completion(&self) -> Option<Timestamp> {
        self.running.iter().map(|run| run.ended).min()
    }

    /// Moves the time to `now`, and appends the kernels ended by then in the order of their ends (with equal ends, in the order of
    /// their starts).
    pub fn advance(&mut self, now: Timestamp, completed: &mut Vec<Completion>) {
        while let Some(end) = self.next_completion().filter(|&end| end <= now) {
            self.now = end;
            self.running.retain(|run| {
                if run.ended == end {
                    completed.push(*run);
                }
                run.ended != end
            });
            self.start_what_fits();
        }
        self.now = self.now.max(now);
    }

    /// Drops the queue of a departed client. Its running kernels run to their end, the worst behaviour of hardware.
    pub fn drop_queue(&mut self, client: ClientId) {
        self.queues.remove(&client);
    }

    /// Loses the device: no running or waiting kernel ever completes.
    pub fn lose(&mut self) {
        self.queues.clear();
        self.running.clear();
    }

    /// The number of a client's running and waiting kernels.
    pub fn in_flight(&self, client: ClientId) -> usize {
        let waiting = self.queues.get(&client).map_or(0, VecDeque::len);
        waiting + self.running.iter().filter(|run| run.kernel.client == client).count()
    }

    /// SMs occupied by running kernels, in basis points.
    pub fn sm_busy(&self) -> u32 {
        self.running.iter().map(|run| u32::from(run.kernel.sm.get())).sum()
    }

    fn start_what_fits(&mut self) {
        let whole = u32::from(SmShare::WHOLE.get());
        let mut busy = self.sm_busy();
        let mut heads: Vec<(u64, ClientId)> = self
            .queues
            .iter()
            .filter(|(client, _)| self.running.iter().all(|run| run.kernel.client != **client))
            .filter_map(|(client, queue)| queue.front().map(|(number, _)| (*number, *client)))
            .collect();
        heads.sort_unstable();
        for (_, client) in heads {
            let Some(queue) = self.queues.get_mut(&client) else { continue };
            let fits = queue.front().is_some_and(|(_, head)| busy + u32::from(head.sm.get()) <= whole);
            let Some((_, kernel)) = fits.then(|| queue.pop_front()).flatten() else { continue };
            if queue.is_empty() {
                self.queues.remove(&client);
            }
            busy += u32::from(kernel.sm.get());
            self.running.push(Completion { kernel, started: self.now, ended: self.now + kernel.duration });
        }
        debug_assert!(self.sm_busy() <= whole, "more SMs in use than there are");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kernel(slot: u32, millis: u64, percent: u16) -> Kernel {
        Kernel {
            client: ClientId::new(slot, 0),
            tag: 0,
            duration: Duration::from_millis(millis),
            sm: SmShare::from_percent(percent).unwrap(),
        }
    }

    #[test]
    fn the_worked_example_of_the_module() {
        let mut gpu = VirtualGpu::new();
        for kernel in [kernel(0, 2, 60), kernel(1, 1, 60), kernel(2, 1, 40)] {
            gpu.launch(Timestamp::ZERO, kernel);
        }
        let mut done = Vec::new();
        gpu.advance(Timestamp::from_millis(10), &mut done);
        let ends: Vec<_> = done.iter().map(|run| (run.kernel.client.slot(), run.ended.as_nanos())).collect();
        assert_eq!(ends, [(2, 1_000_000), (0, 2_000_000), (1, 3_000_000)]);
    }

    #[test]
    fn a_client_that_is_gone_leaves_only_what_already_runs() {
        let mut gpu = VirtualGpu::new();
        gpu.launch(Timestamp::ZERO, kernel(0, 1, 100));
        gpu.launch(Timestamp::ZERO, kernel(0, 1, 100));
        gpu.drop_queue(ClientId::new(0, 0));
        assert_eq!(gpu.in_flight(ClientId::new(0, 0)), 1);
        let mut done = Vec::new();
        gpu.advance(Timestamp::from_millis(10), &mut done);
        assert_eq!(done.len(), 1);
    }

    proptest! {
        /// Every kernel runs once, for its duration, in its client's order, and never with too many SMs in use.
        #[test]
        fn kernels_run_once_in_order_within_the_sms(
            launches in prop::collection::vec((0u32..4, 1u64..5, 1u16..=100, 0u64..3), 1..40)
        ) {
            let (mut gpu, mut done, mut now) = (VirtualGpu::new(), Vec::new(), Timestamp::ZERO);
            for (tag, &(slot, millis, percent, gap)) in launches.iter().enumerate() {
                now = now + Duration::from_millis(gap);
                gpu.advance(now, &mut done);
                gpu.launch(now, Kernel { tag: tag as u64, ..kernel(slot, millis, percent) });
            }
            gpu.advance(Timestamp::from_millis(100_000), &mut done);
            prop_assert_eq!(done.len(), launches.len());
            for run in &done {
                prop_assert_eq!(run.ended.saturating_since(run.started), run.kernel.duration);
                let beside: u32 = done.iter()
                    .filter(|other| other.started <= run.started && run.started < other.ended)
                    .map(|other| u32::from(other.kernel.sm.get())).sum();
                prop_assert!(beside <= 10_000);
            }
            for slot in 0..4 {
                let tags: Vec<_> =
                    done.iter().filter(|run| run.kernel.client.slot() == slot).map(|run| run.kernel.tag).collect();
                prop_assert!(tags.is_sorted());
            }
        }
    }
}
