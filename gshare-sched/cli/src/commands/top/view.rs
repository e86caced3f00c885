//! The screen of `gshare top`: state and picture, without clock, daemon or terminal.

use super::share;
use gshare_core::{Bytes, ClientId, Duration, ServiceClass};
use gshare_sched::node::printable;
use gshare_sched::scale::ScaleState;
use gshared::{ClientSnapshot, Snapshot};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Span;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Measurements kept of each client.
const HISTORY: usize = 60;
/// Lines of the explanation of keys and marks, packed into the width.
const HELP: [&str; 8] = [
    "q Esc ^C end",
    "s sort by next column",
    "r reverse",
    "arrows PgUp PgDn Home End select",
    "bar: █ used",
    "| request",
    "] limit",
    "╡ both at once",
];

/// A column, in its order from left to right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Column {
    Name,
    Class,
    Gpu,
    Request,
    Limit,
    Used,
    Bar,
    Memory,
    Token,
    State,
    History,
}

impl Column {
    /// By priority: where the width is too small for all columns, the first stay longest.
    const BY_PRIORITY: [Self; 11] = [
        Self::Name,
        Self::Used,
        Self::Bar,
        Self::Gpu,
        Self::Token,
        Self::Request,
        Self::Limit,
        Self::Memory,
        Self::State,
        Self::History,
        Self::Class,
    ];

    /// The head and the least width in cells. With a cell between neighbours, all columns need 80.
    const fn head(self) -> (&'static str, u16) {
        match self {
            Self::Name => ("NAME", 8),
            Self::Class => ("CLASS", 6),
            Self::Gpu => ("GPU", 3),
            Self::Request => ("REQ", 5),
            Self::Limit => ("LIMIT", 5),
            Self::Used => ("USED", 5),
            Self::Bar => ("|REQ]LIM", 8),
            Self::Memory => ("MEMORY", 9),
            Self::Token => ("TOKEN", 5),
            Self::State => ("STATE", 10),
            Self::History => ("RECENT", 6),
        }
    }

    /// The next column to sort by.
    const fn next(self) -> Self {
        match self {
            Self::Name => Self::Class,
            Self::Class => Self::Gpu,
            Self::Gpu => Self::Request,
            Self::Request => Self::Limit,
            Self::Limit => Self::Used,
            Self::Used | Self::Bar => Self::Memory,
            Self::Memory => Self::Token,
            Self::Token => Self::State,
            Self::State | Self::History => Self::Name,
        }
    }

    /// Figures begin with the largest, words with the first of the alphabet.
    fn order(self, a: &Row, b: &Row) -> Ordering {
        let (x, y) = (&a.client, &b.client);
        match self {
            Self::Name => x.name.cmp(&y.name),
            Self::Class => class(x).cmp(&class(y)),
            Self::Gpu => x.gpu.cmp(&y.gpu),
            Self::Request => y.quota_request.total_cmp(&x.quota_request),
            Self::Limit => y.quota_limit.total_cmp(&x.quota_limit),
            Self::Used | Self::Bar | Self::History => b.used().total_cmp(&a.used()),
            Self::Memory => y.memory_bytes.cmp(&x.memory_bytes),
            Self::Token => (y.holds_token, y.waiting_ns).cmp(&(x.holds_token, x.waiting_ns)),
            Self::State => y.scale_state.cmp(&x.scale_state),
        }
    }
}

/// A client and its measured shares of time, the current share last.
#[derive(Debug)]
struct Row {
    client: ClientSnapshot,
    history: VecDeque<f64>,
}

impl Row {
    fn used(&self) -> f64 {
        self.history.back().copied().unwrap_or(0.0)
    }

