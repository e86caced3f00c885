//! `gshare daemon park` and `gshare daemon unpark`: the device memory of a program goes to host memory, and comes back.

use super::Where;
use anyhow::bail;
use gshare_core::reason::Reason;
use gshare_core::wire::Residence;
use gshare_core::{Bytes, ClientId};
use gshared::Snapshot;
use std::time::{Duration, Instant};

/// Time between two looks at the program's memory.
const LOOK: Duration = Duration::from_millis(50);
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
    let (Program { name, place }, on) = match order {
        Order::Park(program) => (program, true),
        Order::Unpark(program) => (program, false),
    };
    let socket = place.socket();
    let admin = gshared::config::admin_socket_of(&socket);
    let clients = match gshared::admin::park(&admin, name, on) {
        Ok(Ok(clients)) => clients,
        Ok(Err(refusal)) => bail!("{refusal}"),
        Err(error) => bail!("no daemon answers at {}: {error}", admin.display()),
    };
    let began = Instant::now();
    let place = if on { "in host memory" } else { "on the device" };
    if clients.is_empty() {
        println!("{name}: its memory is {place} already");
        return Ok(());
    }
    loop {
        let snapshot = super::snapshot(&socket)?;
        match progress(&snapshot, &clients, on) {
            Progress::Done(bytes) => {
                println!("{name}: {bytes} {place} after {:.1?}", began.elapsed());
                return Ok(());
            }
            Progress::Back(bytes) => {
                println!("{name}: {bytes} on the device again after {:.1?}, since it works", began.elapsed());
                return Ok(());
            }
            Progress::Ended => bail!("`{name}` has ended"),
            Progress::Failed(why) => bail!("`{name}` is not parked: {why}"),
            Progress::Moves if began.elapsed() > PATIENCE => {
                bail!("the memory of `{name}` is still on the way after {PATIENCE:?} (gshare status)")
            }
            Progress::Moves => std::thread::sleep(LOOK),
        }
    }
}

enum Progress {
    Moves,
    Done(Bytes),
    /// The program has taken its memory back meanwhile.
    Back(Bytes),
    Failed(Reason),
    /// None of the clients is there any more.
    Ended,
}

/// The progress of a move of the clients' memory.
fn progress(snapshot: &Snapshot, clients: &[ClientId], on: bool) -> Progress {
    let (mut moved, mut back) = (Bytes::ZERO, Bytes::ZERO);
    let of = |id: &ClientId| snapshot.clients.iter().find(|client| client.client == *id);
    if clients.iter().all(|id| of(id).is_none()) {
        return Progress::Ended;
    }
    for parking in clients.iter().filter_map(of).filter_map(|client| client.parking) {
        match (parking.residence, on) {
            (Residence::Parked | Residence::Missed, true) => moved = moved + parking.bytes,
            // It may have been parked and have come back, or have stayed.
            (Residence::Resident, true) if !parking.ordered => match parking.obstacle {
                Some(why) => return Progress::Failed(why.into()),
                None => back = back + parking.bytes,
            },
            (Residence::Resident, false) => moved = moved + parking.bytes,
            _ => return Progress::Moves,
        }
    }
    if back > Bytes::ZERO && moved == Bytes::ZERO { Progress::Back(back) } else { Progress::Done(moved) }
}
