"use strict";
const ABOUT = /* about */;
// Okabe and Ito's colours, which people with any colour vision tell apart. Each box has its name as well.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
const KINDS = { fractional: "shared in time and SMs", sliced: "cut into MIG devices", whole: "one request at a time" };
const SPAN_NS = 300e9;

const $ = id => document.getElementById(id);
const percent = part => Math.round(part * 100) + "\u00a0%";
const size = bytes => bytes >= 2 ** 30 ? (bytes / 2 ** 30).toFixed(1) + "\u00a0GiB" : Math.round(bytes / 2 ** 20) + "\u00a0MiB";
const time = ns => ns >= 1e9 ? (ns / 1e9).toFixed(1) + "\u00a0s" : ns >= 1e6 ? (ns / 1e6).toFixed(ns >= 1e8 ? 0 : 1) + "\u00a0ms" : Math.round(ns / 1e3) + "\u00a0µs";
const number = value => value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
const count = (items, word, many = word + "s") => `${items.toLocaleString("en")} ${items === 1 ? word : many}`;
const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);
const width = (part, whole) => (whole ? Math.min(100, part / whole * 100) : 0).toFixed(2) + "%";

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const set = (node, key, value) => { if (node.getAttribute(key) !== value) node.setAttribute(key, value); };

// Keeps the nodes of items that are still there, and with them the focus, the place on the page and most of the work. In a `long` list
// the browser leaves out the nodes out of sight, which are updated when they come into sight.
function keep(parent, items, key, build, update, long = false) {
  const had = parent.kept ?? new Map(), now = new Map();
  const unseen = new Set(long ? [...had.values()].filter(node => !node.checkVisibility({ contentVisibilityAuto: true })) : []);
  for (const item of items) {
    const id = key(item), node = had.get(id) ?? build(item);
    now.set(id, node);
    if (!unseen.has(node)) update(node, item);
  }
  for (const [id, node] of had) if (!now.has(id)) node.remove();
  let at = parent.firstChild;
  for (const node of now.values()) {
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
  }
  parent.kept = now;
  const section = parent.closest("section");
  if (section && parent.id !== "clients") section.toggleAttribute("hidden", !items.length);
}
const lines = (id, items) => keep($(id), items, of => of.key, () => make("li"), (node, of) => {
  if (of.at && !node.firstChild) node.append(make("time"), make("span"));
  if (of.at) say(node.firstChild, of.at);
  say(of.at ? node.lastChild : node, of.text);
  node.classList.toggle("late", !!of.late);
});

// A name keeps its colour and its pattern as long as the page is open.
const looks = new Map();
function look(name) {
  if (looks.size > 10000) looks.clear();
  if (!looks.has(name)) looks.set(name, looks.size);
  return [COLOURS[looks.get(name) % COLOURS.length], "p" + looks.get(name) % 5];
}
function paint(node, name) {
  const [colour, pattern] = look(name);
  node.style.setProperty("--own", colour);
  node.classList.add(pattern);
  return node;
}

// Samples of the last five minutes, those that the charts show, the time of the state, and the span of the charts.
let samples = [], shown = [], now = 0, span = 0;

function newChart(label) {
  const svg = make("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img" });
  svg.append(...["area", "mark", "second", "first"].map(kind => make("path", { class: kind })));
  return make("div", { class: "chart" }, make("span", {}, label), make("b"), svg);
}
// Draws lines: each is a function of a sample, and no value leaves a gap. A `mark` is a level; values above three times it are cut.
function chart(node, { text, drawn, mark, least = 0 }) {
  const [label, value, svg] = node.children, [area, level, second, first] = svg.children;
  say(value, text);
  set(svg, "aria-label", `${label.textContent}: ${text} now; a chart of the last ${time(span)}`);
  const values = drawn.map(of => shown.map(of)), top = Math.max(least, mark ?? 0, ...values.flat().filter(value => value != null)) * 1.05 || 1;
  const most = mark ? Math.min(top, 3 * mark) : top;
  const x = sample => (300 * (1 - (now - sample.at_ns) / span)).toFixed(1), y = value => (98 - 96 * Math.min(1, value / most)).toFixed(1);
  const path = values => values.reduce(([d, gap], value, n) => value == null ? [d, true]
    : [`${d}${gap ? "M" : "L"}${x(shown[n])} ${y(value)}${gap ? "h0" : ""}`, false], ["", true])[0];
  [first, second].forEach((line, n) => set(line, "d", path(values[n] ?? [])));
  const from = values[0].findIndex(value => value != null);
  set(area, "d", values.length > 1 || from < 0 ? "" : `${first.getAttribute("d")}V100H${x(shown[from])}Z`);
  set(level, "d", mark ? `M0 ${y(mark)}H300` : "");
}

