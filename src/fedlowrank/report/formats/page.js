"use strict";
// The page is whole without this script. It sorts tables, opens what a link or the printer needs, and
// saves figures.
const PREFIXES = {"": 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15};
const SECONDS = {s: 1, min: 60, h: 3600};

// The number that a cell begins with, in its base unit; null if it begins with none.
function cellValue(cell) {
  // A success rate such as "4 of 5 ≥ 92.50" counts by its result.
  const text = cell.textContent.trim().replace(/−/g, "-").replace(/^(\d+ of \d+ )?[<≥≤] ?/, "");
  const number = parseFloat(text);
  if (Number.isNaN(number)) return text === "best" ? 0 : null;
  const unit = (text.match(/\s([a-zA-Z]+)$/) || ["", ""])[1];
  if (unit in SECONDS) return number * SECONDS[unit];
  return number * (PREFIXES[unit.replace(/B$/, "")] || 1);
}

// Cells without a number come last in both directions; rows of text are sorted by their letters.
function compareCells(a, b, direction) {
  const x = cellValue(a), y = cellValue(b);
  if (x === null && y === null) return direction * a.textContent.localeCompare(b.textContent);
  if (x === null || y === null) return x === null ? 1 : -1;
  return direction * (x - y);
}

function sortTable(head) {
  const ascending = head.getAttribute("aria-sort") === "descending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0], index = head.cellIndex;
  const sign = ascending ? 1 : -1;
  const rows = [...body.rows].sort((a, b) => compareCells(a.cells[index], b.cells[index], sign));
  body.append(...rows);
}

for (const head of document.querySelectorAll("thead th")) {
  head.tabIndex = 0;
  head.title = "Sort by this column";
  head.onclick = () => sortTable(head);
  head.onkeydown = (event) => { if (event.key === "Enter") sortTable(head); };
}

// A drawing as a file of its own: the colors of the page's light mode instead of references to the page.
function standalone(svg) {
  const copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
  copy.setAttribute("width", box.width + "pt");
  copy.setAttribute("height", box.height + "pt");
  copy.setAttribute("font-family", "DejaVu Sans, sans-serif");
  for (const tip of copy.querySelectorAll("circle[pointer-events]")) tip.remove();
  return copy.outerHTML.replace(/var\(--[a-z]+\d*,([^)]*)\)/g, "$1").replace(/currentColor/g, "#1b1f24");
}

// Offer a file for download under the title of the figure.
function download(figure, blob, ending) {
  const link = document.createElement("a");
  const name = (figure.querySelector("figcaption summary, figcaption b") || figure).textContent;
  link.download = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") + ending;
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveSvg(figure) {
  download(figure, new Blob([standalone(figure.querySelector("svg"))], {type: "image/svg+xml"}), ".svg");
}

// On white, with 300 pixels an inch; the units of the drawing are 72 an inch.
function savePng(figure) {
  const svg = figure.querySelector("svg"), box = svg.viewBox.baseVal, image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas"), brush = canvas.getContext("2d");
    canvas.width = Math.round(box.width * 300 / 72);
    canvas.height = Math.round(box.height * 300 / 72);
    brush.fillStyle = "#fff";
    brush.fillRect(0, 0, canvas.width, canvas.height);
    brush.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(figure, blob, ".png"));
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(standalone(svg));
}

for (const figure of document.querySelectorAll("figure")) {
  for (const [kind, save] of [["SVG", saveSvg], ["PNG", savePng]]) {
    const button = document.createElement("button");
    button.className = "save";
    button.textContent = kind;
    button.title = "Save this figure as " + kind;
    button.onclick = () => save(figure);
    figure.append(button);
  }
}

// A link to a folded part opens it and all that it lies in.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", openTarget);
openTarget();

let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("main details:not([open])")];
  for (const part of closed) part.open = true;
});
addEventListener("afterprint", () => { for (const part of closed) part.open = false; });
