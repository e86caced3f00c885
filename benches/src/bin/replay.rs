//! `replay SCENARIO`: runs a figure of a paper again. See [`gshare_bench::replay::main`].

fn main() -> anyhow::Result<()> {
    gshare_bench::replay::main(&gshare_sim::scenario::Own::default())
}