// Sizes (`wide` and `high`, parts of 1) are true, the places (`x` and `y`) are the drawing's. Returns the whole width, which is
// above 1 where the columns leave gaps.
function lay(boxes) {
  const columns = [];
  let width = 0;
  for (const box of [...boxes].sort((a, b) => b.wide - a.wide)) {
    let column = columns.find(column => column.high + box.high <= 1.0001 && column.wide >= box.wide);
    if (!column) {
      columns.push(column = { x: width, wide: box.wide, high: 0 });
      width += box.wide;
    }
    [box.x, box.y] = [column.x, column.high];
    column.high += box.high;
  }
  return width;
}

// The owners of parts of each GPU: instances of functions, then other processes by name, which take turns in one share.
function owners(state) {
  const on = new Map(state.devices.map(device => [device.gpu, new Map()])), byName = new Map();
  const own = (gpu, key, of, clients) => {
    const all = on.get(gpu);
    if (!all) return;
    const owner = all.get(key) ?? { key, measured: 0, memory: 0, holds: false, waits: false, wide: of.asked, high: of.sm, ...of };
    for (const client of clients) {
      owner.measured += client.measured;
      owner.memory += client.memory_bytes;
      owner.holds ||= client.holds_token;
      owner.waits ||= client.waiting_ns !== null;
    }
    all.set(key, owner);
  };
  for (const client of state.functions.flatMap(of => of.clients)) byName.set(client.name, [...byName.get(client.name) ?? [], client]);
  for (const { name, instances } of state.functions) for (const { instance, life, parts, clients } of instances) {
    if (life === "parked" || life === "stopped") continue;
    parts.forEach((part, n) => {
      const names = parts.length === clients.length ? [clients[n]] : clients;
      const mine = names.flatMap(name => byName.get(name) ?? []).filter(client => client.gpu === part.gpu);
      const { time, sm_bp: sm, memory_bytes: booked } = part.share;
      const of = { name, life, slice: part.slice, booked, asked: time.request / 1e4, limit: time.limit / 1e4, sm: sm / 1e4 };
      own(part.gpu, `${name} ${instance}${parts.length > 1 ? " stage " + part.stage : ""}`, of, mine);
    });
  }
  for (const client of state.clients) {
    own(client.gpu, client.name, { name: client.name, life: "ready", booked: 0, asked: client.quota_request, limit: client.quota_limit, sm: client.sm }, [client]);
  }
  return on;
}
const sentence = of => `${of.key}: guaranteed ${percent(of.asked)} of the time, at most ${percent(of.limit)}, ${percent(of.sm)} of the SMs; used ${percent(of.measured)}${of.holds ? "; holds a token" : of.waits ? "; waits" : ""}${of.life === "ready" ? "" : "; " + of.life}`;

function newGpu() {
  const map = make("div", { class: "map", role: "img", tabindex: 0 });
  return make("article", {}, make("div", { class: "top" }, make("h3"), make("span", { class: "dim n" })), make("div", { class: "late" }), map,
    make("div", { class: "dim" }), newChart("Used, of its time and SMs"), make("div", { class: "bar" }), make("div", { class: "dim" }), make("ul", { class: "owners" }));
}