    fn cell(&self, column: Column) -> String {
        let client = &self.client;
        match column {
            Column::Name => client.name.clone(),
            Column::Class => class(client),
            Column::Gpu => client.gpu.number().to_string(),
            Column::Request => percent(client.quota_request),
            Column::Limit => percent(client.quota_limit),
            Column::Used => percent(self.used()),
            Column::Memory => client
                .memory_limit_bytes
                .map_or_else(|| "-".to_owned(), |limit| bytes_of(client.memory_bytes, limit)),
            Column::Token => match (client.holds_token, client.waiting_ns) {
                (true, _) => "holds".to_owned(),
                (false, Some(waiting)) => time(waiting),
                (false, None) => "-".to_owned(),
            },
            Column::State => match client.scale_state {
                Some(ScaleState::Emergency { severity_basis_points: n }) => {
                    format!("emerg {}.{:02}", n / 10_000, n % 10_000 / 100)
                }
                Some(state) => state.to_string(),
                None => "-".to_owned(),
            },
            Column::Bar | Column::History => String::new(),
        }
    }
}

/// The screen: clients with their history, the selection, the order, and the scroll position of the table.
#[derive(Debug)]
pub(super) struct View {
    colour: bool,
    snapshot: Option<Snapshot>,
    /// The last failure to ask the daemon, until the next answer.
    failure: Option<String>,
    rows: Vec<Row>,
    sort: Column,
    reversed: bool,
    selected: Option<ClientId>,
    /// Rows above the first visible row.
    offset: usize,
    /// Visible rows at the last drawing.
    page: usize,
    help: bool,
}

impl View {
    /// A view before the first snapshot; without `colour` it draws no colours.
    pub(super) fn new(colour: bool) -> Self {
        Self {
            colour,
            snapshot: None,
            failure: None,
            rows: Vec::new(),
            sort: Column::Used,
            reversed: false,
            selected: None,
            offset: 0,
            page: 1,
            help: false,
        }
    }

    /// Takes over the daemon's current snapshot. A share is measured since the snapshot before. With another run of the daemon,
    /// measuring begins again, since its ids belong to other clients.
    pub(super) fn update(&mut self, mut snapshot: Snapshot) {
        let before = self
            .snapshot
            .as_ref()
            .filter(|before| (before.pid, before.epoch) == (snapshot.pid, snapshot.epoch))
            .map(|before| before.now_ns);
        let mut rows: BTreeMap<ClientId, Row> =
            self.rows.drain(..).map(|row| (row.client.client, row)).collect();
        for client in std::mem::take(&mut snapshot.clients) {
            let known = before.and_then(|then| Some((then, rows.remove(&client.client)?)));
            let (used, mut history) = match known {
                Some((then, row)) if then < snapshot.now_ns => {
                    let late = client.total_used_ns.saturating_sub(row.client.total_used_ns);
                    (share(late, snapshot.now_ns.saturating_since(then)), row.history)
                }
                Some((_, row)) => (client.measured, row.history),
                None => (client.measured, VecDeque::with_capacity(HISTORY)),
            };
            if history.len() == HISTORY {
                history.pop_front();
            }
            history.push_back(used);
            self.rows.push(Row { client, history });
        }
        self.snapshot = Some(snapshot);
        self.failure = None;
        self.order();
    }

    /// Shows the daemon's failure to answer; the last snapshot stays on the screen.
    pub(super) fn fail(&mut self, why: &str) {
        self.failure = why.lines().next().map(str::to_owned);
    }

