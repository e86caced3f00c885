//! A GPU in virtual time on which clients slow each other down.
//!
//! # Problem
//! A vertical scaler exists because of contention: beside a neighbour on its SMs a kernel takes longer, long before it has to wait.
//! [`VirtualGpu`](crate::virtual_gpu::VirtualGpu) models only waiting, so it cannot show whether a scaler works.
//!
//! # Terms
//! - **lane**: one client's stream; its kernels run one after the other;
//! - **width**: the share of the SMs that a kernel can use, by its own size or by a partition; its **duration** is its time at this
//!   width.
//!
//! # Algorithm
//! The kernels at the heads of the lanes run all at once. While their widths add up to at most the whole, each runs at full speed;
//! otherwise each gets its part in proportion to its width, and is slower by the same factor. Time-slicing of thread blocks among
//! MPS clients gives this result on average.
//!
//! Example: an inference kernel of width 40 % and 2 ms runs beside a trainer's long kernel of width 90 %. The first kernel gets 40
//! / 130 = 30.8 % and takes 2.6 ms.
//!
//! # Invariants
//! Work is an integer (basis points x ns), and a kernel ends at the first nanosecond without work. A lane's kernels end in the
//! order of their launches.
//!
//! # Differences from hardware
//! The model has no caches and no memory bandwidth: kernels within the SMs do not disturb each other. Blocks are not whole.

use gshare_core::{Duration, SmShare, Timestamp};
use std::collections::VecDeque;

/// One kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneKernel {
    /// The kernel's time at its width.
    pub duration: Duration,
    /// The SMs it can use; more than 0.
    pub width: SmShare,
}

impl LaneKernel {
    /// The same kernel within a partition of the SMs: narrower, and longer by as much.
    #[must_use]
    pub fn within(self, partition: SmShare) -> Self {
        if partition >= self.width || partition.is_zero() {
            return self;
        }
        let longer = u128::from(self.duration.as_nanos()) * u128::from(self.width.get());
        let duration = u64::try_from(longer / u128::from(partition.get())).unwrap_or(u64::MAX);
        Self { duration: Duration::from_nanos(duration), width: partition }
    }

    fn work(&self) -> u128 {
        u128::from(self.duration.as_nanos()) * u128::from(self.width.get())
    }
}

#[derive(Debug, Clone, Default)]
struct Lane {
    queue: VecDeque<LaneKernel>,
    /// The work left of the head, in basis points x ns.
    left: u128,
    /// The predicted time of all queued kernels.
    queued: Duration,
}

/// A device with SMs shared in proportion. See the [module](self).
#[derive(Debug, Clone)]
pub struct SharedGpu {
    lanes: Vec<Lane>,
    now: Timestamp,
}

const WHOLE: u128 = 10_000;

impl SharedGpu {
    /// An idle device with this number of lanes.
    pub fn new(lanes: usize) -> Self {
        Self { lanes: vec![Lane::default(); lanes], now: Timestamp::ZERO }
    }

    /// Launches a kernel at the present time of the device. A launch on an unknown lane is dropped.
    pub fn launch(&mut self, lane: usize, kernel: LaneKernel) {
        let Some(lane) = self.lanes.get_mut(lane) else { return };
        if lane.queue.is_empty() {
            lane.left = kernel.work();
        }
        lane.queue.push_back(kernel);
        lane.queued = lane.queued.saturating_add(kernel.duration);
    }

    /// The time of a lane's kernels alone, running kernels included.
    pub fn queued(&self, lane: usize) -> Duration {
        self.lanes.get(lane).map_or(Duration::ZERO, |lane| lane.queued)
    }

    /// The end of the next kernel, if nothing else is launched.
    pub fn next_end(&self) -> Option<Timestamp> {
        let total = self.width();
        let heads = self.lanes.iter().filter_map(|lane| Some((lane, lane.queue.front()?)));
        let ends = heads.map(|(lane, head)| {
            self.now.saturating_add(Duration::from_wide_nanos(lane.left.div_ceil(speed(head, total))))
        });
        ends.min()
    }

