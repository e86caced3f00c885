//! Any bytes are a node and what goes wrong on it: devices, instances, programs, delays and faults. Both engines that decide, the
//! daemon's and the meter of each process, are driven through it, and the book of the whole node is checked: no panic, no promise
//! of memory broken, no process waits past the bound.

use arbitrary::{Result, Unstructured};
use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Bytes, Duration, Quota, QuotaRange, ResourceSpec, SmShare, Timestamp};
use gshare_sim::node::{
    Delays, Fault, GpuPlan, InstancePlan, Kinds, NodePlan, NodeWorld, Program, Setup, Shape,
};

/// Long enough for a process that is killed to come back, short enough for a fuzzer.
const WINDOWS: u64 = 6;
const FAULTS: usize = 12;

fn times(input: &mut Unstructured<'_>, least: u64, most: u64) -> Result<(Duration, Duration)> {
    let (a, b) = (input.int_in_range(least..=most)?, input.int_in_range(least..=most)?);
    Ok((Duration::from_micros(a.min(b)), Duration::from_micros(a.max(b))))
}

fn program(input: &mut Unstructured<'_>) -> Result<Program> {
    let synchronises = input.arbitrary()?;
    Ok(Program {
        kernel: times(input, 1, 1_000)?,
        functions: input.int_in_range(1..=4)?,
        // The charge of a program with a wait for each kernel is mostly predicted: the whole-node simulation excepts such programs with
        // kernels that vary, and those that vary by more than a tenth.
        spread_percent: if synchronises { 1 } else { input.int_in_range(1..=10)? },
        synchronises,
        pause: times(input, 1, 2_000)?,
        silences: input.arbitrary()?,
        allocates: input.arbitrary()?,
        weights: Bytes::ZERO,
    })
}

/// An instance that may have `most` of the device promised, so that all requests can be met.
fn instance(input: &mut Unstructured<'_>, most: u16, memory: Bytes) -> Result<InstancePlan> {
    let quota = |points: u16| Quota::new(points).expect("at most the whole");
    let request = input.int_in_range(0..=most)?;
    let range = QuotaRange::new(quota(request), quota(input.int_in_range(request.max(1)..=10_000)?));
    let sm = SmShare::new(input.int_in_range(1..=10_000)?).expect("at most the whole");
    let limit = if input.arbitrary()? { Some(Bytes(input.int_in_range(1 << 20..=memory.0)?)) } else { None };
    let spec = ResourceSpec::new(range.expect("a request is at most its limit"), sm, limit);
    let on_loss = if input.arbitrary()? { OnDaemonLoss::Closed } else { OnDaemonLoss::Open };
    let mut processes = Vec::new();
    for _ in 0..input.int_in_range(1..=3)? {
        let start = Timestamp::from_nanos(input.int_in_range(0..=200_000_000)?);
        processes.push((start, program(input)?));
    }
    Ok(InstancePlan { spec: spec.expect("more than nothing of each"), on_loss, processes })
}

fn plan(input: &mut Unstructured<'_>, window: Duration) -> Result<NodePlan> {
    let (seed, mut gpus, mut faults) = (input.arbitrary()?, Vec::new(), Vec::new());
    let length = window.saturating_mul(WINDOWS).as_nanos();
    for _ in 0..input.int_in_range(0..=FAULTS)? {
        let at = Timestamp::from_nanos(input.int_in_range(0..=length)?);
        faults.push((at, input.arbitrary::<Fault>()?));
    }
    faults.sort_by_key(|(at, _)| *at);
    for _ in 0..input.int_in_range(1..=2)? {
        let memory = Bytes(input.int_in_range(16 << 20..=512 << 20)?);
        let count: u16 = input.int_in_range(1..=4)?;
        let instances = (0..count).map(|_| instance(input, 10_000 / count, memory)).collect::<Result<_>>()?;
        gpus.push(GpuPlan { shape: Shape::Any, memory, instances });
    }
    let delays = Delays { frame: times(input, 5, 40)?, wake: times(input, 2, 60)? };
    let in_flight = Duration::from_micros(input.int_in_range(200..=10_000)?);
    Ok(NodePlan { seed, kinds: Kinds::default(), gpus, delays, in_flight, windows: WINDOWS, faults })
}

/// Runs the history in the bytes.
///
/// # Panics
/// When an engine does, or a rule of the book is broken.
pub(crate) fn run_bytes(bytes: &[u8]) {
    let setup = Setup::daemon();
    // Bytes that run out are zeroes; it is an error only for types without a least value.
    let Ok(plan) = plan(&mut Unstructured::new(bytes), setup.terms.window) else { return };
    if let Err(failure) = NodeWorld::new(&plan, &setup, false).run(plan.seed) {
        panic!("{failure}\n{plan:?}");
    }
}