    /// Carries a key out; false where it ends the command.
    pub(super) fn key(&mut self, key: KeyEvent) -> bool {
        let last = self.rows.len().saturating_sub(1);
        let at = self.selected_row();
        let to = match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Up => at.saturating_sub(1),
            KeyCode::Down => at + 1,
            KeyCode::PageUp => at.saturating_sub(self.page),
            KeyCode::PageDown => at + self.page,
            KeyCode::Home => 0,
            KeyCode::End => last,
            code => {
                match code {
                    KeyCode::Char('s') => (self.sort, self.reversed) = (self.sort.next(), false),
                    KeyCode::Char('r') => self.reversed = !self.reversed,
                    KeyCode::Char('?') => self.help = !self.help,
                    _ => return true,
                }
                self.order();
                return true;
            }
        };
        self.selected = self.rows.get(to.min(last)).map(|row| row.client.client);
        true
    }

    fn order(&mut self) {
        let (sort, reversed) = (self.sort, self.reversed);
        self.rows.sort_by(|a, b| {
            let order = sort.order(a, b);
            let order = if reversed { order.reverse() } else { order };
            order.then_with(|| a.client.name.cmp(&b.client.name)).then(a.client.client.cmp(&b.client.client))
        });
    }

    /// The selected row, or the first row without a selection.
    fn selected_row(&self) -> usize {
        self.rows.iter().position(|row| Some(row.client.client) == self.selected).unwrap_or(0)
    }

    fn colour(&self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    /// Draws the whole screen: the daemon, a line for each GPU, the table, the selected client, keys.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let mut page = Page { buffer: frame.buffer_mut(), width: area.width, height: area.height };
        let mut top = 0;
        for (text, style) in self.above(area.height) {
            page.put(0, top, area.width, &text, style);
            top += 1;
        }
        let footer = self.footer(area.width);
        let detail = (area.height >= 8).then(|| self.detail()).flatten();
        let below = footer.len() + usize::from(detail.is_some());
        let bottom = area.height.saturating_sub(u16::try_from(below).unwrap_or(u16::MAX)).max(top);
        for (y, text) in (bottom..).zip(detail.iter().chain(&footer)) {
            page.put(0, y, area.width, text, Style::new());
        }
        if bottom > top {
            self.table(&mut page, top, bottom);
        }
    }

    /// The lines above the table.
    fn above(&self, height: u16) -> Vec<(String, Style)> {
        let Some(snapshot) = &self.snapshot else { return Vec::new() };
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let mut lines = vec![(
            format!(
                "gshared {}: {} processes, {} clients, pid {} at {}",
                snapshot.version,
                snapshot.processes,
                self.rows.len(),
                snapshot.pid,
                snapshot.socket.display()
            ),
            bold,
        )];
        let journal =
            snapshot.journal_failure.as_ref().map(|why| format!("WARNING: no journal is written: {why}"));
        let lost = (snapshot.journal_lost > 0)
            .then(|| format!("the journal has lost {} events", snapshot.journal_lost));
        let problems = [self.failure.clone(), journal, lost].into_iter().flatten();
        let second = snapshot.neighbours.iter().map(|other| format!("WARNING: {other}"));
        lines.extend(problems.chain(second).map(|text| (text, self.colour(Color::Red).patch(bold))));
        let most = usize::from(height / 4).max(1);
        for device in snapshot.devices.iter().take(most) {
            let here = || self.rows.iter().filter(|row| row.client.gpu == device.gpu);
            let used: f64 = here().map(Row::used).sum();
            // The processes of an instance share its request.
            let mut seen = BTreeSet::new();
            let instances = here().filter(|row| seen.insert(&row.client.name));
            let requested: f64 = instances.map(|row| row.client.quota_request).sum();
            let memory = if device.memory_bytes == Bytes::ZERO {
                "memory unknown".to_owned()
            } else {
                format!("memory {}", bytes_of(device.held_bytes, device.memory_bytes))
            };
            let simulated = if device.simulated { "  simulated" } else { "" };
            let line = format!(
                "{:<5} used {:>6} asked {:>6}  {memory}{simulated}  {}",
                device.gpu.to_string(),
                percent(used),
                percent(requested),
                snapshot.model_of(device).unwrap_or(&device.uuid)
            );
            lines.push((line, Style::new()));
        }
        if snapshot.devices.len() > most {
            lines.push((format!("and {} more GPUs", snapshot.devices.len() - most), Style::new()));
        }
        lines
    }

    /// Facts of the selected client without a column in the table.
    fn detail(&self) -> Option<String> {
        let client = &self.rows.get(self.selected_row())?.client;
        let scaled = client.scaled_request.zip(client.scaled_limit);
        let scaled = scaled.map(|(least, most)| format!(", {} to {} now", percent(least), percent(most)));
        Some(format!(
            "> {}: pid {}, SMs {}{}, waited {}, {} launches, uid {}, {}",
            client.name,
            client.pid,
            percent(client.sm),
            scaled.unwrap_or_default(),
            time(client.waited_ns),
            client.launches,
            client.uid,
            client.program
        ))
    }

    fn footer(&self, width: u16) -> Vec<String> {
        let reversed = if self.reversed { ", reversed" } else { "" };
        let mut lines = vec![format!("? help  q end  sorted by {}{reversed}", self.sort.head().0)];
        if self.help {
            for item in HELP {
                let line = lines.last_mut().filter(|line| {
                    Span::raw(line.as_str()).width() + Span::raw(item).width() + 2 <= usize::from(width)
                });
                match line {
                    Some(line) => *line += &format!("  {item}"),
                    None => lines.push(item.to_owned()),
                }
            }
        }
        lines
    }

    /// The head and as many rows as fit from line `top` to before line `bottom`, the selected row among them.
    fn table(&mut self, page: &mut Page<'_>, top: u16, bottom: u16) {
        self.page = usize::from(bottom - top - 1).max(1);
        let selected = self.selected_row();
        self.offset = self
            .offset
            .min(self.rows.len().saturating_sub(self.page))
            .clamp((selected + 1).saturating_sub(self.page), selected);
        let columns = columns(page.width, &self.rows);
        let head = Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED);
        for &(column, x, width) in &columns {
            let sorted = if column == self.sort { head.add_modifier(Modifier::REVERSED) } else { head };
            page.put(x, top, width, &aligned(column, width, column.head().0), sorted);
        }
        for (y, row) in (top + 1..bottom).zip(self.rows.iter().skip(self.offset)) {
            let line = if self.selected == Some(row.client.client) {
                Style::new().add_modifier(Modifier::REVERSED)
            } else {
                Style::new()
            };
            for &(column, x, width) in &columns {
                match column {
                    Column::Bar => self.bar(page, (x, y), width, row),
                    Column::History => {
                        let last = row.history.iter().rev().take(usize::from(width)).rev();
                        let text: String = last.map(|share| spark(*share)).collect();
                        page.put(x, y, width, &aligned(column, width, &text), self.colour(Color::Cyan));
                    }
                    _ => page.put(x, y, width, &aligned(column, width, &row.cell(column)), line),
                }
            }
        }
    }

    /// Draws used time as a bar over the whole of the time, with marks at the ends of the request and the limit.
    fn bar(&self, page: &mut Page<'_>, (x, y): (u16, u16), width: u16, row: &Row) {
        let (request, limit) = (row.client.quota_request, row.client.quota_limit);
        let used = row.used();
        // The limit's window differs from the measurement's window.
        let colour = if used > limit + 0.02 {
            Color::Red
        } else if used > request {
            Color::Yellow
        } else {
            Color::Green
        };
        // The cell at the end of a share.
        let mark = |share: f64| {
            let part = |cell: &u16| f64::from(*cell) < share * f64::from(width) - 1e-9;
            (0..width).take_while(part).last().unwrap_or(0)
        };
        for cell in 0..width {
            let filled = f64::from(cell) + 0.5 <= used * f64::from(width);
            let glyph = match (cell == mark(request), cell == mark(limit)) {
                (true, true) => "╡",
                (true, false) => "|",
                (false, true) => "]",
                (false, false) if filled => "█",
                (false, false) => "·",
            };
            page.put(x + cell, y, 1, glyph, if filled { self.colour(colour) } else { Style::new() });
        }
    }
}

