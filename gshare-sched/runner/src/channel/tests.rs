use super::*;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::thread;

const SHORT: Option<Duration> = Some(Duration::from_millis(60));
const LONG: Option<Duration> = Some(Duration::from_secs(60));

/// The bytes of a message, copied.
fn bytes(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = b"what was there before".to_vec();
    message.read(&mut bytes);
    bytes
}

fn write(slot: &[AtomicU8], message: impl IntoIterator<Item = u8>) {
    slot.iter().zip(message).for_each(|(at, byte)| at.store(byte, Ordering::Relaxed));
}

fn pair(slots: u32, bytes: u64) -> (Sender, Receiver) {
    let channel = Channel::create(slots, bytes).unwrap();
    let other = Channel::open(channel.as_fd().try_clone_to_owned().unwrap()).unwrap();
    (channel.into_sender(ChannelOptions::default()), other.into_receiver(ChannelOptions::default()))
}

#[test]
fn messages_come_in_order_and_whole_through_sleep_and_back_pressure() {
    // With two slots what describes a message is written again only after its release, with more before it is read.
    for slots in [2, 4, 64] {
        come_in_order_and_whole(slots);
    }
}

fn come_in_order_and_whole(slots: u32) {
    let (mut sender, mut receiver) = pair(slots, 10_000);
    let producer = thread::spawn(move || {
        for number in 0..3_000u64 {
            let loan = sender.loan(LONG).unwrap();
            let length = number * 7 % 10_001;
            write(loan.bytes(), std::iter::repeat_n(number as u8, length as usize));
            loan.publish(number, length).unwrap();
            if number % 500 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
        }
        sender.close();
    });
    for number in 0..3_000u64 {
        let message = receiver.receive(LONG).unwrap();
        assert_eq!((message.tag(), message.bytes().len() as u64), (number, number * 7 % 10_001));
        assert!(bytes(&message).iter().all(|&byte| byte == number as u8), "torn at {number}");
        if number % 700 == 0 {
            thread::sleep(Duration::from_millis(2));
        }
    }
    assert_eq!(receiver.receive(LONG).unwrap_err(), ChannelError::Closed);
    producer.join().unwrap();
}

/// Messages of all sizes about a chunk, copied out while they are copied in, with pauses in which either side sleeps.
#[test]
fn copies_come_whole_while_they_are_written_through_sleep_and_back_pressure() {
    let (mut sender, mut receiver) = pair(2, 5 * CHUNK as u64);
    let length = |number: u64| match number % 4 {
        0 => number as usize % 100,
        1 => CHUNK * (1 + number as usize % 5),
        2 => CHUNK + number as usize % 3 - 1,
        _ => number as usize * 1_237 % (5 * CHUNK + 1),
    };
    let byte = |number: u64, place: usize| (number as usize * 31 + place * 7 + place / 999) as u8;
    let message = move |number| (0..length(number)).map(|place| byte(number, place)).collect::<Vec<u8>>();
    let producer = thread::spawn(move || {
        for number in 0..400 {
            sender.send(number, &message(number), LONG).unwrap();
            if number % 50 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
        }
        sender.close();
    });
    let mut buffer = b"what was there before".to_vec();
    for number in 0..400 {
        assert_eq!(receiver.receive_into(&mut buffer, LONG), Ok(number));
        assert_eq!(buffer, message(number), "{number}");
        if number % 70 == 0 {
            thread::sleep(Duration::from_millis(2));
        }
    }
    assert_eq!(receiver.receive_into(&mut buffer, LONG), Err(ChannelError::Closed));
    assert!(buffer.is_empty());
    producer.join().unwrap();
}

/// Large copies go past the caches.
#[test]
fn large_copies_come_whole() {
    let bytes = CACHED + 3 * CHUNK + 1;
    let (mut sender, mut receiver) = pair(2, bytes as u64);
    let message =
        move |number: u64| (0..bytes as u64).map(|place| (place / 7 + number) as u8).collect::<Vec<u8>>();
    let producer = thread::spawn(move || {
        for number in 0..4 {
            sender.send(number, &message(number), LONG).unwrap();
        }
    });
    let mut buffer = Vec::new();
    for number in 0..4 {
        assert_eq!(receiver.receive_into(&mut buffer, LONG), Ok(number));
        assert!(buffer == message(number), "{number}");
    }
    producer.join().unwrap();
}

