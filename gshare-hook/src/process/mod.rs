//! The process: its beginning, its forks and its end, and the helper thread that speaks with the daemon.
//!
//! * The library's constructor finds the real `dlsym` and marks the pages that a fork empties. Nothing else: most processes that
//!   inherit `LD_PRELOAD` never use CUDA.
//! * The first launch, allocation or look at memory with a current context **arms** the hook: the settings are read, and if there is
//!   a limit or a daemon, the runtime is made and its one helper thread started. Otherwise the hook stands aside for good.
//! * A forked child finds empty pages and starts over; it never touches its parent's runtime: threads that do not exist in the
//!   child may hold locks there. `exec` closes the socket.
//! * At exit the helper thread reports the use, and lets go of the driver before the driver's own destructors run.

pub(crate) mod admission;
pub(crate) mod arm;
pub(crate) mod end;
pub(crate) mod helper;
pub(crate) mod helper_thread;
pub(crate) mod memory;
pub(crate) mod question;
pub(crate) mod runtime;
