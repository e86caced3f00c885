//! Whether a packer keeps the contract of [`Packer`].
//!
//! # Runs
//! The suite makes random calls on up to six GPUs of several sizes, nonsense included, on two instances at once. It keeps a book
//! beside them, and after each call compares the packer's whole list with the book.

use super::story::{Broken, Log, claim};
use crate::rng::Rng;
use crate::story::Story;
use core::ops::Range;
use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::packer_claims as claims;
use gshare_sched::pack::{Demand, GpuSpec, GpuStatus, PackError, Packer, Placed, Placement};
use std::collections::{BTreeMap, BTreeSet};

/// The rule by which a packer keeps within a GPU's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shares {
    /// Rectangles of time by SMs, which do not overlap.
    Rectangles,
    /// The sum of the guaranteed SM shares.
    Sums,
}

/// The number of calls in a run.
const CALLS: u64 = 150;
const GPUS: u64 = 6;

/// The expected state of the packer.
#[derive(Default)]
struct Book {
    gpus: BTreeMap<GpuId, GpuSpec>,
    held: BTreeMap<PlacementId, Placement>,
    /// Every id given so far.
    given: BTreeSet<PlacementId>,
}

/// A call of the packer.
#[derive(Debug, Clone)]
enum Call {
    Add(GpuId, GpuSpec),
    Remove(GpuId),
    Place(Demand, u64),
    All(Vec<Demand>),
    Gang(Vec<Demand>),
    Release(PlacementId),
}

/// The answer to a call: the new placements, or the released placement.
type Answer = Result<(Vec<Placed>, Option<Placement>), PackError>;

/// Runs the suite over the packers of `make`, which must be equal, without GPUs, and without a limit on GPUs in use.
///
/// # Errors
/// The first broken claim.
pub fn packer(make: &dyn Fn() -> Box<dyn Packer>, shares: Shares, seeds: Range<u64>) -> Result<(), Story> {
    for seed in seeds {
        let log = Log::default();
        random_calls(make, shares, seed, &log).map_err(|broken| log.story(seed, broken))?;
    }
    Ok(())
}

fn random_calls(
    make: &dyn Fn() -> Box<dyn Packer>,
    shares: Shares,
    seed: u64,
    log: &Log,
) -> Result<(), Broken> {
    let (mut rng, mut book) = (Rng::new(seed), Book::default());
    let (mut one, mut two) = (make(), make());
    for number in 0..CALLS {
        let call = random_call(&mut rng, &book, number);
        let before = listing(&*one);
        let answer = carry_out(&mut *one, &call);
        log.note(&format!("call {number}"), &format!("{call:?} -> {answer:?}"));
        claim(carry_out(&mut *two, &call) == answer, claims::SAME, || {
            "another instance answered otherwise".into()
        })?;
        let after = listing(&*one);
        if answer.is_err() {
            claim(before == after, claims::REFUSED, || format!("{before:?} became {after:?}"))?;
        }
        book.enter(&call, &answer, &after, shares)?;
        book.compare(&*one, &after, shares)?;
    }
    Ok(())
}

fn random_demand(rng: &mut Rng) -> Demand {
    let share = |rng: &mut Rng| {
        let tenths = u16::try_from(rng.between(1, 10)).unwrap_or(1) * 1_000;
        let odd = u16::try_from(rng.between(1, 6_000)).unwrap_or(1);
        if rng.percent(3) {
            0
        } else if rng.percent(50) {
            tenths
        } else {
            odd
        }
    };
    let quota = Quota::new(share(rng)).unwrap_or(Quota::WHOLE);
    let sm = SmShare::new(share(rng)).unwrap_or(SmShare::WHOLE);
    let demand = Demand::new(quota, sm).with_memory(Bytes::from_gib(rng.below(12)));
    match rng.percent(20) {
        true => demand.with_apart(u32::try_from(rng.below(2)).unwrap_or(0)),
        false => demand,
    }
}

fn random_call(rng: &mut Rng, book: &Book, number: u64) -> Call {
    let gpu = GpuId::new(u32::try_from(rng.below(GPUS)).unwrap_or(0));
    let several = |rng: &mut Rng| (0..rng.between(1, 4)).map(|_| random_demand(rng)).collect();
    let of = |rng: &mut Rng, ids: Vec<PlacementId>| rng.pick(&ids).copied();
    match rng.below(100) {
        _ if number < 2 => Call::Add(gpu, GpuSpec::new(Bytes::from_gib(16))),
        0..10 => {
            let spec = GpuSpec::new(Bytes::from_gib(rng.between(4, 32)));
            let half = spec.with_size(Quota::WHOLE, SmShare::from_percent(50).unwrap_or(SmShare::WHOLE));
            Call::Add(gpu, if rng.percent(30) { half } else { spec })
        }
        10..15 => Call::Remove(gpu),
        15..20 => Call::All(several(rng)),
        20..26 => Call::Gang(several(rng)),
        26..36 => Call::Place(random_demand(rng), rng.below(1 << GPUS)),
        36..60 => match of(rng, book.held.keys().copied().collect()) {
            Some(id) => Call::Release(id),
            None => Call::Place(random_demand(rng), u64::MAX),
        },
        60..65 => match of(rng, book.given.iter().copied().collect()) {
            Some(id) => Call::Release(id),
            None => Call::Release(PlacementId::new(7, 7)),
        },
        _ => Call::Place(random_demand(rng), u64::MAX),
    }
}