/// Without a second thread: what is copied out was there before the message was whole.
#[test]
fn chunks_are_copied_out_before_the_message_is_whole() {
    let (mut sender, mut receiver) = pair(2, 4 * CHUNK as u64);
    let message: Vec<u8> = (0..3 * CHUNK + 5).map(|place| (place * 7 + place / 999) as u8).collect();
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    let mut buffer = Vec::new();
    for far in [false, true] {
        buffer.clear();
        let mut loan = sender.loan(SHORT).unwrap();
        loan.begin();
        assert_eq!(receiver.copy_ahead(&mut buffer, soon()), None, "it is not published");
        assert!(buffer.is_empty());
        // Two chunks and a byte of the third, of which the receiver is not told.
        loan.copy_in(&message[..2 * CHUNK + 1], 0, far);
        assert_eq!(receiver.copy_ahead(&mut buffer, soon()), None, "it is not published");
        assert!(buffer == message[..2 * CHUNK], "far: {far}");
        assert_eq!(receiver.receive(SHORT).unwrap_err(), ChannelError::TimedOut, "it is not whole");
        assert_eq!(receiver.receive_into(&mut buffer, SHORT), Err(ChannelError::TimedOut));
        assert!(buffer.is_empty());
        loan.copy_in(&message, 2 * CHUNK, far);
        let coming = Coming { chunks: None, far };
        loan.publish_as(1, message.len() as u64, Some(coming)).unwrap();
        assert_eq!(receiver.receive_into(&mut buffer, SHORT), Ok(1));
        assert!(buffer == message, "far: {far}");
    }
}

/// The begin of a message wakes a receiver that sleeps, and its publication wakes it again.
#[test]
fn who_sleeps_is_woken_before_the_first_chunk_and_again_when_it_is_published() {
    let (mut sender, receiver) = pair(2, 4 * CHUNK as u64);
    let (woken, wakes) = std::sync::mpsc::channel();
    let sleeper = thread::spawn(move || {
        let published = receiver.side.map.published();
        while published.seen() == 0 {
            published.sleep(0, &Kernel { at_most: Duration::from_secs(3_600) });
            woken.send(published.seen()).unwrap();
        }
        // The message may have been published after the receiver told the last time and before it slept again.
        woken.send(published.seen()).unwrap();
    });
    let mut loan = sender.loan(SHORT).unwrap();
    let begun = Instant::now();
    // A receiver that is about to sleep may miss it, so it begins more than once.
    let seen = loop {
        loan.begin();
        match wakes.recv_timeout(Duration::from_millis(1)) {
            Ok(seen) => break seen,
            Err(_) => assert!(begun.elapsed() < Duration::from_secs(60), "no receiver was woken"),
        }
    };
    assert_eq!(seen, 0, "nothing was published");
    loan.publish(1, 1).unwrap();
    while wakes.recv_timeout(Duration::from_secs(60)).expect("the publication wakes") == 0 {}
    sleeper.join().unwrap();
}

