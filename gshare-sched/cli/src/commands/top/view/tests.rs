use super::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::{Value, json};

/// A client on GPU 0, as in the daemon's snapshot.
fn client(slot: u32, name: &str, (request, limit): (f64, f64), measured: f64) -> Value {
    json!({
        "client": u64::from(ClientId::new(slot, 1)), "name": name, "pid": 100 + slot, "uid": 1000,
        "program": "python3", "gpu": 0, "quota_request": request, "quota_limit": limit, "sm": 0.24,
        "measured": measured, "total_used_ns": 0, "window_used_ns": 0, "holds_token": false,
        "waiting_ns": null, "waited_ns": 2_500_000_000_u64, "launches": 7, "memory_bytes": 512 << 20,
        "memory_limit_bytes": 16_u64 << 30, "on_daemon_loss": "open",
    })
}

/// The daemon's snapshot `seconds` after its start.
fn snapshot(seconds: u64, clients: &[Value]) -> Snapshot {
    serde_json::from_value(json!({
        "now_ns": seconds * 1_000_000_000, "epoch": 1, "pid": 42, "version": "0.1.0",
        "socket": "/run/gshare/gshare.sock", "connections": 3, "processes": 3, "drops": {}, "journal_lost": 0,
        "devices": [{
            "gpu": 0, "uuid": "GPU-7", "simulated": true, "memory_bytes": 16_u64 << 30,
            "held_bytes": 4_u64 << 30, "clients": clients.len(),
        }],
        "clients": clients,
    }))
    .unwrap()
}

/// Alice with a class, bob with the token, and a team of two processes with one shared request.
fn four() -> Vec<Value> {
    let mut four = vec![
        client(0, "alice", (0.3, 0.8), 0.55),
        client(1, "bob", (0.5, 0.5), 0.25),
        client(2, "team", (0.2, 1.0), 0.1),
        client(3, "team", (0.2, 1.0), 0.05),
    ];
    four[0]["class"] = json!({"slo_sensitive": {"tolerance_basis_points": 3000}});
    four[0]["scale_state"] = json!({"state": "contention"});
    four[0]["scaled_request"] = json!(0.4);
    four[0]["scaled_limit"] = json!(0.6);
    four[0]["waiting_ns"] = json!(12_300_000);
    four[1]["holds_token"] = json!(true);
    four[1]["memory_limit_bytes"] = Value::Null;
    four
}

fn view(clients: &[Value]) -> View {
    let mut view = View::new(false);
    view.update(snapshot(10, clients));
    view
}

fn buffer(view: &mut View, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view.draw(frame)).unwrap();
    terminal.backend().buffer().clone()
}

/// The lines, each exactly as wide as the terminal.
fn lines(view: &mut View, width: u16, height: u16) -> Vec<String> {
    let buffer = buffer(view, width, height);
    let line = |y: u16| {
        let mut line = String::new();
        let mut x = 0;
        while x < width {
            let symbol = buffer[(x, y)].symbol();
            assert!(!symbol.chars().any(char::is_control), "{symbol:?}");
            line += symbol;
            x += u16::try_from(Span::raw(symbol).width()).unwrap().max(1);
        }
        assert_eq!((x, Span::raw(line.as_str()).width()), (width, usize::from(width)), "{line}");
        line
    };
    (0..height).map(line).collect()
}

fn row<'a>(lines: &'a [String], name: &str) -> &'a str {
    lines.iter().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {lines:#?}"))
}

/// The names of the table, from top to bottom.
fn names(view: &mut View) -> Vec<String> {
    let lines = lines(view, 80, 24);
    let rows = lines.iter().skip_while(|line| !line.starts_with("NAME")).skip(1);
    let names = rows.map(|line| line.split(' ').next().unwrap().to_owned());
    names.take_while(|name| !name.is_empty()).collect()
}

fn press(view: &mut View, code: KeyCode) {
    assert!(view.key(code.into()));
}