function gpu(node, { device, all }) {
  const [top, lost, map, free, used, bar, memory, list] = node.children;
  const slices = device.slices ?? [], placed = all.filter(of => of.wide > 0);
  say(top.firstChild, `GPU ${device.gpu}: ${device.name ?? device.uuid}${device.simulated ? " (simulated)" : ""}`);
  say(top.lastChild, [device.celsius == null ? "" : device.celsius + " °C", device.milliwatts == null ? "" : Math.round(device.milliwatts / 1000) + " W", KINDS[device.regime] ?? ""].filter(Boolean).join(" · "));
  say(lost, device.lost ? "Lost: " + device.lost : "");
  set(map, "aria-label", `GPU ${device.gpu} ${device.lost ? "is lost" : "is shared by: " + (all.map(sentence).join(". ") || "nothing")}`);
  let whole = 1;
  if (slices.length) {
    whole = Math.max(...slices.map(slice => slice.start + slice.width));
    for (const slice of slices) {
      const mine = placed.filter(of => of.slice?.start === slice.start);
      mine.forEach((of, n) => Object.assign(of, { x: slice.start, wide: slice.width, y: n * .86 / mine.length, high: .86 / mine.length, fill: of.measured }));
    }
  } else if (device.regime === "whole") {
    placed.forEach((of, n) => Object.assign(of, { x: 0, wide: 1, y: n / placed.length, high: 1 / placed.length, fill: of.measured }));
  } else {
    placed.forEach(of => of.fill = of.measured / of.wide);
    whole = Math.max(1, lay(placed));
  }
  const place = (box, x, y, wide, high, own = "#0000") => set(box, "style", `--own:${own};left:${width(x, whole)};top:${width(y, 1)};width:${width(wide, whole)};height:${width(high, 1)}`);
  const boxes = [...slices.map(slice => ({ key: "slice " + slice.start, slice })), ...placed];
  keep(map, boxes, of => of.key, of => of.name ? make("div", {}, paint(make("i"), of.name), make("span")) : make("div", { class: "place dim" }), (box, of) => {
    if (!of.name) {
      say(box, of.slice.profile);
      return place(box, of.slice.start, 0, of.slice.width, 1);
    }
    set(box, "class", `own ${of.holds ? "holds" : of.waits ? "waits" : ""} ${of.life === "ready" ? "" : "pale"}`);
    set(box, "title", sentence(of));
    set(box.firstChild, "style", `--own:${look(of.name)[0]};width:${width(of.fill, 1)}`);
    place(box, of.x, of.y, of.wide, of.high, look(of.name)[0]);
    say(box.lastChild, `${of.holds ? "▶ " : of.waits ? "… " : ""}${of.key} ${percent(of.measured)}`);
  });
  say(free, all.length ? "" : "No process");
  chart(used, { text: percent(samples.at(-1)?.gpus[device.gpu] ?? 0), drawn: [sample => sample.gpus[device.gpu] ?? 0], least: 1 });
  const booked = sum(all, of => of.booked), source = device.memory_source === "client" ? ", as its first process reports" : "";
  keep(bar, all.filter(of => of.memory > 0), of => of.key, of => paint(make("i"), of.name), (part, of) => set(part, "style", `--own:${look(of.name)[0]};width:${width(of.memory, device.memory_bytes)}`));
  say(memory, `Memory: ${size(device.held_bytes)}${device.memory_bytes ? " of " + size(device.memory_bytes) : ""} held${booked ? `, ${size(booked)} booked` : ""}${source}`);
  keep(list, all, of => of.key, of => make("li", {}, paint(make("span", { class: "key" }), of.name), make("span")), (line, of) => {
    const asked = of.asked > 0 ? `of ${percent(of.asked)}` : "without a guarantee";
    say(line.lastChild, `${of.holds ? "▶ " : of.waits ? "… " : ""}${of.key}: ${percent(of.measured)} ${asked}, ${size(of.memory)}`);
  });
}

function newFunction(of) {
  const log = make("details", {}, make("summary", {}, `Log of ${of.name}`), make("pre", { tabindex: 0 }));
  log.addEventListener("toggle", async () => {
    if (!log.open) return;
    const answer = await fetch(`${ABOUT.logs}?tail=100&name=${of.name}`), text = await answer.text();
    log.lastChild.textContent = answer.ok ? text.split("\n").filter(Boolean).map(line => JSON.parse(line)).map(line => `${line.timestamp} ${line.instance}: ${line.text}`).join("\n") || "no output yet" : text;
  });
  return make("article", {}, make("div", { class: "top" }, make("h3", {}, paint(make("span", { class: "key" }), of.name), of.name), make("span", { class: "n" })), make("div"),
    make("div", { class: "charts" }, newChart("Latency, p95"), newChart("Calls/s"), newChart("Instances"), newChart("GPU time")), make("div", { class: "dim n" }), log);
}

