//! One device of the process: the state that its token, its measurements and its permission for launches share.

mod attachment;
mod learning;
mod local_share;
mod long_wait;
mod residence;
mod timeline;
mod turn;

use gshare_core::gate::{Credit, LaunchGate};
use gshare_core::wire::RefusalCode;
use gshare_core::{ClientId, DeviceUuid, Duration, ResourceSpec};

use crate::cost::CostTable;
use crate::cycle::Cycles;
use crate::memory_account::MemoryAccount;
use crate::memory_questions::Questions;
use crate::{Ordinal, Ticket};

pub(crate) use attachment::Attachment;
use attachment::{IN_FLIGHT, LOCAL_WINDOW};
use long_wait::LongWait;
use residence::Parking;
use timeline::Timeline;
pub(crate) use turn::Around;
use turn::{Changing, Held, Stated, Still, Turn};

/// State shared between the meter and the launching threads. All of it is atomic, and changes while the meter decides.
pub trait Ground {
    /// The credit of the device.
    fn gate(&self) -> &LaunchGate;
    /// The predicted costs of functions on the device.
    fn costs(&self) -> &CostTable;
    /// The process's memory there.
    fn memory(&self) -> &MemoryAccount;
}

/// Lets pointers such as `&T` and `Arc<T>` serve as ground.
impl<P: core::ops::Deref<Target: Ground>> Ground for P {
    fn gate(&self) -> &LaunchGate {
        self.deref().gate()
    }
    fn costs(&self) -> &CostTable {
        self.deref().costs()
    }
    fn memory(&self) -> &MemoryAccount {
        self.deref().memory()
    }
}

/// Switches in force for the launching threads.
#[derive(Clone, Copy, Debug, Default)]
struct Switches {
    shut: bool,
    measures_all: bool,
}

/// One device of the process.
#[derive(Debug)]
pub(crate) struct Device<G> {
    pub(crate) ordinal: Ordinal,
    uuid: DeviceUuid,
    pub(crate) ground: G,
    pub(crate) attachment: Attachment,
    /// Whether an Attach was sent on this connection and has not been answered.
    pub(crate) asked: bool,
    /// The daemon's refusal of this device, which is then not attached again on this connection.
    pub(crate) unserved: Option<RefusalCode>,
    /// The question of the thread that found the device and waits for its attachment.
    pub(crate) attach_ticket: Option<Ticket>,
    pub(crate) spec: ResourceSpec,
    pub(crate) window: Duration,
    pub(crate) bound: Duration,
    credit: Credit,
    turn: Turn,
    /// Finished turns since the daemon took the device.
    turns_over: u32,
    /// Total use stated to the daemon in the last Attach.
    used_stated: Duration,
    pub(crate) timeline: Timeline,
    cycles: Cycles,
    switches: Switches,
    launches: Changing,
    /// Threads now waiting for credit, and the total time of all waits.
    pub(crate) waiting: u64,
    waited: Duration,
    /// Credit held by threads for later launches, in ns.
    prepaid: u64,
    still: Vec<Still>,
    /// Whether the device can begin none of the work in flight, because its streams wait for something else.
    blocked: bool,
    /// The time of the last report to the daemon, in ns, and the totals in it.
    said: (u64, Stated),
    held: Held,
    /// The last time a launch was let in because nothing completed, in ns.
    let_in: u64,
    /// The time until which the daemon gives no token, in ns.
    pub(crate) throttled_until: u64,
    long_wait: LongWait,
    parking: Parking,
    pub(crate) questions: Questions,
    /// Whether the process is about to end, so that nothing more is launched.
    pub(crate) leaving: bool,
    /// The last measurement under way that the process's last report has charged as it was.
    pub(super) charged: Option<crate::SegmentId>,
    /// The time of the host's next look, in ns.
    pub(crate) look_at: u64,
}

impl<G: Ground> Device<G> {
    pub(crate) fn new(ordinal: Ordinal, uuid: DeviceUuid, ground: G, spec: ResourceSpec) -> Self {
        Self {
            ordinal,
            uuid,
            ground,
            attachment: Attachment::Asking,
            asked: false,
            unserved: None,
            attach_ticket: None,
            spec,
            window: LOCAL_WINDOW,
            bound: IN_FLIGHT,
            credit: Credit::new(IN_FLIGHT),
            turn: Turn::Idle,
            turns_over: 0,
            used_stated: Duration::ZERO,
            timeline: Timeline::new(),
            cycles: Cycles::default(),
            switches: Switches::default(),
            launches: Changing::default(),
            waiting: 0,
            waited: Duration::ZERO,
            prepaid: 0,
            still: Vec::new(),
            blocked: false,
            said: (0, Stated::default()),
            held: Held::default(),
            let_in: 0,
            throttled_until: 0,
            long_wait: LongWait::default(),
            parking: Parking::default(),
            questions: Questions::default(),
            leaving: false,
            charged: None,
            look_at: 0,
        }
    }

    pub(crate) fn client(&self) -> Option<ClientId> {
        if let Attachment::Served(client) = self.attachment { Some(client) } else { None }
    }
}
