//! Dilu's placement against a linear scan, and the claims of its section 3.3.

use gshare_core::{Bytes, FunctionId, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, PackError, Packer, Workload};
use gshare_sched::place::{DiluConfig, DiluPacker};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

#[derive(Debug, Clone)]
enum Op {
    AddGpu { gpu: u32, memory: u64, sm: u16 },
    RemoveGpu { gpu: u32 },
    Place(Demand),
    PlaceWhere(Demand, u8),
    Gang(Vec<Demand>),
    Batch(Vec<Demand>),
    Release(usize),
}

fn demand() -> impl Strategy<Value = Demand> {
    let share = prop_oneof![(1u16..=10).prop_map(|tenth| tenth * 1_000), 1u16..=6_000];
    let memory = prop_oneof![(0u64..30).prop_map(|gib| gib * GIB), 0u64..30 * GIB];
    let workload = prop_oneof![Just(Workload::Inference), Just(Workload::Training)];
    (share.clone(), share, memory, prop::option::of(0u32..4), workload, prop::option::weighted(0.1, 0u32..2))
        .prop_map(|(sm, more, memory, function, workload, apart)| {
            let limit = SmShare::new((sm + more).min(10_000)).unwrap();
            let mut demand = Demand::new(Quota::WHOLE, SmShare::new(sm).unwrap())
                .with_sm_limit(limit)
                .with_memory(Bytes(memory))
                .with_workload(workload);
            // Functions 0 and 1 serve, 2 and 3 train.
            if let Some(function) = function {
                let training = u32::from(workload == Workload::Training) * 2;
                demand = demand.with_function(FunctionId::new(training + function % 2));
            }
            demand.apart = apart;
            demand
        })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => (0u32..8, prop_oneof![Just(40u64), Just(24), Just(80)], prop_oneof![Just(10_000u16), Just(5_000)])
            .prop_map(|(gpu, gib, sm)| Op::AddGpu { gpu, memory: gib * GIB, sm }),
        1 => (0u32..8).prop_map(|gpu| Op::RemoveGpu { gpu }),
        12 => demand().prop_map(Op::Place),
        1 => (demand(), any::<u8>()).prop_map(|(demand, mask)| Op::PlaceWhere(demand, mask)),
        1 => prop::collection::vec(demand(), 0..4).prop_map(Op::Gang),
        1 => prop::collection::vec(demand(), 0..4).prop_map(Op::Batch),
        8 => any::<usize>().prop_map(Op::Release),
    ]
}

/// The state that the packer should have, read off its public face: one status a GPU, and the placements.
struct Scan<'a> {
    pool: &'a DiluPacker,
    config: DiluConfig,
}

