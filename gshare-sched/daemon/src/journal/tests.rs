use super::*;
use gshare_core::Bytes;

fn config(dir: &Path, max_file: u64, keep_files: usize) -> JournalConfig {
    JournalConfig { dir: dir.to_owned(), max_file: Bytes(max_file), keep_files, actions: true }
}

fn create(config: &JournalConfig, epoch: u64) -> Journal {
    Journal::create(config, epoch, serde_json::json!({}), serde_json::json!({}))
}

fn asked(question: u32) -> NodeEvent {
    NodeEvent::UseAsked { question }
}

fn at(n: u32) -> Timestamp {
    Timestamp::from_nanos(u64::from(n))
}

fn lines(file: &Path) -> Vec<Line> {
    read(file).unwrap().map(Result::unwrap).collect()
}

fn events(dir: &Path) -> Vec<NodeEvent> {
    let files = segments(dir).unwrap();
    files.iter().flat_map(|file| lines(file)).filter_map(|line| line.event().unwrap()).collect()
}

#[test]
fn flushed_lines_are_there_without_a_finish() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = create(&config(dir.path(), 1 << 30, 4), 7);
    let count = 30_000u32;
    for n in 0..count {
        journal.event(at(n), &asked(n));
        journal.flush(at(n));
    }
    // A kill leaves the journal without `finish` and without a drop.
    std::mem::forget(journal);
    assert_eq!(lines(&segments(dir.path()).unwrap()[0])[0].epoch, Some(7));
    assert!(events(dir.path()).into_iter().eq((0..count).map(asked)));
}

#[test]
fn a_line_cut_short_ends_the_journal_quietly() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.jsonl");
    fs::write(&path, b"{\"now_ns\":1}\n{\"now_ns\":2}\n{\"now_n\0\0\0\0").unwrap();
    let times: Vec<_> = lines(&path).iter().map(|line| line.now_ns).collect();
    assert_eq!(times, [Some(1), Some(2)]);
}

#[test]
fn a_full_segment_is_followed_by_the_next_and_the_oldest_are_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = create(&config(dir.path(), 4096, 3), 7);
    for n in 0..1000 {
        journal.event(at(n), &asked(n));
        journal.flush(at(n));
    }
    journal.finish(at(1000));
    let files = segments(dir.path()).unwrap();
    assert_eq!(files.len(), 3);
    let numbers: Vec<_> = files.iter().map(|file| lines(file)[0].segment.unwrap()).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
    assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() <= 4096));
    assert_eq!(lines(&files[2]).last().unwrap().event().unwrap(), Some(asked(999)));
}

#[test]
fn only_files_of_a_daemon_are_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let others =
        ["0.jsonl", "notes.jsonl", "1-000001.jsonl", "00000000000000000001-1.jsonl", "x-000001.jsonl"];
    for name in others {
        fs::write(dir.path().join(name), "mine").unwrap();
    }
    for epoch in 1..=4 {
        create(&config(dir.path(), 4096, 2), epoch).finish(at(0));
    }
    assert!(others.iter().all(|name| dir.path().join(name).exists()));
    let names = [3, 4].map(|run| dir.path().join(file_name(run, 0)));
    assert_eq!(segments(dir.path()).unwrap(), names);
    assert!(number_of(&file_name(7, 1_000_000)) > number_of(&file_name(7, 999_999)));
}

/// The wall clock once numbered the daemon's runs: after the clock was set back, the live file sorted before the old files and was
/// deleted as the oldest.
#[test]
fn a_clock_set_back_does_not_cost_the_live_file() {
    let dir = tempfile::tempdir().unwrap();
    for later in [900, 901, 902] {
        fs::write(dir.path().join(file_name(later, 0)), "{\"journal\":1}\n").unwrap();
    }
    let mut journal = create(&config(dir.path(), 4096, 2), 7);
    journal.event(at(1), &asked(1));
    journal.flush(at(1));
    let names = [902, 903].map(|run| dir.path().join(file_name(run, 0)));
    assert_eq!(segments(dir.path()).unwrap(), names);
    assert_eq!((events(dir.path()), journal.lost()), (vec![asked(1)], 0));
}

#[test]
fn refused_events_do_not_push_history_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = create(&config(dir.path(), 16 << 10, 2), 7);
    let stale = |_| NodeEvent::DeadlineReached;
    journal.event(at(0), &asked(0));
    journal.handled(at(0), &[]);
    for n in 1..=100_000 {
        journal.event(at(n), &stale(n));
        // The node refuses half of the events and notes the other half as without effect.
        match n % 2 {
            0 => journal.refused(at(n)),
            _ => journal.handled(at(n), &[NodeAction::Note(Note::NoEffect)]),
        }
        journal.flush(at(n));
    }
    for n in 0..CREDIT {
        journal.event(at(100_001), &asked(n));
        journal.handled(at(100_001), &[]);
    }
    journal.event(at(100_002), &stale(5));
    journal.refused(at(100_002));
    journal.finish(at(100_002));
    let files = segments(dir.path()).unwrap();
    assert_eq!(files.len(), 1, "all of it fits into 16 KiB");
    let all = lines(&files[0]);
    let refused = |line: &&Line| line.event().unwrap() == Some(NodeEvent::DeadlineReached);
    assert_eq!(all.iter().filter(refused).count(), CREDIT as usize + 1, "and one for as many accepted ones");
    assert_eq!(all.iter().filter_map(|line| line.omitted).collect::<Vec<_>>(), [100_000 - u64::from(CREDIT)]);
    assert_eq!(events(dir.path())[0], asked(0));
}

