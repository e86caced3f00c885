"use strict";
// Okabe and Ito's colours, which people with any colour vision tell apart; each box has its name as well.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
const $ = id => document.getElementById(id);
const percent = part => Math.round(part * 100) + " %";
const size = bytes => bytes >= 2 ** 30 ? (bytes / 2 ** 30).toFixed(1) + " GiB" : Math.round(bytes / 2 ** 20) + " MiB";
const make = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};
// Shows other nodes in a box. The focus stays at its place, for those who go by the keyboard.
const put = (id, nodes) => {
  const at = [...$(id).querySelectorAll("[tabindex]")].indexOf(document.activeElement);
  $(id).replaceChildren(...nodes);
  if (at >= 0) $(id).querySelectorAll("[tabindex]")[at]?.focus({ preventScroll: true });
};

// A shelf of columns: the sizes (`wide` and `high`, parts of 1) are true, the places (`x` and `y`) are the drawing's. Gives the
// whole width, which is above 1 where the columns leave gaps.
function lay(boxes) {
  const columns = [];
  let width = 0;
  for (const box of [...boxes].sort((a, b) => b.wide - a.wide)) {
    let column = columns.find(column => column.high + box.high <= 1.0001 && column.wide >= box.wide);
    if (!column) {
      column = { x: width, wide: box.wide, high: 0 };
      columns.push(column);
      width += box.wide;
    }
    [box.x, box.y] = [column.x, column.high];
    column.high += box.high;
  }
  return width;
}

// Shows what `path` says: at once, and then `pause` ms after each answer.
async function follow(path, pause, render) {
  try {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(await answer.text());
    render(await answer.json());
    $("gone").style.display = "none";
  } catch (error) {
    $("gone").textContent = "No answer, and what is shown is old: " + error.message;
    $("gone").style.display = "block";
  }
  setTimeout(follow, pause, path, pause, render);
}