const ready = of => of.instances.filter(one => one.life === "ready").length;
const recent = of => samples.at(-1)?.functions?.[of.name];
const isLate = of => of.slo_ns && recent(of)?.p95_ns > of.slo_ns;

function fun(node, of) {
  const [top, problem, charts, more] = node.children, last = recent(of) ?? {}, mine = sample => sample.functions[of.name];
  const [latency, rate, instances, used] = charts.children, lives = {};
  for (const { life } of of.instances) lives[life] = (lives[life] ?? 0) + 1;
  say(top.lastChild, [["inference", of.state].includes(of.workload) ? "" : of.workload, of.state, ...Object.entries(lives).map(([life, count]) => `${count} ${life}`)].filter(Boolean).join(" · "));
  say(problem, of.problem ?? of.measuring ?? "");
  set(problem, "class", of.problem ? "late" : "dim");
  for (const chart of [latency, rate]) chart.toggleAttribute("hidden", of.workload === "training");
  chart(latency, {
    text: last.p95_ns == null ? "no request" : `${time(last.p95_ns)}${of.slo_ns ? ` of ${time(of.slo_ns)}` : ""}${isLate(of) ? " ⚠" : ""}`,
    mark: of.slo_ns, drawn: [sample => mine(sample)?.p95_ns, sample => mine(sample)?.p50_ns],
  });
  set(latency.children[1], "class", isLate(of) ? "late" : "");
  chart(rate, { text: number(last.rate ?? 0), drawn: [sample => mine(sample)?.rate], least: 1 });
  chart(instances, { text: String(ready(of)), drawn: [sample => mine(sample)?.ready], least: 1 });
  chart(used, { text: percent(last.used ?? 0), drawn: [sample => mine(sample)?.used], least: .1 });
  say(more, [
    last.p50_ns == null ? "" : `median ${time(last.p50_ns)}`, of.answered ? `${count(of.answered, "request")} answered${of.slo_ns ? `, ${percent(of.within_slo / of.answered)} in time` : ""}` : "",
    of.waiting ? `${of.waiting} waiting` : "", of.rejected ? `${of.rejected} refused` : "", `${number(of.gpu_seconds)}\u00a0GPU\u00a0s`,
    `${count(of.starts, "start")}${of.parked ? `, parked ${of.parked} times` : ""}${of.migrated ? `, moved ${of.migrated} times` : ""}`, `${size(of.memory_bytes)} each`,
  ].filter(Boolean).join(" · "));
}

// A pipeline's instance: a strip for each of its GPUs, with the stages at their slices.
function pipeline(node, { of, one, devices }) {
  say(node.firstChild, `${of.name} ${one.instance} (${one.life}): ` + one.parts.map(part => `stage ${part.stage} on GPU ${part.gpu}${part.slice ? ", slice " + part.slice.start : ""}`).join(" → "));
  const used = devices.filter(device => one.parts.some(part => part.gpu === device.gpu));
  keep(node.lastChild, used, device => device.gpu, () => make("div", {}, make("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": true }), make("div", { class: "strip" })), (picture, device) => {
    const [arrows, strip] = picture.children;
    const places = device.slices.length ? device.slices : [{ start: undefined, width: 1, profile: device.name }];
    keep(strip, places, slice => slice.start, () => make("div", {}, make("i"), make("span")), (box, slice) => {
      const stages = one.parts.filter(part => part.gpu === device.gpu && part.slice?.start === slice.start).map(part => part.stage);
      set(box, "style", `flex:${slice.width};--own:${look(of.name)[0]}`);
      set(box, "class", stages.length ? "own" : "");
      set(box, "title", slice.profile);
      say(box.lastChild, stages.join(", "));
    });
    const whole = sum(places, slice => slice.width), middle = slice => (slice.start ?? 0) + slice.width / 2;
    const at = one.parts.filter(part => part.gpu === device.gpu).map(part => 100 * middle(places.find(slice => slice.start === part.slice?.start) ?? places[0]) / whole);
    keep(arrows, at.slice(1).map((to, n) => ({ from: at[n], to })), ({ from, to }) => `${from} ${to}`, ({ from, to }) => make("path", { d: `M${from} 20Q${(from + to) / 2} -16 ${to} 18M${to - .6} 12L${to} 19L${to + .6} 12` }), () => {});
  });
}

