//! Parking: a thread moves the process's blocks to host memory, and back to the device.
//!
//! The meter has stopped launches when it orders a move. The thread then closes the [guard](crate::launch::guard), waits for the work on
//! the device, and moves block after block. The account of memory follows each of them. A move to host memory that fails brings the
//! blocks back before the guard opens. The process is as before then, and the meter hears the reason.
#![allow(unsafe_code)] // the argument of a thread

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration as StdDuration;

use gshare_core::reason::Obstacle;
use gshare_cuda_abi::types::{CUdevice, CUresult};
use gshare_meter::{Movable, Move};

use crate::device::Device;
use crate::device::blocks::{self, Blocks, Lane};
use crate::device::book::Kind;
use crate::device::devices::visible_devices;
use crate::launch::control::CONTROL;
use crate::launch::guarded;
use crate::process::question::Request;
use crate::process::runtime::{PROCESS, Runtime};
use crate::process::spare;
use crate::sys::stderr::tell;
use crate::sys::{clock, host_memory, thread};

/// The longest wait for the calls of other threads that are under way when memory is to move.
const CALLS_END: StdDuration = StdDuration::from_secs(1);
/// The shortest time between two looks for an obstacle, which go through all records of memory, in ns.
const LOOK_NS: u64 = 100_000_000;
/// The longest wait at the process's end for a move that is under way.
const MOVE_ENDS: StdDuration = StdDuration::from_secs(1);

/// The blocks of a process that can be parked.
#[derive(Debug)]
pub(crate) struct Parking {
    pub(crate) blocks: Blocks,
    /// Whether a thread moves them.
    moves: AtomicBool,
    /// The time of the last look for the obstacle, in ns, and its code.
    looked: AtomicU64,
    obstacle: AtomicU64,
}

/// Makes the process parkable, if its driver and kernel allow parking. `ordinal` is its only device.
pub(crate) fn begin(runtime: &Runtime, ordinal: CUdevice) {
    let made = if visible_devices() != 1 {
        Err(Obstacle::Devices)
    } else if !blocks::are_possible(ordinal) || !guarded::install() {
        Err(Obstacle::Driver)
    } else {
        Ok(Parking {
            blocks: Blocks::new(ordinal),
            moves: AtomicBool::new(false),
            looked: AtomicU64::new(0),
            obstacle: AtomicU64::new(0),
        })
    };
    if let Err(why) = made {
        let why = gshare_core::reason::Reason::from(why);
        tell(&format!("GSHARE_PARK=1: this process cannot be parked: {why}"));
    }
    if made.is_ok() {
        spare::install();
    }
    let _ = runtime.parking.set(made);
}

impl Runtime {
    /// The blocks, if the process can be parked.
    pub(crate) fn blocks(&self) -> Option<&Blocks> {
        self.parking.get()?.as_ref().ok().map(|parking| &parking.blocks)
    }

    /// The movable memory of a device, for the meter.
    pub(crate) fn movable(&self, device: &Device) -> Option<Movable> {
        let parking = match self.parking.get()? {
            Ok(parking) => parking,
            Err(why) => return Some(Movable { bytes: 0, obstacle: Some(*why), missed: 0 }),
        };
        let (here, away) = parking.blocks.bytes();
        let bytes = match (CONTROL.guard.is_open(), parking.moves.load(Ordering::Acquire)) {
            (true, _) => here,
            (false, true) => here + away,
            (false, false) => away,
        };
        let obstacle = if bytes == 0 && device.memory.used() > 0 { self.obstacle(parking) } else { None };
        Some(Movable { bytes, obstacle, missed: CONTROL.guard.missed().into() })
    }

    /// Why no memory can move, although some is in use.
    fn obstacle(&self, parking: &Parking) -> Option<Obstacle> {
        let now = clock::now_ns();
        if now.saturating_sub(parking.looked.load(Ordering::Relaxed)) >= LOOK_NS {
            parking.looked.store(now, Ordering::Relaxed);
            let most = [
                (Obstacle::Shared, parking.blocks.shared()),
                (Obstacle::Pools, self.charged(&[Kind::Pool])),
                (Obstacle::Handles, self.charged(&[Kind::Handle])),
                (Obstacle::Objects, self.charged(&[Kind::Pointer, Kind::Array, Kind::Heap])),
            ];
            let most = most.into_iter().filter(|(_, bytes)| *bytes > 0).max_by_key(|(_, bytes)| *bytes);
            let code = most.map_or(0, |(obstacle, _)| obstacle.code());
            parking.obstacle.store(code.into(), Ordering::Relaxed);
        }
        u8::try_from(parking.obstacle.load(Ordering::Relaxed)).ok().and_then(Obstacle::from_code)
    }

    fn charged(&self, kinds: &[Kind]) -> u64 {
        let found = self.book.select(|key, record| kinds.contains(&key.0) && record.device >= 0);
        found.iter().map(|(_, record)| record.bytes).sum()
    }