impl Scan<'_> {
    fn held(&self, gpu: GpuId) -> Vec<Demand> {
        let mut held = Vec::new();
        self.pool.placements_on(gpu, &mut |placement| held.push(placement.demand));
        held
    }

    /// Algorithm 1 as a loop over every GPU.
    fn choose(&self, demand: &Demand, allowed: impl Fn(GpuId) -> bool) -> Option<GpuId> {
        let config = self.config;
        let mut open: Option<((u128, u32), GpuId)> = None;
        let mut affine: Option<((u128, u32), GpuId)> = None;
        let mut empty: Option<((u64, u16, u32), GpuId)> = None;
        self.pool.gpus(&mut |status| {
            let gpu = status.gpu;
            let held = self.held(gpu);
            let sum = |of: fn(&Demand) -> u64| held.iter().map(of).sum::<u64>();
            let sm = u64::from(status.spec.sm.get());
            let memory = status.spec.memory.get();
            let request = sm - sum(|d| u64::from(d.sm.get()));
            let limit = sm * u64::from(config.gamma_bp) / 10_000 - sum(|d| u64::from(d.limit().get()));
            let free = memory - sum(|d| d.memory.get());
            let fits = request >= u64::from(demand.sm.get())
                && limit >= u64::from(demand.limit().get())
                && free >= demand.memory.get()
                && (demand.apart.is_none() || held.iter().all(|d| d.apart != demand.apart));
            if !fits || !allowed(gpu) {
                return;
            }
            if held.is_empty() {
                let key = (memory >> 20, status.spec.sm.get(), gpu.number());
                if empty.is_none_or(|best| key < best.0) {
                    empty = Some((key, gpu));
                }
                return;
            }
            let part = |free: u64, whole: u64| (u128::from(free) << 20) / u128::from(whole);
            let score = 6_000 * part(request, sm) + 4_000 * part(free, memory);
            let key = (score, gpu.number());
            if open.is_none_or(|best| key < best.0) {
                open = Some((key, gpu));
            }
            if demand.workload == Workload::Inference
                && self.is_affine(demand, gpu)
                && affine.is_none_or(|best| key < best.0)
            {
                affine = Some((key, gpu));
            }
        });
        let open = open.map(|(_, gpu)| gpu);
        affine.map(|(_, gpu)| gpu).or(open).or(empty.map(|(_, gpu)| gpu))
    }

    /// A worker of a job here, another worker of it beside this function elsewhere, and this function not here yet.
    fn is_affine(&self, demand: &Demand, gpu: GpuId) -> bool {
        let Some(function) = demand.function else { return false };
        let serves = |d: &Demand| d.function == Some(function);
        let here = self.held(gpu);
        if here.iter().any(serves) {
            return false;
        }
        let mut found = false;
        self.pool.gpus(&mut |status| {
            let there = self.held(status.gpu);
            found |= there.iter().any(serves)
                && there.iter().any(|job| {
                    job.workload == Workload::Training
                        && job.function.is_some()
                        && here.iter().any(|worker| worker.function == job.function)
                });
        });
        found
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    /// After any sequence: the same GPU as the scan, sums within Omega, gamma and memory, errors change nothing, stale
    /// ids are refused.
    #[test]
    fn dilu_equals_the_linear_scan(ops in prop::collection::vec(op(), 1..80)) {
        let config = DiluConfig::default();
        let mut pool = DiluPacker::new(config).unwrap();
        for gpu in 0..3 {
            pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes(40 * GIB))).unwrap();
        }
        let mut live: Vec<PlacementId> = Vec::new();
        for op in ops {
            let before = everything(&pool);
            let scan = Scan { pool: &pool, config };
            let mut out = Vec::new();
            let result = match op {
                Op::AddGpu { gpu, memory, sm } => {
                    let spec = GpuSpec::new(Bytes(memory)).with_size(Quota::WHOLE, SmShare::new(sm).unwrap());
                    pool.add_gpu(GpuId::new(gpu), spec)
                }
                Op::RemoveGpu { gpu } => pool.remove_gpu(GpuId::new(gpu)),
                Op::Place(demand) => {
                    let expected = scan.choose(&demand, |_| true);
                    let placed = pool.place(&demand);
                    prop_assert_eq!(placed.as_ref().ok().map(|placed| placed.placement.gpu), expected);
                    placed.map(|placed| out.push(placed))
                }
                Op::PlaceWhere(demand, mask) => {
                    let allowed = |gpu: GpuId| mask >> gpu.number() & 1 == 1;
                    let expected = scan.choose(&demand, allowed);
                    let placed = pool.place_where(&demand, &allowed);
                    prop_assert_eq!(placed.as_ref().ok().map(|placed| placed.placement.gpu), expected);
                    placed.map(|placed| out.push(placed))
                }
                Op::Gang(demands) => {
                    let result = pool.place_gang(&demands, &mut out);
                    let mut gpus: Vec<GpuId> = out.iter().map(|placed| placed.placement.gpu).collect();
                    gpus.sort_unstable();
                    gpus.dedup();
                    prop_assert_eq!(gpus.len(), out.len(), "a gang has a GPU per worker");
                    prop_assert!(result.is_err() || out.len() == demands.len());
                    result
                }
                Op::Batch(demands) => {
                    let result = pool.place_all(&demands, &mut out);
                    let answered: Vec<Demand> = out.iter().map(|placed| placed.placement.demand).collect();
                    prop_assert!(answered == demands || result.is_err());
                    result
                }
                Op::Release(pick) if !live.is_empty() => {
                    let id = live.swap_remove(pick % live.len());
                    pool.release(id).unwrap();
                    prop_assert_eq!(pool.release(id), Err(PackError::UnknownPlacement { id }));
                    prop_assert_eq!(pool.placement(id), None);
                    Ok(())
                }
                Op::Release(_) => Ok(()),
            };
            if result.is_err() {
                prop_assert_eq!(everything(&pool), before, "an error changes nothing");
                prop_assert!(out.is_empty());
            }
            live.extend(out.iter().map(|placed| placed.placement.id));
            let mut known: Vec<PlacementId> =
                everything(&pool).iter().map(|placement| placement.id).collect();
            known.sort_unstable();
            live.sort_unstable();
            prop_assert_eq!(&known, &live);
        }
    }
}