// Heading and text of each column after the name.
const COLUMNS = [
  ["GPU", client => String(client.gpu)],
  ["asked", client => `${percent(client.quota_request)} to ${percent(client.quota_limit)}`],
  ["used", client => percent(client.measured)],
  ["SMs", client => percent(client.sm)],
  ["memory", client => `${size(client.memory_bytes)}${client.memory_limit_bytes === null ? "" : " of " + size(client.memory_limit_bytes)}`],
  ["waited", client => time(client.waited_ns)],
  ["launches", client => number(client.launches)],
  ["token", client => client.holds_token ? "▶ holds" : client.waiting_ns === null ? "" : `… waits ${time(client.waiting_ns)}`],
  ["note", client => [client.observed ? "observed only" : "", kind(client), client.why?.text].filter(Boolean).join("; ")],
];
const USED = 3;
function kind({ class: kind, scale_state: of, scaled_request: least, scaled_limit: most }) {
  const tolerance = kind?.slo_sensitive?.tolerance_basis_points;
  const severity = of?.severity_basis_points ? ` ${of.severity_basis_points / 100} %` : "";
  return [!kind ? "" : tolerance == null ? "best effort" : `SLO-sensitive, tolerance ${tolerance / 100} %`, !of || most === null ? "" : `${of.state}${severity}, at least ${percent(least)}, at most ${percent(most)}`].filter(Boolean).join(", ");
}
function newRow() {
  const row = make("div", { role: "row" }, make("div", { role: "rowheader" }, make("b"), document.createElement("br"), make("small")));
  row.append(...COLUMNS.map(([head]) => make("div", { role: "cell", "data-head": head, class: "n" }, make("span"))));
  row.children[USED].append(make("div", { class: "bar" }, make("i"), make("b"), make("b")));
  return row;
}
function process(row, of) {
  const [name, , more] = row.firstChild.children;
  say(name, of.name);
  say(more, `${of.program}, pid ${of.pid}, user ${of.uid}`);
  COLUMNS.forEach(([, text], n) => {
    const cell = row.children[n + 1], said = text(of);
    say(cell.firstChild, said);
    cell.classList.toggle("none", !said);
  });
  const [used, request, limit] = row.children[USED].lastChild.children;
  set(used, "style", `width:${width(of.measured, 1)}`);
  set(request, "style", `left:${width(of.quota_request * .99, 1)}`);
  set(limit, "style", `left:${width(of.quota_limit * .99, 1)}`);
  row.children[8].classList.toggle("late", of.waiting_ns > 1e9);
}

// What a person must know first: problems, or that there are none.
function verdict(state) {
  const judged = state.functions.filter(of => of.slo_ns && recent(of)?.p95_ns != null), late = judged.filter(isLate);
  const problems = [
    ...state.devices.filter(device => device.lost).map(device => `GPU ${device.gpu} is lost: ${device.lost}`),
    ...state.functions.filter(of => of.problem).map(of => `${of.name}: ${of.problem}`),
    ...late.map(of => `${of.name} is late: p95 is ${time(recent(of).p95_ns)}, its SLO ${time(of.slo_ns)}`),
    ...state.journal_failure ? ["No journal is written: " + state.journal_failure] : state.journal_lost ? [`The journal has lost ${state.journal_lost} events`] : [],
  ];
  document.title = (problems.length ? "⚠ " : "") + ABOUT.title;
  const good = judged.length ? [`✓ ${judged.length === 1 ? judged[0].name + " keeps its SLO" : `All ${judged.length} functions with requests keep their SLOs`}`] : [];
  lines("verdict", problems.length ? problems.map(text => ({ key: text, text: "⚠ " + text, late: true })) : good.map(text => ({ key: "good", text })));
}

function waiting(state, clients) {
  const of = state.functions.filter(of => of.waiting).map(of => {
    const count = ready(of), why = of.problem ?? of.measuring ?? (count ? `all of its ${count} ready instances are busy` : "no instance is ready yet");
    return { key: of.name, text: `${of.name}: ${of.waiting} requests wait: ${why}`, late: true };
  });
  const held = clients.filter(client => client.why).map(client => ({ key: `${client.client}/${client.pid}`, text: `${client.name}: ${client.why.text}` }));
  lines("waiting", [...of, ...held]);
}

