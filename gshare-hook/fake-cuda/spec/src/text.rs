//! The text of a simulation, `PROFILE,driver=12.8,devices=4` or `a100,mig=3g.40gb+2g.20gb`, and the equivalent environment variables.

use std::fmt;
use std::str::FromStr;

use crate::cuda_release::{CudaRelease, CudaReleaseError};
use crate::device_profile::{Profile, ProfileError, load_text};

/// The profile of a device without a stated profile.
pub const DEFAULT_PROFILE: &str = "a100";
/// Most GPUs in one device file.
pub const MAX_DEVICES: u32 = 16;

const PROFILE: &str = "GSHARE_SIM_PROFILE";
const DRIVER: &str = "GSHARE_SIM_DRIVER_VERSION";
const DEVICES: &str = "GSHARE_SIM_GPUS";
const MIG: &str = "GSHARE_SIM_MIG";

/// The simulated devices. A part is `None` or empty if the text leaves it to a default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Spec {
    /// Name of a built-in profile, or path of a file.
    pub profile: Option<String>,
    /// CUDA release of the driver.
    pub driver: Option<CudaRelease>,
    /// Number of GPUs, 1 to [`MAX_DEVICES`].
    pub devices: Option<u32>,
    /// MIG devices into which the one GPU is cut, by name.
    pub mig: Vec<String>,
}

/// Why a specification is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// The profile cannot be used, or lacks the MIG devices.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The driver's release is unknown.
    #[error(transparent)]
    Driver(#[from] CudaReleaseError),
    /// The number of devices is none or too large.
    #[error("devices {0:?}: need 1 to {MAX_DEVICES}")]
    Devices(String),
    /// Several devices were asked for, but a cut GPU is alone.
    #[error("devices {0}: must be 1 where mig cuts the GPU into MIG devices")]
    CutMany(u32),
    /// The list of MIG devices has an empty name.
    #[error("mig {0:?}: need names of MIG devices joined by `+`, such as 3g.40gb+2g.20gb")]
    Mig(String),
    /// A part is neither the profile nor `key=value` with a known key.
    #[error("{0:?}: need PROFILE, driver=, devices= or mig=, separated by commas")]
    Part(String),
    /// A key, or the profile, is given twice.
    #[error("{0} is given twice")]
    Twice(&'static str),
}

fn once<T>(slot: &mut Option<T>, key: &'static str, value: T) -> Result<(), SpecError> {
    if slot.replace(value).is_some() { Err(SpecError::Twice(key)) } else { Ok(()) }
}

fn devices(text: &str) -> Result<u32, SpecError> {
    let number = text.parse().ok().filter(|n| (1..=MAX_DEVICES).contains(n));
    number.ok_or_else(|| SpecError::Devices(text.to_owned()))
}

fn slices(text: &str, separators: &[char]) -> Result<Vec<String>, SpecError> {
    let names: Vec<String> = text.split(separators).map(|name| name.trim().to_owned()).collect();
    if names.iter().any(String::is_empty) { Err(SpecError::Mig(text.to_owned())) } else { Ok(names) }
}

impl FromStr for Spec {
    type Err = SpecError;

    /// Reads the text after `--sim=`; an empty text leaves every part to its default. [`Spec::resolve`] compares the text with the profile.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (mut profile, mut driver, mut number, mut mig) = (None, None, None, None);
        for part in text.split(',').filter(|_| !text.is_empty()) {
            match part.split_once('=') {
                None if !part.is_empty() => once(&mut profile, "the profile", part.to_owned())?,
                Some(("driver", value)) => once(&mut driver, "driver", value.parse()?)?,
                Some(("devices", value)) => once(&mut number, "devices", devices(value)?)?,
                Some(("mig", value)) => once(&mut mig, "mig", slices(value, &['+'])?)?,
                _ => return Err(SpecError::Part(part.to_owned())),
            }
        }
        Ok(Self { profile, driver, devices: number, mig: mig.unwrap_or_default() })
    }
}

impl fmt::Display for Spec {
    /// Writes the text in the form read by [`from_str`](Self::from_str).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.variables().into_iter().map(|(key, value)| match key {
            DRIVER => format!("driver={value}"),
            DEVICES => format!("devices={value}"),
            MIG => format!("mig={value}"),
            _ => value,
        });
        f.write_str(&parts.collect::<Vec<_>>().join(","))
    }
}

impl Spec {
    /// The specification in the variables `GSHARE_SIM_PROFILE`, `_DRIVER_VERSION`, `_GPUS` and `_MIG`; `variable` looks one up. An empty
    /// variable counts as unset. MIG devices may also be separated by commas.
    ///
    /// # Errors
    /// When a value is out of range.
    pub fn of_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, SpecError> {
        let said = |key| variable(key).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        Ok(Self {
            profile: said(PROFILE),
            driver: said(DRIVER).map(|text| text.parse()).transpose()?,
            devices: said(DEVICES).map(|text| devices(&text)).transpose()?,
            mig: said(MIG).map(|text| slices(&text, &['+', ','])).transpose()?.unwrap_or_default(),
        })
    }

