//! Operations on a packer, and a model that answers each by looking at everything. Shared by the property tests, the
//! committed regressions and the fuzz target.
#![allow(dead_code, reason = "each user takes what it needs")]
#![allow(clippy::cast_possible_truncation, reason = "bits of a generator")]

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{
    Demand, GpuSpec, MaxRects, MaxRectsConfig, PackError, Packer, Placed, Placement, Rectangle,
};

/// GPUs are numbered below this in the operations, so that they meet.
const GPUS: u16 = 6;

/// One operation on a pool.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    AddGpu(GpuId, GpuSpec),
    RemoveGpu(GpuId),
    Cordon(GpuId, bool),
    Place(Demand),
    PlaceWhere(Demand, u8),
    PlaceAt(GpuId, Rectangle, Demand),
    PlaceAll(Vec<Demand>),
    PlaceGang(Vec<Demand>),
    Release(usize),
    ReleaseStale(usize),
}

/// Reads one operation from eight bytes: any eight bytes are one.
pub(crate) fn decode(bytes: [u8; 8]) -> Op {
    let [kind, style, rest @ ..] = bytes;
    let word = |i: usize| u16::from_le_bytes([rest[i], rest[i + 1]]);
    let (a, b) = (word(0), word(2));
    let memory = Bytes(u64::from(rest[4] % 8));
    let gpu = GpuId::new(u32::from(u16::from(rest[5]) % GPUS));
    let size = |raw: u16| match style % 4 {
        0 => (raw % 10 + 1) * 1_000,
        1 => (raw % 100 + 1) * 100,
        2 => raw % 5_000 + 1,
        // Small ones, of which a GPU holds dozens.
        _ if style & 0x20 != 0 => (raw % 16 + 8) * 100,
        _ => raw % 10_001,
    };
    let demand = |a: u16, b: u16| {
        let quota = Quota::new(size(a)).unwrap_or_default();
        let sm = SmShare::new(size(b)).unwrap_or_default();
        let demand = Demand::new(quota, sm).with_memory(memory);
        if style & 0xC0 == 0xC0 { demand.with_apart(u32::from(style >> 4 & 1)) } else { demand }
    };
    let several = || {
        let mut state = u32::from(a) << 16 | u32::from(b);
        (0..usize::from(rest[5] % 5))
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                demand((state >> 16) as u16, (state >> 8) as u16)
            })
            .collect::<Vec<_>>()
    };
    match kind % 32 {
        0 | 1 => Op::AddGpu(gpu, GpuSpec::new(Bytes(u64::from(rest[4] % 32)))),
        2 => {
            let spec = GpuSpec::new(Bytes(u64::from(rest[4] % 32)));
            let (w, h) = (Quota::new(size(a)), SmShare::new(size(b)));
            Op::AddGpu(gpu, spec.with_size(w.unwrap_or_default(), h.unwrap_or_default()))
        }
        3 => Op::RemoveGpu(gpu),
        4 => Op::Cordon(gpu, a & 1 == 1),
        5 => Op::PlaceWhere(demand(a, b), rest[5]),
        6 => {
            let demand = demand(a, b);
            let at = |raw: u16| (raw % 11) * 1_000;
            let rectangle = Rectangle {
                time_offset: Quota::new(at(b >> 3)).unwrap_or_default(),
                sm_offset: SmShare::new(at(a >> 3)).unwrap_or_default(),
                quota: demand.quota,
                sm: demand.sm,
            };
            Op::PlaceAt(gpu, rectangle, demand)
        }
        7 => Op::PlaceAll(several()),
        8 => Op::PlaceGang(several()),
        9 => Op::Release(usize::from(a)),
        10..=13 => Op::ReleaseStale(usize::from(a)),
        14..=20 => Op::Release(usize::from(a)),
        _ => Op::Place(demand(a, b)),
    }
}

type Rect = (u16, u16, u16, u16);

fn rect(rectangle: Rectangle) -> Rect {
    (rectangle.time_offset.get(), rectangle.sm_offset.get(), rectangle.quota.get(), rectangle.sm.get())
}

fn meets(a: Rect, b: Rect) -> bool {
    a.0 < b.0 + b.2 && b.0 < a.0 + a.2 && a.1 < b.1 + b.3 && b.1 < a.1 + a.3
}

fn contains(a: Rect, b: Rect) -> bool {
    a.0 <= b.0 && a.1 <= b.1 && b.0 + b.2 <= a.0 + a.2 && b.1 + b.3 <= a.1 + a.3
}