/// A buffer of `width` x `height` cells; all writes stay inside it.
struct Page<'a> {
    buffer: &'a mut Buffer,
    width: u16,
    height: u16,
}

impl Page<'_> {
    /// Writes a text into `width` cells; a wider text ends with `…`. Control characters are shown as escapes.
    fn put(&mut self, x: u16, y: u16, width: u16, text: &str, style: Style) {
        let width = width.min(self.width.saturating_sub(x));
        if y >= self.height || width == 0 {
            return;
        }
        let text = printable(text);
        if Span::raw(&*text).width() <= usize::from(width) {
            self.buffer.set_stringn(x, y, text, width.into(), style);
        } else {
            let (end, _) = self.buffer.set_stringn(x, y, text, usize::from(width) - 1, style);
            self.buffer.set_stringn(end, y, "…", 1, style);
        }
    }
}

/// As many columns as fit into `width`, from the left. Each has its first cell and its width.
fn columns(width: u16, rows: &[Row]) -> Vec<(Column, u16, u16)> {
    let mut fit: Vec<(Column, u16)> = Vec::new();
    let mut spare = width;
    for column in Column::BY_PRIORITY {
        let gap = u16::from(!fit.is_empty());
        let least = column.head().1;
        match spare.checked_sub(least + gap) {
            Some(rest) => spare = rest,
            None if fit.is_empty() => spare = 0,
            None => break,
        }
        fit.push((column, least.min(width)));
    }
    let longest = rows.iter().map(|row| Span::raw(row.client.name.as_str()).width()).max().unwrap_or(0);
    let longest = u16::try_from(longest).unwrap_or(u16::MAX);
    // These columns share the rest of the width, in this order.
    for (column, most) in [
        (Column::Bar, 20),
        (Column::Name, longest.min(24)),
        (Column::History, 60),
        (Column::Bar, 60),
        (Column::Name, longest),
    ] {
        if let Some((_, now)) = fit.iter_mut().find(|(one, _)| *one == column) {
            let more = most.saturating_sub(*now).min(spare);
            *now += more;
            spare -= more;
        }
    }
    fit.sort_by_key(|(column, _)| *column);
    let mut x = 0;
    fit.into_iter()
        .map(|(column, width)| {
            let at = (column, x, width);
            x += width + 1;
            at
        })
        .collect()
}

