"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const colours = bytes(data.colours);
const { labels } = data;
const n = labels.length; // cells in a row
const map = document.getElementById("map");
let chosen = null; // { button, cells, image }
let row = n - 1;
let column = 0;
let plot = { left: 0, size: 1 }; // where the cells are on the canvas, in CSS pixels
const SMALL = 128; // pixels of a small map, at most
const TOP = 8; // pixels above the map, so that the first label is not cut off
const FONT = "11px system-ui, sans-serif";

const weight = (cells, i, j) => (cells[(i * (i + 1)) / 2 + j] / 255) ** 2;
const number = (w) => (w >= 0.0995 ? w.toFixed(2) : w >= 0.001 ? w.toFixed(3) : "below 0.001");
const short = (label) => (Array.from(label).length > 12 ? Array.from(label).slice(0, 11).join("") + "…" : label);

/** Draws the lower triangle, a pixel for the largest of `share` by `share` cells; keys that a query
 * cannot see stay transparent. */
function paint(canvas, cells, share = 1) {
  const pixels = Math.ceil(n / share);
  const most = new Uint8Array(pixels * pixels);
  for (let i = 0, from = 0; i < n; i++) {
    const line = Math.floor(i / share) * pixels;
    for (let j = 0; j <= i; j++, from++) {
      const to = line + Math.floor(j / share);
      if (cells[from] > most[to]) most[to] = cells[from];
    }
  }
  canvas.width = canvas.height = pixels;
  const context = canvas.getContext("2d");
  const image = context.createImageData(pixels, pixels);
  for (let i = 0; i < pixels; i++) {
    for (let j = 0; j <= i; j++) {
      const at = i * pixels + j;
      image.data.set(colours.subarray(3 * most[at], 3 * most[at] + 3), 4 * at);
      image.data[4 * at + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

/** Returns the width in pixels of the longest label with its number. */
function widestLabel() {
  const context = map.getContext("2d");
  context.font = FONT;
  return Math.max(...labels.map((label, i) => context.measureText(`${i} ${short(label)}`).width));
}

const cellsOf = (button) => bytes(data.layers[button.dataset.layer].heads[button.dataset.head]);

/** Names a token: "the" (17). */
const named = (token) => `“${labels[token]}” (${token})`;

function choose(button) {
  if (chosen) chosen.button.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
  const image = document.createElement("canvas");
  const cells = cellsOf(button);
  paint(image, cells);
  chosen = { button, cells, image };
  const layer = data.layers[button.dataset.layer].number;
  document.getElementById("chosen").textContent = `Layer ${layer}, head ${button.dataset.head}`;
  point(row, column);
}

/** Draws the chosen map with its axes, and the lines that mark the cell. */
function draw() {
  const ratio = window.devicePixelRatio || 1;
  const width = map.clientWidth;
  const context = map.getContext("2d");
  const margin = Math.min(96, width * 0.22, widest + 10);
  const size = width - margin;
  const height = TOP + size + margin;
  map.style.height = `${height}px`;
  map.width = Math.round(width * ratio);
  map.height = Math.round(height * ratio);
  plot = { left: margin, size };
  const style = getComputedStyle(document.documentElement);
  context.scale(ratio, ratio);
  context.translate(0, TOP);
  context.imageSmoothingEnabled = n > size;
  context.drawImage(chosen.image, margin, 0, size, size);
  const cell = size / n;
  context.strokeStyle = style.getPropertyValue("--mark");
  context.strokeRect(margin + column * cell, row * cell, Math.max(cell, 2), Math.max(cell, 2));
  context.globalAlpha = 0.5;
  context.beginPath();
  context.moveTo(margin, (row + 0.5) * cell);
  context.lineTo(margin + column * cell, (row + 0.5) * cell);
  context.moveTo(margin + (column + 0.5) * cell, (row + 1) * cell);
  context.lineTo(margin + (column + 0.5) * cell, size);
  context.stroke();
  context.globalAlpha = 1;
  axes(context, cell, size, margin, style);
}

/** Draws every n-th label, as many as fit, and the marked ones in the mark's colour. */
function axes(context, cell, size, margin, style) {
  const every = Math.ceil(13 / cell);
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const text = (at, mark) => {
    context.fillStyle = style.getPropertyValue(mark ? "--mark" : "--text");
    const label = short(labels[at]);
    return every > 1 ? `${at} ${label}` : label;
  };
  const near = (at, marked) => at !== marked && Math.abs(at - marked) < every;
  const cells = [...Array(n).keys()];
  for (const at of cells.filter((i) => i === row || (i % every === 0 && !near(i, row)))) {
    context.fillText(text(at, at === row), margin - 6, (at + 0.5) * cell, margin - 8);
  }
  for (const at of cells.filter((j) => j === column || (j % every === 0 && !near(j, column)))) {
    context.save();
    context.translate(margin + (at + 0.5) * cell, size + 6);
    context.rotate(-Math.PI / 2);
    context.fillText(text(at, at === column), 0, 0, margin - 8);
    context.restore();
  }
}

/** Marks cell (i, j), shows its weight, and lists the keys with the largest weights of its row. */
function point(i, j) {
  row = Math.min(Math.max(i, 0), n - 1);
  column = Math.min(Math.max(j, 0), row);
  const w = weight(chosen.cells, row, column);
  document.getElementById("pair").textContent = `${named(row)} attends to ${named(column)}: ${number(w)}`;
  const order = [...Array(row + 1).keys()].sort((a, b) => weight(chosen.cells, row, b) - weight(chosen.cells, row, a));
  const lines = order.slice(0, 5).map((at) => {
    const line = document.createElement("tr");
    for (const shown of [number(weight(chosen.cells, row, at)), named(at)]) {
      line.appendChild(document.createElement("td")).textContent = shown;
    }
    return line;
  });
  document.getElementById("most").replaceChildren(...lines);
  draw();
}

function pointAt(event) {
  const box = map.getBoundingClientRect();
  const cell = plot.size / n;
  const i = Math.floor((event.clientY - box.top - TOP) / cell);
  const j = Math.floor((event.clientX - box.left - plot.left) / cell);
  if (i >= 0 && i < n && j >= 0 && j <= i && (i !== row || j !== column)) point(i, j);
}

map.addEventListener("pointermove", pointAt);
map.addEventListener("pointerdown", pointAt);
map.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  point(row + step[0], column + step[1]);
});

const widest = widestLabel();
const buttons = [...document.querySelectorAll(".heads button")];
// Small maps are painted when they come into sight: there may be hundreds.
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    paint(target.querySelector("canvas"), cellsOf(target), Math.ceil(n / SMALL));
    seen.unobserve(target);
  }
});
for (const button of buttons) {
  seen.observe(button);
  button.addEventListener("click", () => {
    choose(button);
    if (map.getBoundingClientRect().top < 0) map.scrollIntoView({ block: "center" });
  });
}

const scale = document.getElementById("scale").getContext("2d");
const strip = scale.createImageData(256, 1);
for (let i = 0; i < 256; i++) strip.data.set([colours[3 * i], colours[3 * i + 1], colours[3 * i + 2], 255], 4 * i);
scale.putImageData(strip, 0, 0);
new ResizeObserver(draw).observe(map.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
choose(buttons[0]);