/// The maximal free rectangles by definition.
pub(crate) fn maximal_free(bin: (u16, u16), used: &[Rect]) -> Vec<Rect> {
    let edges = |whole: u16, of: fn(&Rect) -> [u16; 2]| {
        let mut edges: Vec<u16> = used.iter().flat_map(of).chain([0, whole]).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    };
    let xs = edges(bin.0, |r| [r.0, r.0 + r.2]);
    let ys = edges(bin.1, |r| [r.1, r.1 + r.3]);
    let mut free = Vec::new();
    for (i, x) in xs.iter().enumerate() {
        for right in &xs[i + 1..] {
            for (j, y) in ys.iter().enumerate() {
                // Only the highest free top can be maximal.
                let top = ys[j + 1..]
                    .iter()
                    .take_while(|top| !used.iter().any(|r| meets(*r, (*x, *y, right - x, *top - y))))
                    .last();
                if let Some(top) = top {
                    free.push((*x, *y, right - x, top - y));
                }
            }
        }
    }
    let mut maximal: Vec<Rect> =
        free.iter().copied().filter(|a| !free.iter().any(|b| a != b && contains(*b, *a))).collect();
    maximal.sort_unstable();
    maximal
}

#[derive(Debug, Clone)]
struct Bin {
    width: u16,
    height: u16,
    memory: u64,
    cordoned: bool,
    pods: Vec<(PlacementId, Rect, Demand)>,
    free: Vec<Rect>,
}

impl Bin {
    fn refresh(&mut self) {
        let used: Vec<Rect> = self.pods.iter().map(|pod| pod.1).collect();
        self.free = maximal_free((self.width, self.height), &used);
    }

    fn accepts(&self, demand: &Demand) -> bool {
        let used: u64 = self.pods.iter().map(|pod| pod.2.memory.get()).sum();
        let apart = demand.apart.is_none() || self.pods.iter().all(|pod| pod.2.apart != demand.apart);
        !self.cordoned && used + demand.memory.get() <= self.memory && apart
    }
}

/// The pool as a plain list, searched from end to end.
#[derive(Debug, Clone, Default)]
struct Model {
    bins: BTreeMap<u32, Bin>,
}

impl Model {
    /// Best area fit over every hole of every open GPU, then over the empty ones; ties as documented.
    fn choose(&self, demand: &Demand, allowed: impl Fn(GpuId) -> bool) -> Option<(u32, Rect)> {
        let (w, h) = (demand.quota.get(), demand.sm.get());
        let mut best = None;
        for (gpu, bin) in &self.bins {
            if !bin.accepts(demand) || !allowed(GpuId::new(*gpu)) {
                continue;
            }
            for hole in bin.free.iter().filter(|hole| hole.2 >= w && hole.3 >= h) {
                let area = u32::from(hole.2) * u32::from(hole.3);
                let key = (bin.pods.is_empty(), area, hole.2.min(hole.3), *gpu, hole.1, hole.0);
                if best.is_none_or(|(old, _)| key < old) {
                    best = Some((key, (*gpu, (hole.0, hole.1, w, h))));
                }
            }
        }
        best.map(|(_, choice)| choice)
    }
}

/// All that a packer holds: its GPUs, its placements, and the answer to the next demand with its id.
pub(crate) fn held(pool: &MaxRects) -> impl PartialEq + core::fmt::Debug + use<> {
    let (mut gpus, mut placements) = (Vec::new(), Vec::new());
    pool.gpus(&mut |status| gpus.push(*status));
    pool.placements(&mut |placement| placements.push(*placement));
    let least = Quota::new(1).zip(SmShare::new(1)).map(|(quota, sm)| Demand::new(quota, sm));
    (gpus, placements, least.map(|least| pool.clone().place(&least)))
}

/// Runs operations on a packer and on the model, and compares after each.
pub(crate) struct Checker {
    config: MaxRectsConfig,
    pool: MaxRects,
    model: Model,
    live: Vec<PlacementId>,
    stale: Vec<PlacementId>,
}

impl Checker {
    pub(crate) fn new(config: MaxRectsConfig) -> Self {
        Self {
            config,
            pool: MaxRects::new(config),
            model: Model::default(),
            live: Vec::new(),
            stale: Vec::new(),
        }
    }

    /// Applies one operation. Panics when packer and model part.
    pub(crate) fn step(&mut self, op: &Op) {
        let before = held(&self.pool);
        let result = self.apply(op);
        if let Err(error) = result {
            assert_eq!(held(&self.pool), before, "an error changes nothing: {error} after {op:?}");
        }
        self.compare();
    }

