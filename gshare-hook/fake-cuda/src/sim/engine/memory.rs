//! The device memory that processes are charged for, and the allocations that they share.

use super::{Engine, Result, SimError};
use crate::sim::layout::{MEM_KINDS, MemKind, PROC_LIVE, PROCS, SHARED, SharedAlloc};

impl Engine<'_> {
    /// Charges bytes on a GPU to process `p`.
    pub(crate) fn charge(&mut self, p: u32, gpu: u32, kind: MemKind, bytes: u64) -> Result<()> {
        let g = &self.l.gpus[gpu as usize];
        let free = g.mem_total.saturating_sub(g.mem_used);
        if bytes > free {
            return Err(SimError::OutOfMemory { asked: bytes, free });
        }
        self.count(p as usize, gpu as usize, kind as usize, bytes);
        Ok(())
    }

    /// Takes a charge back.
    pub(crate) fn refund(&mut self, p: u32, gpu: u32, kind: MemKind, bytes: u64) {
        self.uncount(p as usize, gpu as usize, kind as usize, bytes);
    }

    fn count(&mut self, p: usize, gpu: usize, kind: usize, bytes: u64) {
        let account = &mut self.l.procs[p].gpus[gpu];
        account.mem[kind] += bytes;
        account.mem_peak = account.mem_peak.max(account.mem.iter().sum());
        self.l.gpus[gpu].mem_used += bytes;
    }

    fn uncount(&mut self, p: usize, gpu: usize, kind: usize, bytes: u64) {
        let account = &mut self.l.procs[p].gpus[gpu];
        let bytes = bytes.min(account.mem[kind]);
        account.mem[kind] -= bytes;
        self.l.gpus[gpu].mem_used -= bytes;
    }

    /// (free, total) bytes of a GPU.
    pub(crate) fn memory(&self, gpu: u32) -> (u64, u64) {
        let g = &self.l.gpus[gpu as usize];
        (g.mem_total - g.mem_used, g.mem_total)
    }

    /// Makes bytes charged to `p` known to other processes; `p` holds one reference. Returns (slot, generation).
    pub(crate) fn share(&mut self, p: u32, gpu: u32, kind: MemKind, bytes: u64) -> Result<(u32, u32)> {
        let id = (0..SHARED).find(|&i| self.l.shared[i].payer == 0).ok_or(SimError::NoSlot("sharing"))?;
        let generation = self.l.shared[id].generation.wrapping_add(1);
        let mut refs = [0; PROCS];
        refs[p as usize] = 1;
        self.l.shared[id] = SharedAlloc { bytes, generation, gpu, kind: kind as u32, payer: 0, refs };
        self.l.shared[id].payer = p + 1;
        Ok((id as u32, generation))
    }

    /// A shared allocation, unless it has gone.
    fn shared(&mut self, id: u32, generation: u32) -> Option<&mut SharedAlloc> {
        let entry = self.l.shared.get_mut(id as usize);
        entry.filter(|entry| entry.payer != 0 && entry.generation == generation)
    }

    /// Takes one more reference to a shared allocation.
    pub(crate) fn join(&mut self, p: u32, id: u32, generation: u32) -> Result<()> {
        let refs = &mut self.shared(id, generation).ok_or(SimError::Gone)?.refs[p as usize];
        *refs = refs.saturating_add(1);
        Ok(())
    }

    /// Drops a reference; the last reference returns the memory. If the payer leaves earlier, another holder pays.
    pub(crate) fn leave(&mut self, p: u32, id: u32, generation: u32) {
        let Some(entry) = self.shared(id, generation) else { return };
        let Some(left) = entry.refs[p as usize].checked_sub(1) else { return };
        entry.refs[p as usize] = left;
        if left == 0 && entry.payer == p + 1 {
            self.move_payer(id as usize);
        }
    }

    /// Moves the account to another holder after the payer's last reference, or returns the bytes.
    pub(super) fn move_payer(&mut self, id: usize) {
        let entry = self.l.shared[id];
        let (gpu, kind) = (entry.gpu as usize, entry.kind as usize % MEM_KINDS);
        let heir = (0..PROCS).find(|&q| entry.refs[q] > 0 && self.l.procs[q].state == PROC_LIVE);
        self.uncount(entry.payer as usize - 1, gpu, kind, entry.bytes);
        if let Some(q) = heir {
            self.count(q, gpu, kind, entry.bytes);
        }
        self.l.shared[id].payer = heir.map_or(0, |q| q as u32 + 1);
    }
}