#[test]
fn all_columns_stand_in_80_cells_with_sums_and_marks_in_theirs() {
    let lines = lines(&mut view(&four()), 80, 24);
    assert!(lines[0].starts_with("gshared 0.1.0: 3 processes, 4 clients, pid 42 at /run"), "{lines:#?}");
    // 55 + 25 + 10 + 5 %; the request of the team counts once.
    assert_eq!(lines[1].trim_end(), "gpu0  used  95.0% asked   100%  memory 4.0G/16G  simulated  GPU-7");
    let table = [
        "NAME      CLASS GPU   REQ LIMIT  USED |REQ]LIM    MEMORY TOKEN      STATE RECENT",
        "alice    slo 30   0 30.0% 80.0% 55.0% ██|█··]·  512M/16G  12ms contention      ▅",
        "bob           -   0 50.0% 50.0% 25.0% ██·╡····         - holds          -      ▂",
    ];
    assert_eq!(lines[2..5], table);
    let detail = "> alice: pid 100, SMs 24.0%, 40.0% to 60.0% now, waited 2.5s, 7 launches";
    assert!(lines[22].starts_with(detail), "{}", lines[22]);
    assert_eq!(lines[23].trim_end(), "? help  q end  sorted by USED");
}

#[test]
fn more_width_goes_to_the_bar_and_the_history() {
    let lines = lines(&mut view(&four()), 120, 30);
    let alice = row(&lines, "alice");
    assert!(alice.contains(" 55.0% █████|█████····]···· "), "{alice}");
    assert!(alice.ends_with(&format!(" {:>34}", "▅")), "{alice}");
}

#[test]
fn columns_drop_by_priority() {
    let heads = |width| {
        let lines = lines(&mut view(&four()), width, 10);
        row(&lines, "NAME").trim_end().to_owned()
    };
    assert!(heads(79).contains("RECENT") && !heads(79).contains("CLASS"));
    assert!(heads(72).contains("STATE") && !heads(72).contains("RECENT"));
    assert!(heads(60).contains("MEMORY") && !heads(60).contains("STATE"));
    assert_eq!(heads(40), "NAME     GPU   REQ  USED |REQ]LIM  TOKEN");
    let lines = lines(&mut view(&four()), 40, 10);
    assert_eq!(row(&lines, "alice"), "alice      0 30.0% 55.0% ██|██··]·  12ms");
}

#[test]
fn no_size_is_too_small() {
    for (width, height) in [(1, 1), (2, 3), (7, 2), (8, 4), (13, 5), (20, 8), (39, 9), (300, 1)] {
        let mut view = view(&four());
        press(&mut view, KeyCode::Char('?'));
        lines(&mut view, width, height);
    }
    lines(&mut View::new(true), 80, 24);
    let none = lines(&mut view(&[]), 80, 24);
    assert!(none[0].contains(" 0 clients"));
}

#[test]
fn rows_are_sorted_by_each_column_in_turn_and_reversed() {
    let mut view = view(&four());
    assert_eq!(names(&mut view), ["alice", "bob", "team", "team"]);
    press(&mut view, KeyCode::Char('r'));
    assert_eq!(names(&mut view), ["team", "team", "bob", "alice"]);
    let mut orders = Vec::new();
    for _ in 0..9 {
        press(&mut view, KeyCode::Char('s'));
        let last = lines(&mut view, 80, 24).pop().unwrap();
        orders.push((last.trim_end().rsplit(' ').next().unwrap().to_owned(), names(&mut view).concat()));
    }
    let orders: Vec<_> = orders.iter().map(|(column, names)| (column.as_str(), names.as_str())).collect();
    assert_eq!(
        orders,
        [
            ("MEMORY", "alicebobteamteam"),
            ("TOKEN", "bobaliceteamteam"),
            ("STATE", "alicebobteamteam"),
            ("NAME", "alicebobteamteam"),
            ("CLASS", "bobteamteamalice"),
            ("GPU", "alicebobteamteam"),
            ("REQ", "bobaliceteamteam"),
            ("LIMIT", "teamteamalicebob"),
            ("USED", "alicebobteamteam"),
        ]
    );
}

#[test]
fn shares_are_measured_between_answers_and_60_of_them_are_kept() {
    let mut view = View::new(false);
    let mut used = 0_u64;
    for second in 0..70 {
        let mut alice = client(0, "alice", (0.3, 0.8), 0.9);
        // The client uses half of each fourth second.
        used += if second % 4 == 3 { 500_000_000 } else { 0 };
        alice["total_used_ns"] = used.into();
        view.update(snapshot(second, &[alice]));
    }
    assert_eq!(view.rows[0].history.len(), HISTORY);
    assert_eq!(view.rows[0].used(), 0.0);
    let lines = lines(&mut view, 200, 10);
    // Second 69 stands at the right, second 10 at the left of 60.
    assert!(row(&lines, "alice").trim_end().ends_with(&"▁▄▁▁".repeat(15)), "{lines:#?}");
}