    /// Carries an order of the meter out, and returns the answer to an order that ends at once.
    pub(crate) fn move_memory(&self, device: &'static Device, order: Move) -> Option<Result<(), Obstacle>> {
        let Some(Ok(parking)) = self.parking.get() else { return Some(Err(Obstacle::Driver)) };
        if order == Move::Cancel {
            return CONTROL.guard.cancel().then_some(Err(Obstacle::Work));
        }
        if parking.moves.swap(true, Ordering::AcqRel) {
            // An earlier move was given up, and its thread still waits for the device.
            return Some(Err(Obstacle::Work));
        }
        let entry = if order == Move::ToHost { parks } else { returns };
        let argument = core::ptr::from_ref(device).cast_mut().cast();
        if thread::spawn(entry, argument) != 0 {
            parking.moves.store(false, Ordering::Release);
            return Some(Err(Obstacle::HostMemory));
        }
        None
    }

    /// Waits at the end of the process for a move that is under way.
    pub(crate) fn end_moves(&self) {
        let Some(Ok(parking)) = self.parking.get() else { return };
        let step = StdDuration::from_millis(1);
        for _ in 0..MOVE_ENDS.as_millis() {
            if !parking.moves.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(step);
        }
    }
}

extern "C" fn parks(device: *mut c_void) -> *mut c_void {
    in_thread(device, to_host)
}

extern "C" fn returns(device: *mut c_void) -> *mut c_void {
    in_thread(device, |runtime, blocks, device| Some(to_device(runtime, blocks, device)))
}

/// The result of a move; `None` where the meter has heard it.
type Moved = Option<Result<(), Obstacle>>;

fn in_thread(
    device: *mut c_void,
    work: fn(&'static Runtime, &'static Blocks, &'static Device) -> Moved,
) -> *mut c_void {
    // SAFETY: `move_memory` passed the device, which is never freed.
    let device = unsafe { device.cast::<Device>().as_ref() };
    if let (Some(device), Some(runtime)) = (device, PROCESS.runtime())
        && let Some(Ok(parking)) = runtime.parking.get()
    {
        let done = std::panic::catch_unwind(|| work(runtime, &parking.blocks, device));
        parking.moves.store(false, Ordering::Release);
        if let Some(result) = done.unwrap_or(Some(Err(Obstacle::Driver))) {
            runtime.ask(Request::Moved(device, result));
        }
    }
    core::ptr::null_mut()
}

/// A lane in one of the process's contexts.
fn lane(runtime: &Runtime, blocks: &Blocks) -> Option<Lane> {
    blocks.contexts().into_iter().chain(runtime.metering.contexts.handles()).find_map(Lane::new)
}

fn to_host(runtime: &'static Runtime, blocks: &Blocks, device: &'static Device) -> Moved {
    // The code that gives up the attempt tells the meter.
    let fails = |why: Obstacle| CONTROL.guard.cancel().then_some(Err(why));
    if blocks.bytes().0 > host_memory::room() {
        return Some(Err(Obstacle::HostMemory));
    }
    if CONTROL.capturing() {
        return Some(Err(Obstacle::Capture));
    }
    if !CONTROL.guard.close(|| runtime.metering.threads.all(), CALLS_END) {
        return fails(Obstacle::Work);
    }
    if CONTROL.capturing() {
        return fails(Obstacle::Capture);
    }
    let mut contexts = runtime.metering.contexts.handles();
    contexts.extend(blocks.contexts());
    contexts.sort_unstable();
    contexts.dedup();
    for context in contexts {
        let result = blocks::synchronise(context);
        if !result.is_ok() && result != CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED {
            return fails(Obstacle::Work);
        }
    }
    let Some(lane) = lane(runtime, blocks) else { return fails(Obstacle::Driver) };
    if !CONTROL.guard.seal() {
        return None;
    }
    for address in blocks.addresses(true) {
        let moved = blocks.to_host(address, &lane, |charged, bytes| {
            if runtime.book.recharge(charged, 0).is_some() {
                runtime.release(device.ordinal, bytes);
            }
        });
        if let Err(why) = moved {
            // The bytes were just released, and another process may have them by now. Then the meter has them brought back later.
            return Some(match to_device(runtime, blocks, device) {
                Ok(()) => Err(why),
                Err(_) => Ok(()),
            });
        }
    }
    // All work that used spare blocks is over, and no other has begun.
    runtime.end_spare(blocks, |_| 0, |_| true);
    Some(Ok(()))
}

fn to_device(runtime: &'static Runtime, blocks: &Blocks, device: &'static Device) -> Result<(), Obstacle> {
    // Memory that the program took and freed meanwhile may be in the way.
    runtime.end_spare(blocks, |_| 0, |_| true);
    let (_, total) = blocks.bytes();
    if total > 0 {
        let lane = lane(runtime, blocks).ok_or(Obstacle::Driver)?;
        if !runtime.reserve(device, total) {
            return Err(Obstacle::Device);
        }
        let mut left = total;
        let mut back = |address| {
            blocks.to_device(address, &lane, |charged, bytes| {
                if runtime.book.recharge(charged, bytes).is_some() {
                    left = left.saturating_sub(bytes);
                }
            })
        };
        let moved = blocks.addresses(false).into_iter().try_for_each(|address| {
            let mut moved = back(address);
            if moved == Err(Obstacle::Device) {
                runtime.find_room(device, || {
                    moved = back(address);
                    moved != Err(Obstacle::Device)
                });
            }
            moved
        });
        // The program has freed blocks meanwhile, or they have not come back.
        runtime.release(device.ordinal, left);
        moved?;
    }
    CONTROL.guard.open();
    Ok(())
}