    /// Moves the time to `now`, and returns the lane and the end of each kernel ended by then, in the order of these ends.
    pub fn advance(&mut self, now: Timestamp) -> Vec<(usize, Timestamp)> {
        let mut ended = Vec::new();
        while let Some(end) = self.next_end().filter(|end| *end <= now) {
            self.run(end);
            for (number, lane) in self.lanes.iter_mut().enumerate() {
                let over = lane.left == 0;
                let Some(kernel) = over.then(|| lane.queue.pop_front()).flatten() else { continue };
                lane.queued = lane.queued.saturating_sub(kernel.duration);
                lane.left = lane.queue.front().map_or(0, LaneKernel::work);
                ended.push((number, end));
            }
        }
        self.run(now);
        ended
    }

    /// The sum of the widths of all running kernels.
    fn width(&self) -> u128 {
        self.lanes.iter().filter_map(|lane| lane.queue.front()).map(|head| u128::from(head.width.get())).sum()
    }

    /// Works until `now`, before which nothing ends.
    fn run(&mut self, now: Timestamp) {
        let (total, time) = (self.width(), u128::from(now.saturating_since(self.now).as_nanos()));
        for lane in &mut self.lanes {
            if let Some(head) = lane.queue.front() {
                lane.left = lane.left.saturating_sub(speed(head, total) * time);
            }
        }
        self.now = self.now.max(now);
    }
}

/// A kernel's part of the SMs beside a total demand of `total`, in basis points; at least one.
fn speed(kernel: &LaneKernel, total: u128) -> u128 {
    let width = u128::from(kernel.width.get());
    if total <= WHOLE { width.max(1) } else { (width * WHOLE / total).max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kernel(millis: u64, percent: u16) -> LaneKernel {
        let width = SmShare::from_percent(percent).unwrap();
        LaneKernel { duration: Duration::from_millis(millis), width }
    }

    #[test]
    fn the_worked_example_of_the_module() {
        let mut gpu = SharedGpu::new(2);
        gpu.launch(0, kernel(2, 40));
        gpu.launch(1, kernel(50, 90));
        let ended = gpu.advance(Timestamp::from_millis(100));
        assert_eq!(ended[0].0, 0);
        assert!((2_599_000..2_601_000).contains(&ended[0].1.as_nanos()), "{:?}", ended[0]);
        // 2.6 ms at 90 / 130 of its speed, alone from then on.
        assert!((50_590_000..50_610_000).contains(&ended[1].1.as_nanos()), "{:?}", ended[1]);
    }

    #[test]
    fn a_partition_makes_a_kernel_narrower_and_longer() {
        let narrow = kernel(3, 90).within(SmShare::from_percent(30).unwrap());
        assert_eq!((narrow.duration, narrow.width.get()), (Duration::from_millis(9), 3_000));
        assert_eq!(kernel(3, 20).within(SmShare::from_percent(30).unwrap()), kernel(3, 20));
    }

    proptest! {
        /// For every division of the load into calls, each kernel ends once, in its lane's order, never sooner than alone, and the
        /// work done never exceeds the device.
        #[test]
        fn work_is_kept(launches in prop::collection::vec((0usize..3, 1u64..6, 1u16..=100, 0u64..4), 1..40)) {
            let (mut gpu, mut ended, mut now) = (SharedGpu::new(3), Vec::new(), Timestamp::ZERO);
            let mut begun = vec![VecDeque::new(); 3];
            let mut work = 0;
            for &(lane, millis, percent, gap) in &launches {
                now = now + Duration::from_millis(gap);
                ended.extend(gpu.advance(now));
                let kernel = kernel(millis, percent);
                work += kernel.work();
                gpu.launch(lane, kernel);
                begun[lane].push_back((now, kernel.duration));
            }
            ended.extend(gpu.advance(Timestamp::from_millis(100_000)));
            prop_assert_eq!(ended.len(), launches.len());
            prop_assert_eq!(gpu.next_end(), None);
            let mut last = [Timestamp::ZERO; 3];
            for &(lane, end) in &ended {
                // The oldest kernel of the lane ends first, and no two kernels of a lane run at a time.
                let (launched, alone) = begun[lane].pop_front().unwrap();
                prop_assert!(end.saturating_since(launched.max(last[lane])) >= alone);
                last[lane] = end;
            }
            let last = last.iter().max().unwrap().as_nanos();
            prop_assert!(work <= u128::from(last) * WHOLE);
        }
    }
}