fn accepts(mask: u64) -> impl Fn(GpuId) -> bool {
    move |gpu| mask >> gpu.number().min(63) & 1 == 1
}

fn carry_out(packer: &mut dyn Packer, call: &Call) -> Answer {
    let mut out = Vec::new();
    let released = match call {
        Call::Add(gpu, spec) => packer.add_gpu(*gpu, *spec).map(|()| None),
        Call::Remove(gpu) => packer.remove_gpu(*gpu).map(|()| None),
        Call::Place(demand, u64::MAX) => packer.place(demand).map(|placed| {
            out.push(placed);
            None
        }),
        Call::Place(demand, mask) => packer.place_where(demand, &accepts(*mask)).map(|placed| {
            out.push(placed);
            None
        }),
        Call::All(demands) => packer.place_all(demands, &mut out).map(|()| None),
        Call::Gang(demands) => packer.place_gang(demands, &mut out).map(|()| None),
        Call::Release(id) => packer.release(*id).map(Some),
    }?;
    Ok((out, released))
}

fn listing(packer: &dyn Packer) -> Vec<Placement> {
    let mut all = Vec::new();
    packer.placements(&mut |placement| all.push(*placement));
    all
}

impl Book {
    fn on(&self, gpu: GpuId) -> impl Iterator<Item = &Placement> {
        self.held.values().filter(move |placement| placement.gpu == gpu)
    }

    /// Takes over the effect of a call, which must be its answer and nothing else.
    fn enter(
        &mut self,
        call: &Call,
        answer: &Answer,
        after: &[Placement],
        shares: Shares,
    ) -> Result<(), Broken> {
        let Ok((placed, released)) = answer else { return self.refusal(call, shares) };
        let demands = match call {
            Call::Add(gpu, spec) => {
                let known = self.gpus.insert(*gpu, *spec).is_some();
                claim(!known, claims::ADDED, || format!("{gpu} was there"))?;
                &[][..]
            }
            Call::Remove(gpu) => {
                let used = self.on(*gpu).count();
                claim(used == 0, claims::IN_USE, || format!("{gpu} holds {used}"))?;
                let known = self.gpus.remove(gpu).is_some();
                claim(known, claims::ABSENT, || format!("{gpu}"))?;
                &[]
            }
            Call::Place(demand, _) => core::slice::from_ref(demand),
            Call::All(demands) | Call::Gang(demands) => demands,
            Call::Release(id) => {
                let gone = self.held.remove(id);
                claim(gone.is_some(), claims::STALE, || format!("{id} was released"))?;
                claim(gone == *released, claims::RETURNED, || format!("{released:?}"))?;
                &[]
            }
        };
        let answers: Vec<Demand> = placed.iter().map(|placed| placed.placement.demand).collect();
        claim(answers == demands, claims::ORDER, || format!("{answers:?} to {demands:?}"))?;
        let mut taken = BTreeSet::new();
        for Placed { placement, .. } in placed {
            let (id, gpu, demand) = (placement.id, placement.gpu, placement.demand);
            claim(demand.validate().is_ok(), claims::INVALID, || format!("{demand:?}"))?;
            claim(self.given.insert(id), claims::ONCE, || format!("{id} was given before"))?;
            claim(self.gpus.contains_key(&gpu), claims::POOL, || format!("{gpu}"))?;
            if let Call::Place(_, mask) = call {
                claim(accepts(*mask)(gpu), claims::ALLOWED, || format!("{gpu} was not accepted"))?;
            }
            let twice = !taken.insert(gpu) && matches!(call, Call::Gang(_));
            claim(!twice, claims::GANG, || format!("{gpu} was given twice"))?;
            self.held.insert(id, *placement);
        }
        // On a rearranged GPU other placements get new rectangles, and nothing else may change.
        let rearranged = |gpu: GpuId| placed.iter().any(|one| one.rearranged && one.placement.gpu == gpu);
        for now in after.iter().filter(|now| rearranged(now.gpu)) {
            if let Some(held) = self.held.get_mut(&now.id) {
                held.rectangle = now.rectangle;
            }
        }
        Ok(())
    }

