// Watches the page and posts what it saw: errors, the time and the changed nodes of each drawing, texts with too little contrast, parts
// without a label, and texts that spill.
const seen = { errors: [], drawing_ms: [], changes: [], contrast: [], labels: [], spill: [] };
addEventListener("error", event => seen.errors.push(event.message));
addEventListener("unhandledrejection", event => seen.errors.push(String(event.reason)));
for (const level of ["error", "warn"]) console[level] = (...said) => seen.errors.push(said.join(" "));

const drawing = render;
let changes = 0;
new MutationObserver(records => changes += records.reduce((sum, record) => sum + 1 + record.addedNodes.length, 0))
  .observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
render = state => {
  seen.changes.push(changes);
  changes = 0;
  const begun = performance.now();
  drawing(state);
  document.body.getBoundingClientRect();
  seen.drawing_ms.push(performance.now() - begun);
};

const rgb = text => {
  const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
  return { r, g, b, a };
};
const over = (top, below) => ({ r: top.r * top.a + below.r * (1 - top.a), g: top.g * top.a + below.g * (1 - top.a), b: top.b * top.a + below.b * (1 - top.a), a: 1 });
const luminance = ({ r, g, b }) => {
  const [red, green, blue] = [r, g, b].map(value => value / 255 <= .04045 ? value / 255 / 12.92 : ((value / 255 + .055) / 1.055) ** 2.4);
  return .2126 * red + .7152 * green + .0722 * blue;
};
function background(node) {
  if (!node) return { r: 255, g: 255, b: 255, a: 1 };
  const own = rgb(getComputedStyle(node).backgroundColor);
  return own.a === 1 ? own : over(own, background(node.parentElement));
}
function ratio(node) {
  let opacity = 1;
  for (let at = node; at; at = at.parentElement) opacity *= getComputedStyle(at).opacity;
  const below = background(node), text = rgb(getComputedStyle(node).color);
  const [dark, light] = [luminance(below), luminance(over({ ...text, a: text.a * opacity }, below))].sort((a, b) => a - b);
  return (light + .05) / (dark + .05);
}

function audit() {
  const shown = [...document.body.querySelectorAll("*")].filter(node => node.checkVisibility() && !["SCRIPT", "STYLE"].includes(node.tagName));
  const what = node => `${node.tagName} ${node.id || node.className.baseVal || node.className} ${node.textContent.slice(0, 40)}`;
  for (const node of shown) {
    const texts = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (texts && ratio(node) < 4.5) seen.contrast.push(`${what(node)}: ${ratio(node).toFixed(2)}`);
    const { left, right } = node.getBoundingClientRect(), clipped = node.closest(".map, .strip, .bar, svg");
    if (!clipped && right - left > 0 && (right > innerWidth + 1 || left < -1)) seen.spill.push(`out of the window: ${what(node)}`);
    if (texts && getComputedStyle(node).overflowX === "visible" && getComputedStyle(node).display !== "inline" && node.scrollWidth > node.clientWidth + 1) seen.spill.push(what(node));
  }
  for (const node of shown.filter(node => node.matches("[role=img], [role=table]"))) if (!node.getAttribute("aria-label")) seen.labels.push(what(node));
  for (const node of shown.filter(node => node.matches("input, select, textarea"))) if (!node.labels.length) seen.labels.push(what(node));
  for (const node of shown.filter(node => node.matches("a, button, summary, h1, h2, h3"))) if (!node.textContent.trim()) seen.labels.push(what(node));
  for (const node of shown.filter(node => node.matches("[tabindex]"))) if (!node.getAttribute("aria-label") && !node.textContent.trim()) seen.labels.push(what(node));
  if (!document.documentElement.lang || !document.title) seen.labels.push("the document");
  const ids = [...document.querySelectorAll("[id]")].map(node => node.id);
  if (new Set(ids).size < ids.length) seen.labels.push("an id is there twice");
  const html = document.documentElement.outerHTML;
  fetch("/audit", { method: "POST", body: JSON.stringify({ ...seen, html, width: innerWidth, dark: matchMedia("(prefers-color-scheme: dark)").matches }) });
}
setTimeout(() => document.querySelector("details")?.setAttribute("open", ""), 3000);
setTimeout(audit, 6000);
