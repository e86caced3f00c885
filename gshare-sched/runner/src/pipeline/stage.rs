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
        // The host may have died before the signal could be asked for.
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

    /// Runs `work` for each request until the host closes the function. It is given a copy of the input and an empty buffer for
    /// the output, and answers with a reason if this one request is to fail. An output that is larger than a slot fails it too.
    ///
    /// # Errors
    /// [`FfsError::Channel`]; the end of the function is none.
    pub fn run(
        mut self,
        mut work: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), String>,
    ) -> Result<(), FfsError> {
        let (mut read, mut written) = (Vec::new(), Vec::new());
        let room = usize::try_from(self.assignment.slot_bytes).unwrap_or(usize::MAX);
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
                let loan = match self.output.loan(None) {
                    Ok(loan) => loan,
                    Err(error) => {
                        message.keep();
                        let over = matches!(error, ChannelError::Closed | ChannelError::PeerGone);
                        return if over { Ok(()) } else { Err(error.into()) };
                    }
                };
                message.read(&mut read);
                if tag & FAILED == 0 {
                    written.clear();
                    let made = work(&read, &mut written).and_then(|()| fits(written.len(), room));
                    match made {
                        Ok(()) => loan.send(tag, &written)?,
                        Err(reason) => {
                            let failure = Failure { stage: self.index, reason: Some(reason), attempts: 1 };
                            loan.send(tag | FAILED, &failure.encode(room))?;
                        }
                    }
                } else {
                    read.truncate(room);
                    loan.send(tag, &read)?;
                }
            }
            drop(message);
        }
    }
}

fn fits(length: usize, room: usize) -> Result<(), String> {
    if length > room { Err(format!("{length} bytes to pass on, in slots of {room}")) } else { Ok(()) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    const SOON: Option<Duration> = Some(Duration::from_secs(60));

    /// A stage over two channels of this process; what it answers to `requests`.
    fn answers(
        requests: &[(u64, &[u8])],
        work: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), String>,
    ) -> Vec<(u64, Vec<u8>)> {
        let link = || {
            let channel = Channel::create(16, 100).unwrap();
            let other = Channel::open(channel.as_fd().try_clone_to_owned().unwrap()).unwrap();
            let options = ChannelOptions::default();
            (channel.into_sender(options), other.into_receiver(options))
        };
        let ((mut ask, input), (output, mut answers)) = (link(), link());
        for (tag, request) in requests {
            ask.send(*tag, request, SOON).unwrap();
        }
        ask.close();
        let command = vec!["true".to_owned()];
        let spec = StageSpec { components: vec!["a".to_owned()], slice: "0".to_owned(), command };
        let assignment = Assignment::new("f", vec![spec], 100);
        Stage { index: 0, assignment, input, output }.run(work).unwrap();
        let mut found = Vec::new();
        let mut bytes = Vec::new();
        while let Ok(message) = answers.receive(SOON) {
            message.read(&mut bytes);
            found.push((message.tag(), bytes.clone()));
        }
        found
    }

    #[test]
    fn an_answer_that_is_larger_than_a_slot_fails_its_request_and_no_other() {
        let double = |input: &[u8], output: &mut Vec<u8>| {
            output.extend_from_slice(input);
            output.extend_from_slice(input);
            Ok(())
        };
        let found = answers(&[(1, b"ab"), (2, &[7; 51]), (3 | FAILED, b"before"), (4, b"")], double);
        assert_eq!(found.len(), 4);
        assert_eq!(found[0], (1, b"abab".to_vec()));
        assert_eq!(found[1].0, 2 | FAILED);
        let reason = "102 bytes to pass on, in slots of 100".to_owned();
        assert_eq!(Failure::decode(&found[1].1), FfsError::Stage { stage: 0, reason });
        assert_eq!(found[2..], [(3 | FAILED, b"before".to_vec()), (4, Vec::new())]);
    }
}