    /// [`of_variables`](Self::of_variables) of this process.
    ///
    /// # Errors
    /// When a value is out of range.
    pub fn of_environment() -> Result<Self, SpecError> {
        Self::of_variables(|key| std::env::var(key).ok())
    }

    /// The equivalent variables, for a program on the simulated driver.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let mig = if self.mig.is_empty() { None } else { Some(self.mig.join("+")) };
        let all = [
            (PROFILE, self.profile.clone()),
            (DRIVER, self.driver.map(|release| release.to_string())),
            (DEVICES, self.devices.map(|number| number.to_string())),
            (MIG, mig),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    /// Takes the missing parts of this specification from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            profile: self.profile.or(other.profile),
            driver: self.driver.or(other.driver),
            devices: self.devices.or(other.devices),
            mig: if self.mig.is_empty() { other.mig } else { self.mig },
        }
    }

    /// The text of the profile with the MIG devices cut, as a device file keeps it; `None` if the specification names neither.
    ///
    /// # Errors
    /// When the profile is neither built in nor a readable file.
    pub fn profile_text(&self) -> Result<Option<String>, SpecError> {
        if self.profile.is_none() && self.mig.is_empty() {
            return Ok(None);
        }
        let text = load_text(self.profile_name())?;
        // A key of the file must stand before its tables.
        let cut = if self.mig.is_empty() { String::new() } else { format!("cut = {:?}\n", self.mig) };
        Ok(Some(cut + &text))
    }

    /// The profile's name or path, or the default's name.
    pub fn profile_name(&self) -> &str {
        self.profile.as_deref().unwrap_or(DEFAULT_PROFILE)
    }

    /// Loads the profile and checks every part against it.
    ///
    /// # Errors
    /// When the profile cannot be used or lacks a part of the specification.
    pub fn resolve(&self) -> Result<Profile, SpecError> {
        let text = self.profile_text()?.map_or_else(|| load_text(DEFAULT_PROFILE), Ok)?;
        let mut profile = Profile::parse(&text, self.profile_name())?;
        match self.devices {
            Some(n) if n > 1 && !profile.cut.is_empty() => return Err(SpecError::CutMany(n)),
            Some(n) => profile.gpus = n,
            None => {}
        }
        Ok(profile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> Spec {
        text.parse().unwrap()
    }

    fn refused(text: &str) -> String {
        match text.parse::<Spec>() {
            Ok(spec) => spec.resolve().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_text_says_each_part_or_leaves_it_to_the_default() {
        assert_eq!(spec(""), Spec::default());
        let all = spec("h100,driver=12.8,devices=4");
        assert_eq!((all.profile.as_deref(), all.devices), (Some("h100"), Some(4)));
        assert_eq!(all.driver.unwrap().number(), 12_080);
        assert_eq!(all.resolve().unwrap().gpus, 4);
        let cut = spec("mig=3g.40gb+2g.20gb");
        assert_eq!(cut.resolve().unwrap().devices().len(), 2);
        assert_eq!(spec("devices=2,v100"), Spec { devices: Some(2), ..spec("v100") });
        assert_eq!(spec("").resolve().unwrap().device_name, "NVIDIA A100-SXM4-80GB");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_bound() {
        for (text, words) in [
            ("v1000", "no built-in profile of this name (v100, a100, h100, h200, b200, gb200, t4, tiny)"),
            ("a100,driver=10.2", "driver \"10.2\": the CUDA releases known here are 11.0"),
            ("a100,devices=0", "devices \"0\": need 1 to 16"),
            ("a100,devices=17", "need 1 to 16"),
            ("a100,devices=many", "need 1 to 16"),
            ("a100,mig=3g.71gb", "no MIG slice \"3g.71gb\"; it has 1g.10gb"),
            ("v100,mig=1g.10gb", "it has none"),
            ("a100,mig=4g.40gb+4g.40gb", "slices of 112 SMs are cut off 108"),
            ("a100,mig=", "mig \"\": need names"),
            ("a100,mig=1g.10gb,devices=2", "devices 2: must be 1"),
            ("a100,gpus=2", "\"gpus=2\": need PROFILE, driver="),
            ("a100,", "\"\": need PROFILE"),
            ("a100,h100", "the profile is given twice"),
            ("driver=12.8,driver=12.9", "driver is given twice"),
        ] {
            let error = refused(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn variables_say_the_same_and_fill_what_a_text_leaves_open() {
        for text in ["", "v100", "h100,driver=13.0,devices=2", "a100,mig=1g.10gb+3g.40gb"] {
            let said = spec(text);
            let variables = said.variables();
            let find = |key: &str| variables.iter().find(|(k, _)| *k == key).map(|(_, v)| v.clone());
            assert_eq!(Spec::of_variables(find).unwrap(), said);
            assert_eq!(said.to_string(), text);
        }
        let variable = |key: &str| match key {
            MIG => Some(" 3g.40gb, 2g.20gb".to_owned()),
            DRIVER => Some("12080".to_owned()),
            _ => Some(String::new()),
        };
        let both = spec("h100").or(Spec::of_variables(variable).unwrap());
        assert_eq!(both, spec("h100,driver=12.8,mig=3g.40gb+2g.20gb"));
        assert!(Spec::of_variables(|key| (key == DEVICES).then(|| "-1".to_owned())).is_err());
    }
}