/// Names and bars begin at the left of their column, figures end at its right.
fn aligned(column: Column, width: u16, text: &str) -> String {
    let width = usize::from(width);
    if matches!(column, Column::Name | Column::Bar) { text.to_owned() } else { format!("{text:>width$}") }
}

fn class(client: &ClientSnapshot) -> String {
    match client.class {
        Some(ServiceClass::SloSensitive { tolerance }) => format!("slo {}", tolerance.get() / 100),
        Some(ServiceClass::BestEffort) => "best".to_owned(),
        _ => "-".to_owned(),
    }
}

/// At most five characters below 1000 %.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent < 99.95 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

/// A height of eight for a share of the time.
fn spark(share: f64) -> char {
    let level = (1..8).filter(|level| f64::from(*level) / 8.0 < share).count();
    ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][level]
}

fn bytes_of(used: Bytes, of: Bytes) -> String {
    const UNITS: [(u64, &str); 5] =
        [(1, "B"), (1 << 10, "K"), (1 << 20, "M"), (1 << 30, "G"), (1 << 40, "T")];
    format!("{}/{}", short(used.get(), &UNITS), short(of.get(), &UNITS))
}

fn time(time: Duration) -> String {
    const UNITS: [(u64, &str); 6] = [
        (1, "ns"),
        (1_000, "us"),
        (1_000_000, "ms"),
        (1_000_000_000, "s"),
        (60_000_000_000, "m"),
        (3_600_000_000_000, "h"),
    ];
    short(time.as_nanos(), &UNITS)
}

/// At most three digits of the largest unit with a value of about one or more: `0B`, `1.5G`, `120ms`.
#[expect(clippy::cast_precision_loss, reason = "a report")]
fn short(value: u64, units: &[(u64, &str)]) -> String {
    let (value, smallest) = (value as f64, units[0]);
    let in_unit = |unit: u64| value / unit as f64;
    // Above 0.976 of a unit the next smaller unit would need a fourth digit, at a factor of 1024.
    let largest = units.iter().rev().find(|(unit, _)| in_unit(*unit) >= 0.976);
    let &(unit, name) = largest.unwrap_or(&smallest);
    let n = in_unit(unit);
    if n < 9.95 && unit > 1 { format!("{n:.1}{name}") } else { format!("{n:.0}{name}") }
}

#[cfg(test)]
mod tests;