fn everything(pool: &DiluPacker) -> Vec<gshare_sched::pack::Placement> {
    let mut all = Vec::new();
    pool.placements(&mut |placement| all.push(*placement));
    all
}

fn job(sm: u16, limit: u16, gib: u64) -> Demand {
    Demand::new(Quota::WHOLE, SmShare::from_percent(sm).unwrap())
        .with_sm_limit(SmShare::from_percent(limit).unwrap())
        .with_memory(Bytes(gib * GIB))
}

/// The GPU that the demand would go to.
fn goes_to(pool: &mut DiluPacker, demand: &Demand) -> GpuId {
    let placed = pool.place(demand).unwrap().placement;
    pool.release(placed.id).unwrap();
    placed.gpu
}

fn pool(gpus: u32) -> DiluPacker {
    let mut pool = DiluPacker::new(DiluConfig::default()).unwrap();
    for gpu in 0..gpus {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes(40 * GIB))).unwrap();
    }
    pool
}

/// Dilu, Algorithm 1, line 25, and the module's worked example: the best fit weighs SMs and memory.
#[test]
fn best_fit_weighs_request_and_memory() {
    let mut pool = pool(2);
    let a = pool.place(&job(50, 50, 30)).unwrap().placement;
    let b = pool.place(&job(70, 70, 10)).unwrap().placement;
    assert_eq!((a.gpu, b.gpu), (GpuId::new(0), GpuId::new(1)));
    assert_eq!(goes_to(&mut pool, &job(20, 20, 5)), GpuId::new(0));
    assert_eq!(goes_to(&mut pool, &job(20, 20, 20)), GpuId::new(1));
}

/// Dilu, section 3.3, principle 1: the second instance of a function goes beside the second worker of the job that
/// its first instance lives with, even where another GPU fits better.
#[test]
fn affinity_gives_the_workers_of_a_job_equal_neighbours() {
    let mut pool = pool(3);
    let worker = job(50, 60, 20).with_workload(Workload::Training).with_function(FunctionId::new(7));
    let mut out = Vec::new();
    pool.place_gang(&[worker, worker], &mut out).unwrap();
    let serve = job(10, 20, 4).with_function(FunctionId::new(1));
    let first = pool.place(&serve).unwrap().placement.gpu;
    assert_eq!(first, GpuId::new(0));
    // GPU 0 is now the fuller of the two, so best fit alone would choose it again.
    assert_eq!(goes_to(&mut pool, &job(10, 20, 4)), GpuId::new(0));
    assert_eq!(pool.place(&serve).unwrap().placement.gpu, GpuId::new(1));
}

/// Dilu, section 3.3: limits may sum to gamma = 1.5 times the SMs, requests to Omega = 1.
#[test]
fn requests_keep_omega_and_limits_keep_gamma_exactly() {
    let mut pool = pool(1);
    // Ten times 0.1 is exactly 1.0 in integers; in floating point the tenth is refused.
    for _ in 0..10 {
        pool.place(&job(10, 15, 1)).unwrap();
    }
    assert!(matches!(pool.place(&job(1, 1, 1)), Err(PackError::NoRoom { .. })));
}

#[test]
fn bad_configurations_are_typed_errors() {
    let error = DiluPacker::new(DiluConfig::default().with_gamma_bp(9_999)).unwrap_err();
    assert_eq!(error.to_string(), "gamma_bp is 9999: need 10000 to 1000000");
}