#[test]
fn a_daemon_that_began_anew_begins_a_new_history() {
    let mut view = view(&four());
    view.update(snapshot(11, &four()));
    assert_eq!(view.rows[0].history.len(), 2);
    let mut other = snapshot(12, &four());
    other.epoch = 2;
    view.update(other);
    assert!(view.rows.iter().all(|row| row.history.len() == 1));
    assert_eq!(view.rows[0].used(), 0.55);
}

#[test]
fn a_daemon_that_does_not_answer_is_told_until_it_does() {
    let mut view = view(&four());
    view.fail("no daemon answers at /run/x: refused\nstart one");
    let shown = lines(&mut view, 80, 24);
    assert!(shown[1].starts_with("no daemon answers at /run/x: refused "), "{shown:#?}");
    row(&shown, "alice");
    view.update(snapshot(11, &four()));
    assert!(!lines(&mut view, 80, 24).concat().contains("no daemon"));
}

#[test]
fn the_selected_row_stays_in_sight_and_with_its_client() {
    let clients: Vec<Value> =
        (0..50).map(|n| client(n, &format!("job{n:02}"), (0.01, 1.0), f64::from(50 - n) / 100.0)).collect();
    let mut view = view(&clients);
    let selected = |view: &mut View| {
        let buffer = buffer(view, 40, 10);
        let reversed = |y: &u16| {
            let cell = &buffer[(0, *y)];
            cell.symbol() == "j" && cell.modifier.contains(Modifier::REVERSED)
        };
        let y = (0..10).find(reversed).expect("in sight");
        (0..5).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>()
    };
    // Title, GPU, head, detail and footer leave five rows: a page, known once it was drawn.
    buffer(&mut view, 40, 10);
    for (key, name) in [
        (KeyCode::Down, "job01"),
        (KeyCode::PageDown, "job06"),
        (KeyCode::Up, "job05"),
        (KeyCode::End, "job49"),
        (KeyCode::Down, "job49"),
        (KeyCode::PageUp, "job44"),
        (KeyCode::Char('r'), "job44"),
        (KeyCode::Home, "job49"),
    ] {
        press(&mut view, key);
        assert_eq!(selected(&mut view), name, "after {key:?}");
    }
}

#[test]
fn control_characters_are_never_drawn() {
    let evil = "\u{1b}[2J\u{202e}evil\u{7}\n日本語日本語";
    let mut one = client(0, evil, (0.3, 0.8), 0.5);
    one["program"] = evil.into();
    let mut view = view(&[one]);
    view.fail(evil);
    for (width, height) in [(120, 30), (80, 24), (40, 10)] {
        // Taking the lines fails the test at a control character.
        let text = lines(&mut view, width, height).concat();
        assert!(!text.contains('\u{202e}') && text.contains("\\u{1b}"), "{text}");
    }
}

#[test]
fn without_colour_none_is_used_and_with_it_marks_are_the_same() {
    let plain = buffer(&mut view(&four()), 80, 24);
    assert!(plain.content().iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
    let mut coloured = View::new(true);
    coloured.update(snapshot(10, &four()));
    let coloured = buffer(&mut coloured, 80, 24);
    assert!(coloured.content().iter().any(|cell| cell.fg == Color::Yellow));
    let symbols = |buffer: &Buffer| buffer.content().iter().map(|cell| cell.symbol()).collect::<String>();
    assert_eq!(symbols(&plain), symbols(&coloured));
}

#[test]
fn keys_end_it_and_explain_it() {
    let mut view = view(&four());
    for (width, height) in [(120, 30), (80, 24), (40, 10)] {
        press(&mut view, KeyCode::Char('?'));
        let text = lines(&mut view, width, height).concat();
        for item in HELP {
            assert!(text.contains(item), "{item}: {text}");
        }
        press(&mut view, KeyCode::Char('?'));
    }
    assert!(view.key(KeyCode::Char('c').into()), "without Ctrl it means nothing");
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    for key in [KeyCode::Char('q').into(), KeyCode::Esc.into(), control_c] {
        assert!(!view.key(key));
    }
}
