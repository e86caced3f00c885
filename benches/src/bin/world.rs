//! `world`: runs a scenario of the platform in virtual time. See [`gshare_bench::world`].

fn main() -> anyhow::Result<()> {
    gshare_bench::world::main(&gshare_sim::scenario::Own::default())
}