/// The bytes that a sender had copied in before it died are no part of what its successor sends, whether that
/// copies by chunks or writes in place, and though it may have died just before it published.
#[test]
fn what_a_dead_sender_left_half_written_is_copied_anew() {
    for (in_place, told_whole) in [(false, false), (true, false), (false, true), (true, true)] {
        let (mut sender, mut receiver) = pair(2, 4 * CHUNK as u64);
        let successor = Channel::open(sender.as_fd().try_clone_to_owned().unwrap()).unwrap();
        // Chunks of the wrong message are there, and are told of; then the sender is gone.
        let mut begun = sender.loan(SHORT).unwrap();
        begun.begin();
        begun.copy_in(&[1; 2 * CHUNK + 1], 0, false);
        if told_whole {
            sender.side.map.tell(0, Some(Coming { chunks: None, far: false }));
        }
        let reader = thread::spawn(move || {
            let mut buffer = Vec::new();
            let tag = receiver.receive_into(&mut buffer, LONG).unwrap();
            (tag, buffer)
        });
        thread::sleep(Duration::from_millis(20));
        drop(sender);
        let mut sender = successor.into_sender(ChannelOptions::default());
        let right = vec![2; 3 * CHUNK + 5];
        if in_place {
            let loan = sender.loan(SHORT).unwrap();
            write(loan.bytes(), right.iter().copied());
            loan.publish(9, right.len() as u64).unwrap();
        } else {
            sender.send(9, &right, SHORT).unwrap();
        }
        let (tag, found) = reader.join().unwrap();
        assert_eq!((tag, found == right), (9, true), "in place: {in_place}, told whole: {told_whole}");
    }
}
#[test]
fn a_full_channel_makes_the_sender_wait_and_a_slow_reader_keeps_its_message() {
    let (mut sender, mut receiver) = pair(2, 64);
    sender.send(1, b"one", SHORT).unwrap();
    sender.send(2, b"two", SHORT).unwrap();
    assert_eq!(sender.send(3, b"three", SHORT), Err(ChannelError::TimedOut));
    let message = receiver.receive(SHORT).unwrap();
    assert_eq!(sender.send(3, b"three", SHORT), Err(ChannelError::TimedOut), "not released yet");
    assert_eq!(bytes(&message), b"one");
    drop(message);
    sender.send(3, b"three", SHORT).unwrap();
    receiver.close();
    assert_eq!(sender.send(4, b"four", SHORT), Err(ChannelError::Closed));
}

/// A receiver that dies over a message leaves it to its successor; a sender's successor knows what was published.
#[test]
fn successors_go_on_where_their_predecessors_died() {
    let (mut sender, mut receiver) = pair(4, 64);
    assert_eq!(sender.last_tag(), None);
    sender.send(7, b"seven", SHORT).unwrap();
    sender.send(8, b"eight", SHORT).unwrap();
    let reopen = |side: BorrowedFd<'_>| Channel::open(side.try_clone_to_owned().unwrap()).unwrap();
    let channel = reopen(sender.as_fd());
    drop(sender);
    let mut sender = channel.into_sender(ChannelOptions::default());
    assert_eq!(sender.last_tag(), Some(8));
    sender.send(9, b"nine", SHORT).unwrap();
    receiver.receive(SHORT).unwrap().keep();
    let channel = reopen(receiver.as_fd());
    drop(receiver);
    let mut receiver = channel.into_receiver(ChannelOptions::default());
    for tag in 7..10 {
        assert_eq!(receiver.receive(SHORT).unwrap().tag(), tag);
    }
}

#[test]
fn a_dead_peer_is_noticed_after_what_it_sent() {
    let (mut sender, receiver) = pair(2, 64);
    let mut child = std::process::Command::new("/bin/sleep");
    child.arg("100").process_group(0);
    let mut child = child.spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let mut receiver = receiver.with_peer(pidfd);
    assert_eq!(receiver.receive(SHORT).unwrap_err(), ChannelError::TimedOut, "it lives");
    sender.send(1, b"last words", SHORT).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(bytes(&receiver.receive(LONG).unwrap()), b"last words");
    assert_eq!(receiver.receive(LONG).unwrap_err(), ChannelError::PeerGone);
}

#[test]
fn what_is_no_channel_is_refused_before_it_is_mapped() {
    let refused = |fd: OwnedFd| Channel::open(fd).unwrap_err().to_string();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 16).unwrap();
    assert_eq!(refused(file.into()), "not a channel: it is no memory file");
    let memory = |bytes: u64, sealed: bool| {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("other", flags).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        if sealed {
            let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        }
        fd
    };
    assert_eq!(refused(memory(1 << 16, false)), "not a channel: its size is not sealed");
    assert_eq!(refused(memory(100, true)), "not a channel: it is smaller than a page");
    assert_eq!(refused(memory(1 << 16, true)), "not a channel: it has another mark or version");
    let sized = |slots, bytes| Channel::create(slots, bytes).unwrap_err().to_string();
    assert_eq!(sized(3, 8), "slots is 3: need a power of two from 2 to 1024");
    assert_eq!(sized(1, 8), "slots is 1: need a power of two from 2 to 1024");
    assert_eq!(sized(2, 0), "slot_bytes is 0: need more than 0, and at most 1 TiB for all slots");
    assert!(sized(2, u64::MAX).starts_with("slot_bytes is 18446744073709551615"));
}