    fn apply(&mut self, op: &Op) -> Result<(), PackError> {
        match op {
            Op::AddGpu(gpu, spec) => {
                let known = self.model.bins.contains_key(&gpu.number());
                let result = self.pool.add_gpu(*gpu, *spec);
                assert_eq!(result.is_err(), known || spec.quota.is_zero() || spec.sm.is_zero());
                result?;
                let mut bin = Bin {
                    width: spec.quota.get(),
                    height: spec.sm.get(),
                    memory: spec.memory.get(),
                    cordoned: false,
                    pods: Vec::new(),
                    free: Vec::new(),
                };
                bin.refresh();
                self.model.bins.insert(gpu.number(), bin);
            }
            Op::RemoveGpu(gpu) => {
                let removable = self.model.bins.get(&gpu.number()).is_some_and(|bin| bin.pods.is_empty());
                let result = self.pool.remove_gpu(*gpu);
                assert_eq!(result.is_ok(), removable);
                result?;
                self.model.bins.remove(&gpu.number());
            }
            Op::Cordon(gpu, on) => {
                self.pool.set_cordoned(*gpu, *on)?;
                self.model
                    .bins
                    .get_mut(&gpu.number())
                    .expect("packer and model know the same GPUs")
                    .cordoned = *on;
            }
            Op::Place(demand) => {
                let expected = self.expect(demand, |_| true);
                let result = self.pool.place(demand);
                self.check_placed(expected, &result);
                self.adopt(&result?);
            }
            Op::PlaceWhere(demand, mask) => {
                let allowed = |gpu: GpuId| mask >> (gpu.number() % 8) & 1 == 1;
                let expected = self.expect(demand, allowed);
                let result = self.pool.place_where(demand, &allowed);
                self.check_placed(expected, &result);
                let placed = result?;
                assert!(allowed(placed.placement.gpu));
                self.adopt(&placed);
            }
            Op::PlaceAt(gpu, rectangle, demand) => {
                let at = rect(*rectangle);
                let free = self.model.bins.get(&gpu.number()).is_some_and(|bin| {
                    let uncordoned = Bin { cordoned: false, ..bin.clone() };
                    uncordoned.accepts(demand) && bin.free.iter().any(|hole| contains(*hole, at))
                });
                let result = self.pool.place_at(*gpu, *rectangle, demand);
                assert_eq!(result.is_ok(), free && demand.validate().is_ok());
                let placement = result?;
                assert_eq!(rect(placement.rectangle), at);
                self.adopt(&Placed::new(placement));
            }
            Op::PlaceAll(demands) => {
                let mut out = Vec::new();
                let mut trial = self.model.clone();
                let mut order: Vec<&Demand> = demands.iter().collect();
                let side = |d: &Demand| (d.quota.get(), d.sm.get());
                order.sort_by_key(|d| {
                    let (w, h) = side(d);
                    Reverse((u32::from(w) * u32::from(h), w.max(h)))
                });
                let mut expected = Some(());
                for demand in order {
                    let choice = demand.validate().ok().and_then(|()| trial.choose(demand, |_| true));
                    let Some((gpu, at)) = choice else {
                        expected = None;
                        break;
                    };
                    let bin = trial.bins.get_mut(&gpu).expect("chosen from the model");
                    bin.pods.push((PlacementId::new(u32::MAX, 0), at, *demand));
                    bin.refresh();
                }
                let result = self.pool.place_all(demands, &mut out);
                let literal = self.config.rearrange_gpus == 0;
                if literal {
                    assert_eq!(result.is_ok(), expected.is_some());
                } else if result.is_err() {
                    assert!(out.is_empty());
                }
                result?;
                assert_eq!(out.len(), demands.len());
                for (placed, demand) in out.iter().zip(demands) {
                    assert_eq!(placed.placement.demand, *demand, "answers come in the order of the demands");
                }
                out.iter().for_each(|placed| self.adopt(placed));
            }
            Op::PlaceGang(demands) => {
                let mut out = Vec::new();
                self.pool.place_gang(demands, &mut out)?;
                let mut gpus: Vec<GpuId> = out.iter().map(|placed| placed.placement.gpu).collect();
                gpus.sort_unstable();
                gpus.dedup();
                assert_eq!(gpus.len(), demands.len(), "a gang has a GPU per member");
                out.iter().for_each(|placed| self.adopt(placed));
            }
            Op::Release(pick) => {
                if !self.live.is_empty() {
                    let id = self.live.swap_remove(pick % self.live.len());
                    let known = self.pool.placement(id);
                    let released = self.pool.release(id)?;
                    assert_eq!(known, Some(released));
                    self.stale.push(id);
                    let bin = self
                        .model
                        .bins
                        .get_mut(&released.gpu.number())
                        .expect("packer and model know the same GPUs");
                    bin.pods.retain(|pod| pod.0 != id);
                    bin.refresh();
                }
            }
            Op::ReleaseStale(pick) => {
                if !self.stale.is_empty() {
                    let id = self.stale[pick % self.stale.len()];
                    assert_eq!(self.pool.placement(id), None);
                    assert_eq!(self.pool.release(id), Err(PackError::UnknownPlacement { id }));
                }
                let never = PlacementId::new(u32::MAX, 7);
                assert_eq!(self.pool.release(never), Err(PackError::UnknownPlacement { id: never }));
            }
        }
        Ok(())
    }