    /// Checks that a refused call did not have to succeed.
    fn refusal(&self, call: &Call, shares: Shares) -> Result<(), Broken> {
        let fits = |demand: &Demand, spec: &GpuSpec| {
            let wide = shares == Shares::Sums || spec.quota >= demand.quota;
            wide && spec.sm >= demand.limit() && spec.memory >= demand.memory
        };
        let refused = match call {
            Call::Place(demand, mask) => {
                let empty = |(gpu, spec): (&GpuId, &GpuSpec)| {
                    accepts(*mask)(*gpu) && self.on(*gpu).next().is_none() && fits(demand, spec)
                };
                demand.validate().is_ok() && self.gpus.iter().any(empty)
            }
            Call::Release(id) => self.held.contains_key(id),
            Call::Add(gpu, _) => !self.gpus.contains_key(gpu),
            Call::Remove(gpu) => self.gpus.contains_key(gpu) && self.on(*gpu).next().is_none(),
            Call::All(_) | Call::Gang(_) => false,
        };
        claim(!refused, claims::TAKEN, || "it was refused".into())
    }

    /// Checks that the packer's list equals the book, and keeps within its bounds.
    fn compare(&self, packer: &dyn Packer, after: &[Placement], shares: Shares) -> Result<(), Broken> {
        claim(after.is_sorted_by_key(|placement| placement.gpu), claims::BY_GPU, || format!("{after:?}"))?;
        let same =
            after.len() == self.held.len() && after.iter().all(|now| self.held.get(&now.id) == Some(now));
        claim(same, claims::HELD, || format!("{:?} are held, {after:?} are listed", self.held.values()))?;
        let mut statuses: Vec<GpuStatus> = Vec::new();
        packer.gpus(&mut |status| statuses.push(*status));
        let specs = statuses.iter().map(|status| (status.gpu, status.spec));
        claim(specs.eq(self.gpus.iter().map(|(gpu, spec)| (*gpu, *spec))), claims::BY_ID, || {
            format!("{statuses:?}")
        })?;
        for status in statuses {
            let on: Vec<Placement> = self.on(status.gpu).copied().collect();
            let memory: u64 = on.iter().map(|placement| placement.demand.memory.get()).sum();
            claim(memory <= status.spec.memory.get(), claims::MEMORY, || {
                format!("{} has {}, {memory} bytes are placed", status.gpu, status.spec.memory)
            })?;
            let told = (usize::try_from(status.placements).ok(), status.memory_used.get());
            claim(told == (Some(on.len()), memory), claims::STATUS, || format!("{status:?}"))?;
            let found = packer.gpu(status.gpu) == Some(status);
            claim(found, claims::FOUND_GPU, || format!("{}", status.gpu))?;
            let mut there = Vec::new();
            packer.placements_on(status.gpu, &mut |placement| there.push(placement.id));
            let listed = after.iter().filter(|now| now.gpu == status.gpu).map(|now| now.id);
            claim(listed.eq(there.iter().copied()), claims::LISTED, || format!("{there:?}"))?;
            for (index, a) in on.iter().enumerate() {
                let together = |b: &&Placement| a.demand.apart.is_some() && a.demand.apart == b.demand.apart;
                claim(!on[..index].iter().any(|b| together(&b)), claims::APART, || {
                    format!("group {:?} on {}", a.demand.apart, status.gpu)
                })?;
                claim(packer.placement(a.id) == Some(*a), claims::FOUND, || format!("{}", a.id))?;
            }
            within(shares, &status.spec, &on)?;
        }
        Ok(())
    }
}

fn within(shares: Shares, spec: &GpuSpec, on: &[Placement]) -> Result<(), Broken> {
    if shares == Shares::Sums {
        let sum: u32 = on.iter().map(|placement| u32::from(placement.demand.sm.get())).sum();
        return claim(sum <= spec.sm.get().into(), claims::SUMS, || {
            format!("{sum} basis points on {} of them", spec.sm.get())
        });
    }
    let edges = |placement: &Placement| {
        let at = placement.rectangle;
        let (x, y) = (u32::from(at.time_offset.get()), u32::from(at.sm_offset.get()));
        (x, y, x + u32::from(at.quota.get()), y + u32::from(at.sm.get()))
    };
    for (index, placement) in on.iter().enumerate() {
        let (x, y, right, top) = edges(placement);
        let size = (placement.rectangle.quota, placement.rectangle.sm);
        let whole = size == (placement.demand.quota, placement.demand.sm)
            && right <= spec.quota.get().into()
            && top <= spec.sm.get().into();
        claim(whole, claims::SIZE, || format!("{placement:?}"))?;
        for other in &on[..index] {
            let (ox, oy, oright, otop) = edges(other);
            let meets = x < oright && ox < right && y < otop && oy < top;
            claim(!meets, claims::OVERLAP, || format!("{placement:?} and {other:?}"))?;
        }
    }
    Ok(())
}
