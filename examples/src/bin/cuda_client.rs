//! A CUDA program without any knowledge of gshare. It allocates memory until none is left, launches 1 ms kernels for some
//! seconds without a wait, and prints its observations as one JSON object.
//!
//! ```sh
//! gshare run --sim --mem 256MiB --quota 0.4 -- target/release/cuda_client 3
//! ```
#![allow(unsafe_code, reason = "a kernel launch is unsafe in any CUDA API")]

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, DriverError, LaunchConfig, sys};
use cudarc::nvrtc::Ptx;
use gshare_fake_cuda_spec::spin_ptx;
use std::time::{Duration, Instant};

const KERNEL: &str = "spin_1000us_full";
const BLOCK: usize = 16 << 20;

fn main() -> Result<()> {
    let seconds = std::env::args()
        .nth(1)
        .map_or(Ok(3.0), |text| text.parse())
        .context("usage: cuda_client [SECONDS]")?;
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let (free, total) = context.mem_get_info()?;

    let mut blocks = Vec::new();
    let refusal = loop {
        match stream.alloc_zeros::<u8>(BLOCK) {
            Ok(block) => blocks.push(block),
            Err(DriverError(code)) => break code,
        }
    };
    let allocated = blocks.len() * BLOCK;
    drop(blocks);

    let kernel = context.load_module(Ptx::from_src(spin_ptx(KERNEL, 1_000)))?.load_function(KERNEL)?;
    // Every SM is busy, so that nothing else runs beside it.
    let config = LaunchConfig { grid_dim: (1024, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    let (start, mut launches) = (Instant::now(), 0u64);
    while start.elapsed() < Duration::from_secs_f64(seconds) {
        // SAFETY: the kernel takes no arguments and touches no memory.
        unsafe { stream.launch_builder(&kernel).launch(config) }?;
        launches += 1;
    }
    let elapsed = start.elapsed().as_secs_f64();
    let seen = serde_json::json!({
        "device": context.name()?,
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": allocated,
        "out_of_memory": refusal == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        "launches_per_s": launches as f64 / elapsed,
    });
    println!("{seen}");
    Ok(())
}
