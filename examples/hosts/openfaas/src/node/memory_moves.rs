//! Moves of instances' memory to host memory and back, by the node's daemon.

use super::Node;
use crate::host::Move;
use gshare_core::reason::Reason;
use gshared::Progress;
use gshared::admin::{self, ParkOrder};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The most orders to park an instance that comes back by itself.
const ORDERS: usize = 3;

/// The most moves at a time: each keeps one of the daemon's few connections for questions.
pub(super) const MOVES: usize = 8;
/// A question that the daemon does not answer is asked again after this pause, so many times.
const ASK_AGAIN: (std::time::Duration, u32) = (std::time::Duration::from_millis(200), 10);

/// Moves the memory of an instance's processes, and tells the host.
pub(super) async fn move_memory(node: Arc<Node>, order: Move) {
    let Ok(_place) = node.moves.acquire().await else { return };
    let own = Arc::clone(&node);
    // Dropped unfinished only at the end of the host.
    let _ = tokio::task::spawn_blocking(move || move_now(&own, &order)).await;
}

/// The answer to a question, which may be lost while the daemon is busy or starts again.
fn answer<T>(ask: impl Fn() -> io::Result<T>) -> Result<T, String> {
    for _ in 1..ASK_AGAIN.1 {
        if let Ok(answer) = ask() {
            return Ok(answer);
        }
        std::thread::sleep(ASK_AGAIN.0);
    }
    ask().map_err(|error| error.to_string())
}

fn move_now(node: &Node, order: &Move) {
    let result = match &node.runner.daemon {
        Some(daemon) => moves(daemon, order),
        None => Err("there is no daemon".to_owned()),
    };
    if let Err(why) = &result {
        let place = if order.on { "go to host memory" } else { "come back" };
        let text = format!("its memory does not {place}, and the process ends: {why}");
        for client in &order.clients {
            let function = client.rsplit_once('-').map_or(client.as_str(), |(function, _)| function);
            node.logs.add(function, client, text.clone());
        }
    }
    node.host().moved(node.now(), order, result);
}

fn moves(daemon: &Path, order: &Move) -> Result<(), String> {
    let asks = if order.on { ParkOrder::Hold } else { ParkOrder::Unpark };
    // All processes move at the same time.
    for client in &order.clients {
        answer(|| admin::park(daemon, client, asks))??;
    }
    for client in &order.clients {
        moves_one(daemon, client, asks)?;
    }
    Ok(())
}

fn moves_one(daemon: &Path, client: &str, order: ParkOrder) -> Result<(), String> {
    let on = order == ParkOrder::Hold;
    for _ in 0..ORDERS {
        let ids = answer(|| admin::park(daemon, client, order))??;
        if ids.is_empty() {
            return Ok(());
        }
        loop {
            match answer(|| admin::moved(daemon, &ids, on))? {
                Progress::Moves => {}
                Progress::Done(_) => return Ok(()),
                Progress::Back(_) => break,
                Progress::Failed(why) => return Err(Reason::from(why).to_string()),
                Progress::Ended => return Err("it has ended".to_owned()),
            }
        }
    }
    Err("it comes back by itself".to_owned())
}
