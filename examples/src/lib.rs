//! Example hosts that embed gshare. Each is a binary or example of this package.
#![forbid(unsafe_code)]

#[cfg(feature = "kubernetes")]
pub mod knative;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;

/// Prefixes of the annotations that are shares (FaST-GShare, Figure 4, and its code).
pub(crate) const SHARE_PREFIXES: [&str; 2] = ["fastgshare/", "faasshare/"];

/// PTX of a kernel that spins on the device's clock for `micros` us in every thread. The simulated driver reads the time
/// from the name `spin_MICROSus`, which may have a suffix: `_full` fills the device with any grid.
pub fn spin_ptx(name: &str, micros: u32) -> String {
    format!(
        "
.version 6.0
.target sm_50
.address_size 64
.visible .entry {name}()
{{
    .reg .u64 %begin, %now;
    .reg .pred %more;
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %more, %now, {micros}000;
    @%more bra again;
    ret;
}}
"
    )
}
