//! `gshare daemon park` and `gshare daemon unpark`: the device memory of a program goes to host memory, and comes back.

use super::Where;
use anyhow::bail;
use gshare_core::reason::Reason;
use gshared::Progress;
use gshared::admin::{self, ParkOrder};
use std::time::{Duration, Instant};

/// The longest wait for the end of a move.
const PATIENCE: Duration = Duration::from_secs(600);

/// An order for the memory of a program started by `gshare run --park`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Order {
    /// Move a program's device memory to host memory; it comes back by itself when the program launches.
    Park(Program),
    /// Bring a parked program's memory back to the device.
    Unpark(Program),
}

/// The named program.
#[derive(Debug, clap::Args)]
pub(crate) struct Program {
    /// Name of the instance.
    name: String,
    #[command(flatten)]
    place: Where,
}

pub(crate) fn run(order: &Order) -> anyhow::Result<()> {
    let (Program { name, place }, order) = match order {
        Order::Park(program) => (program, ParkOrder::Park),
        Order::Unpark(program) => (program, ParkOrder::Unpark),
    };
    let admin = gshared::config::admin_socket_of(&place.socket());
    let lost = |error| anyhow::anyhow!("no daemon answers at {}: {error}", admin.display());
    let clients = match admin::park(&admin, name, order).map_err(lost)? {
        Ok(clients) => clients,
        Err(refusal) => bail!("{refusal}"),
    };
    let began = Instant::now();
    let on = order == ParkOrder::Park;
    let place = if on { "in host memory" } else { "on the device" };
    if clients.is_empty() {
        println!("{name}: its memory is {place} already");
        return Ok(());
    }
    loop {
        match admin::moved(&admin, &clients, on).map_err(lost)? {
            Progress::Done(bytes) => {
                println!("{name}: {bytes} {place} after {:.1?}", began.elapsed());
                return Ok(());
            }
            Progress::Back(bytes) => {
                println!("{name}: {bytes} on the device again after {:.1?}, since it works", began.elapsed());
                return Ok(());
            }
            Progress::Ended => bail!("`{name}` has ended"),
            Progress::Failed(why) => bail!("`{name}` is not parked: {}", Reason::from(why)),
            Progress::Moves if began.elapsed() > PATIENCE => {
                bail!("the memory of `{name}` is still on the way after {PATIENCE:?} (gshare status)")
            }
            Progress::Moves => {}
        }
    }
}