let last;
function render(state) {
  last = state;
  now = state.now_ns;
  shown = samples.filter((sample, n) => samples.length < 160 || n === samples.length - 1 || Math.round(sample.at_ns / 1e9) % 2);
  span = Math.min(SPAN_NS, Math.max(60e9, now - (samples[0]?.at_ns ?? now)));
  say($("span"), `${Math.round(span / 1e9)} seconds`);
  state.functions ??= [];
  // The daemon tells the names and sensors by UUID, the host in the device itself.
  for (const device of state.devices) Object.assign(device, state.sensors?.find(of => of.uuids.includes(device.uuid)), { lost: device.lost ?? state.lost?.find?.(of => of.uuid === device.uuid)?.why });
  const clients = [...state.functions.flatMap(of => of.clients), ...state.clients], on = owners(state);
  say($("sum"), [count(state.devices.length, "GPU"), ABOUT.logs ? count(state.functions.length, "function") : "", ABOUT.logs ? count(sum(state.functions, of => of.instances.length), "instance") : count(state.processes, "process", "processes"), state.version].filter(Boolean).join(" · "));
  for (const of of state.functions) look(of.name);
  verdict(state);
  keep($("functions"), state.functions, of => of.name, newFunction, fun, true);
  keep($("gpus"), state.devices, device => device.gpu, newGpu, (node, device) => gpu(node, { device, all: [...on.get(device.gpu).values()] }), true);
  const staged = state.functions.flatMap(of => of.instances.filter(one => of.workload === "pipeline" && one.parts.length > 1).map(one => ({ of, one, devices: state.devices })));
  keep($("pipelines"), staged, ({ of, one }) => `${of.name} ${one.instance}`, () => make("div", {}, make("div"), make("div")), pipeline, true);
  waiting(state, clients);
  lines("models", (state.models?.models ?? []).map(model => ({ key: model.name, text: `${model.name}: ` + (model.arenas.map(arena => `${size(arena.bytes)} on the ${arena.tier}, ${count(arena.references, "instance")}`).join(", ") || "on disk") })));
  lines("events", state.decisions.slice(0, 40).map(of => {
    const at = of.at_ns ?? of.from_ns, text = of.what ?? `${of.name}: ${of.text}${of.count > 1 ? ` (${of.count} times)` : ""}`;
    return { key: of.what ? at + text : of.name + of.reason, at: time(Math.max(0, now - at)) + " ago", text };
  }));
  const part = $("filter").value.toLowerCase(), order = $("order").value;
  const some = clients.filter(client => client.name.toLowerCase().includes(part));
  const byName = (a, b) => a.name < b.name ? -1 : a.name > b.name ? 1 : a.pid - b.pid;
  some.sort((a, b) => (order === "name" ? 0 : (b[order] ?? -1) - (a[order] ?? -1)) || byName(a, b));
  $("clients").closest("section").hidden = !clients.length;
  keep($("clients"), some, of => `${of.client}/${of.pid}`, newRow, process, true);
  say($("shown"), part ? `${some.length} of ${clients.length}` : "");
}

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
// Shows the state at once, and again half a second after each answer.
async function follow() {
  try {
    const state = await ask(ABOUT.state);
    if (samples.at(-1)?.at_ns > state.now_ns) samples = [];
    const since = samples.at(-1)?.at_ns ?? 0, gpus = {};
    if (!ABOUT.history) for (const { gpu, measured, sm } of state.clients) gpus[gpu] = (gpus[gpu] ?? 0) + measured * sm;
    const more = ABOUT.history ? await ask(`${ABOUT.history}?after_ns=${since}`) : state.now_ns - since < 1e9 ? [] : [{ at_ns: state.now_ns, functions: {}, gpus }];
    samples = [...samples, ...more].filter(sample => sample.at_ns > state.now_ns - SPAN_NS);
    render(state);
    $("gone").hidden = true;
  } catch (error) {
    say($("gone"), "No answer; what is shown is old. " + error.message);
    $("gone").hidden = false;
  }
  setTimeout(follow, 500);
}

say($("title"), ABOUT.title);
$("json").href = ABOUT.state;
$("head").append(...["name", ...COLUMNS.map(([head]) => head)].map(head => make("div", { role: "columnheader" }, head)));
for (const id of ["filter", "order"]) $(id).addEventListener("input", () => last && render(last));
follow();
