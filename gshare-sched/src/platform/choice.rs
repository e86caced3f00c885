//! The choice of a function's pool.

use crate::platform::{FunctionSpec, Regime, Work};

/// The regime of a function among the present regimes. `devices` gives the number of devices of a regime, or `None` without a
/// pool for it.
///
/// A regime named by the function decides. Otherwise a pipeline goes to slices, since only slices run its stages. Training goes
/// to shares, where it can use the rest of other instances. Inference goes to shares, which hold several functions on a device.
/// Without such devices it goes to whole devices, and without these to slices, unless an instance needs several devices.
pub(super) fn regime_for(spec: &FunctionSpec, devices: impl Fn(Regime) -> Option<usize>) -> Regime {
    if let Some(named) = spec.regime {
        return named;
    }
    match spec.work {
        Work::Pipeline { .. } => Regime::Sliced,
        Work::Training { .. } => Regime::Fractional,
        Work::Inference { .. } if spec.devices > 1 => Regime::Fractional,
        Work::Inference { .. } => {
            let by_choice = [Regime::Fractional, Regime::Whole, Regime::Sliced];
            let there = by_choice.into_iter().find(|regime| devices(*regime).is_some_and(|count| count > 0));
            // Devices may come later.
            let pool = || by_choice.into_iter().find(|regime| devices(*regime).is_some());
            there.or_else(pool).unwrap_or(Regime::Fractional)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{Bytes, GpuShare};

    #[test]
    fn a_function_goes_where_its_work_can_be_done() {
        let beside_slices = |work, fractional, whole, slices| {
            let spec = FunctionSpec::new(work, Bytes::from_gib(1));
            regime_for(&spec, |regime| match regime {
                Regime::Fractional => fractional,
                Regime::Whole => whole,
                Regime::Sliced => slices,
            })
        };
        let of = |work, fractional, whole| beside_slices(work, fractional, whole, None);
        let inference = || Work::Inference { profile: None };
        assert_eq!(of(inference(), Some(1), Some(1)), Regime::Fractional);
        assert_eq!(of(inference(), Some(0), Some(1)), Regime::Whole);
        assert_eq!(of(inference(), None, Some(0)), Regime::Whole);
        assert_eq!(of(inference(), None, None), Regime::Fractional, "the error names it");
        assert_eq!(beside_slices(inference(), Some(0), Some(0), Some(1)), Regime::Sliced);
        assert_eq!(beside_slices(inference(), Some(0), Some(1), Some(1)), Regime::Whole);
        assert_eq!(beside_slices(inference(), Some(0), Some(0), Some(0)), Regime::Fractional);
        let training = Work::Training { workers: 2, share: GpuShare::WHOLE };
        assert_eq!(of(training, Some(0), Some(4)), Regime::Fractional);
        let spread = FunctionSpec::new(inference(), Bytes::from_gib(1)).with_devices(2);
        assert_eq!(regime_for(&spread, |_| Some(0)), Regime::Fractional);
        let named = FunctionSpec::new(inference(), Bytes::from_gib(1)).with_regime(Regime::Whole);
        assert_eq!(regime_for(&named, |_| Some(9)), Regime::Whole);
    }
}
