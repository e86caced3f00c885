//! `gshare engine horizontal` and `gshare engine peaks`.

use super::filter;
use gshare_sched::scale::{LazyHorizontal, LazyHorizontalConfig, PeakHorizontal, PeakHorizontalConfig};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: LazyHorizontalConfig| Ok(LazyHorizontal::new(config)?))
}

pub(super) fn run_peaks(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: PeakHorizontalConfig| Ok(PeakHorizontal::new(config)?))
}
