//! A stage's side: a process that reads, runs and writes.

use super::{
    Assignment, ENV_ASSIGNMENT, ENV_HOST, ENV_INPUT, ENV_OUTPUT, ENV_STAGE, FAILED, Failure, FfsError,
    StageSpec,
};
use crate::channel::{Channel, ChannelError, ChannelOptions, Receiver, Sender};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The stage that this process is.
#[derive(Debug)]
pub struct Stage {
    index: u32,
    assignment: Assignment,
    input: Receiver,
    output: Sender,
}

impl Stage {
    /// The stage that the host started this process as. Call it first of all: from here on the process dies with its host.
    ///
    /// # Errors
    /// [`FfsError::NotAStage`], [`FfsError::BadAssignment`], [`FfsError::Channel`].
    pub fn from_env() -> Result<Self, FfsError> {
        let not = |what: &str| FfsError::NotAStage { what: what.to_owned() };
        let text = |name: &str| std::env::var(name).map_err(|_| not(&format!("{name} is not set")));
        let number =
            |name: &str| text(name)?.parse::<u32>().map_err(|_| not(&format!("{name} is no number")));
        let host = i32::try_from(number(ENV_HOST)?).ok().and_then(Pid::from_raw);
        let host = host.ok_or_else(|| not("no such host"))?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|errno| not(&format!("prctl: {errno}")))?;
        // It may have died before it could be asked for.
        if rustix::process::getppid() != Some(host) {
            return Err(not("its host is gone"));
        }
        let assignment = Assignment::read(&PathBuf::from(text(ENV_ASSIGNMENT)?))?;
        let index = number(ENV_STAGE)?;
        if index as usize >= assignment.stages.len() {
            return Err(not("the assignment has no such stage"));
        }
        let channel = |name: &str| -> Result<(Channel, OwnedFd), FfsError> {
            let path = text(name)?;
            let file = std::fs::OpenOptions::new().read(true).write(true).open(&path);
            let file = file.map_err(|error| not(&format!("{path}: {error}")))?;
            let pidfd =
                pidfd_open(host, PidfdFlags::empty()).map_err(|errno| not(&format!("pidfd: {errno}")))?;
            Ok((Channel::open(file.into())?, pidfd))
        };
        let (input, output) = (channel(ENV_INPUT)?, channel(ENV_OUTPUT)?);
        let options = ChannelOptions::default();
        Ok(Self {
            index,
            assignment,
            input: input.0.into_receiver(options).with_peer(input.1),
            output: output.0.into_sender(options).with_peer(output.1),
        })
    }

    /// Which stage it is, from 0.
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Its part of the assignment.
    pub fn spec(&self) -> &StageSpec {
        &self.assignment.stages[self.index as usize]
    }

    /// The assignment of the whole function.
    pub const fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Runs `work` for each request until the host closes the function. It reads the input in place, writes the output in
    /// place, and answers with the output's length, or with a reason that fails this one request.
    ///
    /// # Errors
    /// [`FfsError::Channel`]; the end of the function is none.
    pub fn run(
        mut self,
        mut work: impl FnMut(&[u8], &mut [u8]) -> Result<usize, String>,
    ) -> Result<(), FfsError> {
        loop {
            let message = match self.input.receive(None) {
                Ok(message) => message,
                Err(ChannelError::Closed | ChannelError::PeerGone) => {
                    self.output.close();
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            };
            let tag = message.tag();
            let number = tag & !FAILED;
            // A predecessor may have died between publishing and releasing.
            if self.output.last_tag().is_none_or(|last| last & !FAILED < number) {
                let mut loan = match self.output.loan(None) {
                    Ok(loan) => loan,
                    Err(error) => {
                        message.keep();
                        let over = matches!(error, ChannelError::Closed | ChannelError::PeerGone);
                        return if over { Ok(()) } else { Err(error.into()) };
                    }
                };
                let slot = loan.bytes();
                let (tag, length) = if tag & FAILED == 0 {
                    match work(message.bytes(), slot) {
                        Ok(length) => (tag, length),
                        Err(reason) => {
                            let failure = Failure { stage: self.index, reason: Some(reason), attempts: 1 };
                            (tag | FAILED, copy(&failure.encode(slot.len()), slot))
                        }
                    }
                } else {
                    (tag, copy(message.bytes(), slot))
                };
                loan.publish(tag, length as u64)?;
            }
            drop(message);
        }
    }
}

/// Copies what fits.
pub(super) fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let length = from.len().min(to.len());
    to[..length].copy_from_slice(&from[..length]);
    length
}