#[test]
fn a_truncated_file_is_written_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = create(&config(dir.path(), 1 << 20, 2), 7);
    journal.event(at(1), &asked(1));
    journal.flush(at(1));
    File::options().write(true).truncate(true).open(&segments(dir.path()).unwrap()[0]).unwrap();
    journal.event(at(2), &asked(2));
    journal.flush(at(2));
    assert_eq!((events(dir.path()), journal.failure()), (vec![asked(2)], None));
}

#[test]
fn a_full_disk_is_reported_and_the_journal_goes_on_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = create(&config(dir.path(), 1 << 20, 9), 7);
    journal.event(at(1), &asked(1));
    journal.flush(at(1));
    // Each write to this device fails, as on a full disk.
    journal.segment.as_mut().unwrap().file = File::options().write(true).open("/dev/full").unwrap();
    for n in 2..5 {
        journal.event(at(n), &asked(n));
        journal.flush(at(n));
    }
    let why = journal.failure().unwrap();
    assert!(why.contains("No space left") && why.contains(dir.path().to_str().unwrap()), "{why}");
    assert_eq!(journal.lost(), 3);
    let later = at(2).saturating_add(RETRY);
    journal.event(later, &asked(5));
    journal.flush(later);
    assert_eq!((journal.failure(), journal.lost()), (None, 3));
    let files = segments(dir.path()).unwrap();
    let header = &lines(&files[1])[0];
    assert_eq!((header.segment, header.lost), (Some(1), 3));
    assert_eq!(events(dir.path()), [asked(1), asked(5)]);
}

#[test]
fn a_directory_that_cannot_be_used_yet_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    fs::write(&path, "in the way").unwrap();
    let mut journal = create(&config(&path, 1 << 20, 2), 7);
    assert!(journal.failure().is_some());
    fs::remove_file(&path).unwrap();
    journal.event(at(1), &asked(1));
    assert_eq!(journal.lost(), 1, "not before the next attempt is due");
    let later = Timestamp::ZERO.saturating_add(RETRY);
    journal.event(later, &asked(2));
    journal.flush(later);
    let file = &segments(&path).unwrap()[0];
    let header = &lines(file)[0];
    assert_eq!((header.segment, header.lost), (Some(1), 1), "the run's beginning is missing");
    assert_eq!(events(&path), [asked(2)]);
}

#[test]
fn a_panic_leaves_the_event_that_caused_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = create(&config(dir.path(), 1 << 20, 2), 7);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        journal.event(at(1), &asked(1));
        panic!("in the engine");
    }));
    assert!(caught.is_err());
    assert_eq!(events(dir.path()), [asked(1)]);
}

#[test]
fn an_event_has_the_digest_of_what_was_done_about_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = create(&config(dir.path(), 1 << 20, 2), 7);
    let known = |question| NodeAction::UseKnown { question };
    journal.event(at(1), &asked(1));
    journal.handled(at(1), &[known(1), NodeAction::Note(Note::NoEffect)]);
    journal.event(at(2), &asked(2));
    journal.refused(at(2));
    journal.event(at(3), &asked(3));
    journal.finish(at(3));
    let all = lines(&segments(dir.path()).unwrap()[0]);
    let shown: Vec<_> = all.iter().map(|line| (line.outcome, line.refused)).collect();
    let digest = digest(&[known(1)]);
    assert_eq!(
        shown,
        [(None, false), (Some(digest), false), (None, true), (None, false)],
        "notes do not count"
    );
    assert_eq!(events(dir.path()), [asked(1), asked(2), asked(3)]);
}

/// A file without a name still took every write, so no event counted as lost, and the journal did not start again.
#[test]
fn a_folder_that_is_removed_is_noticed_and_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let mut journal = create(&config(&path, 1 << 20, 2), 7);
    let write = |journal: &mut Journal, now: Timestamp, n: u32| {
        journal.event(now, &asked(n));
        journal.flush(now);
    };
    write(&mut journal, at(1), 1);
    fs::remove_dir_all(&path).unwrap();
    write(&mut journal, at(2), 2);
    let noticed = at(3).saturating_add(LOOK);
    write(&mut journal, noticed, 3);
    assert!(journal.failure().unwrap().contains("removed or replaced"), "{:?}", journal.failure());
    assert_eq!(journal.lost(), 3, "those since the last look");
    let later = noticed.saturating_add(RETRY);
    write(&mut journal, later, 4);
    assert_eq!((events(&path), journal.failure()), (vec![asked(4)], None));
    assert_eq!(lines(&segments(&path).unwrap()[0])[0].lost, 3);
}

#[test]
fn a_file_with_a_wild_number_is_left_alone_and_stops_no_journal() {
    let dir = tempfile::tempdir().unwrap();
    let wild = dir.path().join("18446744073709551615-000000.jsonl");
    fs::write(&wild, "mine").unwrap();
    let mut journal = create(&config(dir.path(), 1 << 20, 2), 7);
    journal.event(at(1), &asked(1));
    journal.flush(at(1));
    assert_eq!((journal.failure(), events(dir.path())), (None, vec![asked(1)]));
    assert!(wild.exists());
}

#[test]
fn a_line_that_no_daemon_writes_is_refused_with_bounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.jsonl");
    fs::write(&path, "1".repeat(usize::try_from(2 * LONGEST_LINE).unwrap())).unwrap();
    let error = read(&path).unwrap().next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "a line of 16 MiB and more, which no daemon writes");
}