#[test]
fn a_corrupt_length_or_counter_is_an_error_and_nothing_is_read() {
    let (mut sender, mut receiver) = pair(2, 64);
    sender.send(1, b"fine", SHORT).unwrap();
    let file = std::fs::File::from(sender.as_fd().try_clone_to_owned().unwrap());
    let corrupt = |value| ChannelError::Corrupt { field: "length", value, limit: 64 };
    // Beside the counter, where that of the last message is read; then in its descriptor, when it is not the last.
    file.write_all_at(&65u64.to_ne_bytes(), 128 + 16).unwrap();
    assert_eq!(receiver.receive(SHORT).unwrap_err(), corrupt(65));
    sender.send(2, b"fine", SHORT).unwrap();
    file.write_all_at(&66u64.to_ne_bytes(), 4096).unwrap();
    assert_eq!(receiver.receive(SHORT).unwrap_err(), corrupt(66));
    file.write_all_at(&99u32.to_ne_bytes(), 128).unwrap();
    let error = receiver.receive(SHORT).unwrap_err();
    assert_eq!(error, ChannelError::Corrupt { field: "published - released", value: 99, limit: 2 });
    assert!(matches!(sender.send(2, b"x", SHORT), Err(ChannelError::Corrupt { .. })));
    assert_eq!(sender.send(2, &[0; 65], SHORT), Err(ChannelError::TooLong { length: 65, slot_bytes: 64 }));
    // Calls that could make it larger or smaller than its mapping are sealed off.
    assert!(file.set_len(4096).is_err() && file.set_len(1 << 20).is_err());
}

/// A peer that writes anything anywhere gets errors and wrong bytes, at places that lie in the file and in bounded time: numbers
/// are read once, and no byte of the file is behind a reference that says that it stays.
#[test]
fn a_peer_that_writes_anything_anywhere_can_garble_messages_and_no_more() {
    let (mut sender, mut receiver) = pair(2, 3 * CHUNK as u64 + 5);
    let file = std::fs::File::from(sender.as_fd().try_clone_to_owned().unwrap());
    let garble = |state: &mut u64| {
        let mut any = || {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *state >> 17
        };
        // Counters, latest lengths and descriptors; small numbers, large ones, and such as a copy's progress has.
        let at = [128, 144, 152, 160, 168, 256, 4096, 4104, 4112, 4120, 4160, 4176][any() as usize % 12];
        let progress = (any() << 32) | (any() % 9);
        let word = [any() % 8, u64::MAX - any() % 4, progress, any()][any() as usize % 4];
        file.write_all_at(&word.to_ne_bytes(), at).unwrap();
    };
    let (stop, message) = (std::sync::atomic::AtomicBool::new(false), vec![7; 2 * CHUNK + 9]);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut state = 1;
            while !stop.load(Ordering::Relaxed) {
                garble(&mut state);
            }
        });
        let (tiny, most) = (Some(Duration::from_micros(200)), 3 * CHUNK + 5);
        let (mut buffer, mut state, mut failures) = (Vec::new(), 2, 0);
        for number in 0..1_000 {
            garble(&mut state);
            let sent = sender.send(number, &message, tiny);
            garble(&mut state);
            let received = match number % 2 {
                0 => receiver.receive_into(&mut buffer, tiny).map(|_| buffer.len()),
                _ => receiver.receive(tiny).map(|message| bytes(&message).len()),
            };
            assert!(received.as_ref().is_ok_and(|length| *length <= most) || received.is_err());
            for error in [sent.err(), received.err()].into_iter().flatten() {
                assert!(matches!(error, ChannelError::Corrupt { .. } | ChannelError::TimedOut), "{error}");
                failures += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(failures > 0, "it was never in the way");
    });
}