    fn expect(&self, demand: &Demand, allowed: impl Fn(GpuId) -> bool) -> Option<(u32, Rect)> {
        demand.validate().ok().and_then(|()| self.model.choose(demand, allowed))
    }

    /// The packer decides as the scan does. With re-arrangement it may also find room where the scan would open a
    /// GPU or finds none; with a limit on open GPUs it may refuse where the scan opens one.
    fn check_placed(&self, expected: Option<(u32, Rect)>, result: &Result<Placed, PackError>) {
        let opens = expected.is_some_and(|(gpu, _)| self.model.bins[&gpu].pods.is_empty());
        match result {
            Ok(placed) if placed.rearranged => assert!(expected.is_none() || opens),
            Ok(placed) => {
                let placement = placed.placement;
                assert_eq!(Some((placement.gpu.number(), rect(placement.rectangle))), expected);
            }
            Err(error) => assert_eq!(expected, None, "{error}"),
        }
    }

    fn adopt(&mut self, placed: &Placed) {
        let Placement { id, gpu, rectangle, demand, .. } = placed.placement;
        self.live.push(id);
        let bin = self.model.bins.get_mut(&gpu.number()).expect("packer and model know the same GPUs");
        bin.pods.push((id, rect(rectangle), demand));
        self.reread();
    }

    /// After a re-arrangement: take the places over from the packer; `compare` checks their conditions.
    fn reread(&mut self) {
        for (gpu, bin) in &mut self.model.bins {
            let mut now = Vec::new();
            self.pool.placements_on(GpuId::new(*gpu), &mut |p| now.push((p.id, rect(p.rectangle), p.demand)));
            if now != bin.pods {
                bin.pods = now;
                bin.refresh();
            }
            let used: Vec<Rect> = bin.pods.iter().map(|pod| pod.1).collect();
            if bin.free.iter().any(|hole| used.iter().any(|pod| meets(*hole, *pod))) {
                bin.refresh();
            }
        }
    }

    fn compare(&self) {
        let mut seen = 0;
        for (gpu, bin) in &self.model.bins {
            let status = self.pool.gpu(GpuId::new(*gpu)).expect("packer and model know the same GPUs");
            let mut now = Vec::new();
            self.pool.placements_on(GpuId::new(*gpu), &mut |p| now.push((p.id, rect(p.rectangle), p.demand)));
            assert_eq!(now, bin.pods);
            seen += now.len();
            for (i, (_, at, demand)) in now.iter().enumerate() {
                assert!(at.0 + at.2 <= bin.width && at.1 + at.3 <= bin.height, "inside the GPU");
                assert!(!now[..i].iter().any(|other| meets(other.1, *at)), "no overlap");
                assert_eq!((at.2, at.3), (demand.quota.get(), demand.sm.get()));
            }
            let memory: u64 = now.iter().map(|pod| pod.2.memory.get()).sum();
            assert!(memory <= bin.memory && status.memory_used == Bytes(memory), "memory is never passed");
            assert_eq!((status.cordoned, status.placements as usize), (bin.cordoned, now.len()));
            let mut free: Vec<Rect> = self.pool.free_rectangles(GpuId::new(*gpu)).map(rect).collect();
            free.sort_unstable();
            assert_eq!(free, bin.free, "the free set is the set of maximal rectangles of gpu{gpu}");
        }
        assert_eq!(seen, self.live.len());
        let open = self.model.bins.values().filter(|bin| !bin.pods.is_empty()).count();
        assert_eq!(self.pool.open_gpus() as usize, open);
    }
}

/// One input of the fuzz target: a byte for the configuration, then operations of eight bytes.
pub(crate) fn run_bytes(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let config = MaxRectsConfig::default().with_rearrange_gpus(u32::from(first >> 2 & 3));
    let mut checker = Checker::new(config);
    for gpu in 0..u32::from(first >> 4 & 3) + 1 {
        checker.step(&Op::AddGpu(GpuId::new(gpu), GpuSpec::new(Bytes(24))));
    }
    for op in rest.chunks_exact(8) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(op);
        checker.step(&decode(bytes));
    }
}
