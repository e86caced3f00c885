//! The process: its beginning, its forks and its end, and the helper thread, which speaks with the daemon.
//!
//! * The library's constructor finds the real `dlsym` and marks the pages that a fork empties. It does little else, because most
//!   processes that inherit `LD_PRELOAD` never use CUDA.
//! * The first launch, allocation or look at memory with a current context **arms** the hook. The hook reads the settings, and if
//!   there is a limit or a daemon, it makes the runtime and starts the single helper thread. Otherwise it stands aside for good.
//! * A forked child finds empty pages and starts over. It never touches its parent's runtime, where locks may be held by threads
//!   that do not exist in the child. `exec` closes the socket.
//! * At exit the helper thread reports the use, and lets go of the driver before the driver's own destructors run.

pub(crate) mod arm;
pub(crate) mod end;
pub(crate) mod helper;
pub(crate) mod helper_thread;
pub(crate) mod parking;
pub(crate) mod question;
pub(crate) mod reserve;
pub(crate) mod runtime;
pub(crate) mod spare;
