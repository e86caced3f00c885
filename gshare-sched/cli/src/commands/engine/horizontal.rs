//! `gshare engine horizontal`.

use super::filter;
use gshare_sched::scale::{LazyHorizontal, LazyHorizontalConfig};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: LazyHorizontalConfig| Ok(LazyHorizontal::new(config)?))
}
