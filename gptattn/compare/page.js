"use strict";
// Markers around (0, 0) by matplotlib's letters, which the pictures of the same plots have.
const MARKERS = {
  o: "M4.5 0A4.5 4.5 0 1 1 -4.5 0A4.5 4.5 0 1 1 4.5 0Z",
  s: "M-4 -4H4V4H-4Z",
  "^": "M0 -5L5 4H-5Z",
  D: "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
  v: "M0 5L5 -4H-5Z",
  P: "M-2 -5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z",
  X: "M-5 -2.5L-2.5 -5L0 -2.5L2.5 -5L5 -2.5L2.5 0L5 2.5L2.5 5L0 2.5L-2.5 5L-5 2.5L-2.5 0Z",
};
const HINT = "Point at the chart, or use the arrow keys in it; drag to zoom, double-click to reset.";
const UNITS = ["", "k", "M", "G", "T", "P", "E", "Z"];
const NEAR = 14; // digits in which two numbers are one after a scale has been there and back

const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const exact = (y) => y.toLocaleString("en", { minimumFractionDigits: 4, maximumFractionDigits: 4 });
const known = (values) => values.filter((value) => value != null);

/** Formats a number on an axis as the pictures do: 512, 16,384, 20k, 7T. */
function short(value, digits = 5) {
  const size = Math.abs(value);
  if (size < 1e5 && value % 1000) return value.toLocaleString("en", { maximumSignificantDigits: digits });
  const unit = Math.min(Math.max(Math.floor(Math.log10(size || 1) / 3), 0), UNITS.length - 1);
  return `${+(value / 1000 ** unit).toPrecision(digits)}${UNITS[unit]}`;
}

/** Formats a tick; of small steps all ticks have the same decimals. */
const label = (tick, step) => (step < 1 && Math.abs(tick) < 1000 ? tick.toFixed(Math.ceil(-Math.log10(step) - 1e-9)) : short(tick));

/** Formats a place on the x axis: whole numbers in full up to ten million. */
const place = (x) => (Math.abs(x) < 1e7 ? x.toLocaleString("en", { maximumFractionDigits: Math.abs(x) < 1 ? 4 : 2 }) : short(x));

// A scale that is logarithmic or not, there and back.
const scaled = (value, log) => (log ? Math.log10(value) : value);
const unscaled = (value, log) => (log ? +(10 ** value).toPrecision(NEAR) : value);

/** Returns ticks of a log axis: 1, 2, 5 of every power of ten, or even steps where it spans little. */
function logTicks(min, max) {
  const decades = Math.log10(max / min);
  const ticks = [];
  for (let power = Math.floor(Math.log10(min)); power <= Math.log10(max); power++) {
    for (const first of decades > 4 ? [1] : [1, 2, 5]) ticks.push(+`${first}e${power}`);
  }
  const inside = ticks.filter((tick) => tick >= min && tick <= max);
  if (inside.length > 2) return inside;
  const raw = (max - min) / 5;
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(raw))).find((n) => n >= raw);
  const even = [];
  for (let i = Math.ceil(min / step); i * step <= max; i++) even.push(+(i * step).toPrecision(NEAR));
  return even;
}

/** Makes an element of the page's names or choices. */
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Draws the series' line and marker, as the chart has them. */
function sample(series) {
  const picture = svg("svg", { viewBox: "-16 -7 32 14", "aria-hidden": "true" });
  if (series.line) {
    picture.append(svg("line", { x1: -16, x2: 16, stroke: series.color, "stroke-width": 2, "stroke-dasharray": series.dash.join(" ") }));
  }
  if (series.marker) {
    const fill = series.filled ? series.color : "none";
    picture.append(svg("path", { d: MARKERS[series.marker], stroke: series.color, "stroke-width": 1.5, fill }));
  }
  return picture;
}

/** Puts a live chart before the plots of a figure, which stay for print. `state` holds the reader's choices: they
 * outlive a reload. */
function interactive(figure, state, save) {
  const home = document.getElementById(figure.id);
  const box = document.getElementById("chart").content.cloneNode(true).firstElementChild;
  const find = (selector) => box.querySelector(selector);
  const canvas = find(".canvas");
  let chart, plot, view;
  let near = null; // { series, k }: the point that is told of
  let steered = false; // whether the keyboard put the cursor there

  const shows = (series) => !state.off.includes(series.name);
  const visible = () => chart.series.filter(shows);
  const xOf = (series) => chart.xs[series.xs];
  const points = () => chart.series.some((series) => series.marker);
  const left = (x) => plot.valToPos(x, "x");
  const top = (y) => plot.valToPos(y, "y");

  /** Returns the range of these values, with some room; `log` leaves out what has no logarithm. */
  function spread(values, log, room) {
    const inside = known(values).filter((value) => !log || value > 0).map((value) => scaled(value, log));
    let min = inside.reduce((a, b) => Math.min(a, b), Infinity);
    let max = inside.reduce((a, b) => Math.max(a, b), -Infinity);
    if (min > max) [min, max] = [0, 1];
    const more = (max - min) * room || (room && Math.abs(min) * 0.05) || (min === max ? 1 : 0);
    return [unscaled(min - more, log), unscaled(max + more, log)];
  }

  const all = (key) => chart.series.flatMap((series) => series[key] ?? []);
  const wholeY = () => spread([...all("y"), ...(points() ? [...all("low"), ...all("high")] : [])], state.logY, 0.12);
  const wholeX = () => spread([...chart.xs.flat(), ...all("x_low"), ...all("x_high")], state.logX, points() ? 0.12 : 0);

  /** Returns what is seen before any zoom. */
  const whole = () => ({ x: wholeX(), y: chart.range && (!state.logY || chart.range[0] > 0) ? chart.range : wholeY() });

  /** Shows x and y of these ranges. */
  function look(ranges) {
    view = ranges;
    plot.batch(() => {
      for (const axis of ["x", "y"]) plot.setScale(axis, { min: view[axis][0], max: view[axis][1] });
    });
    const first = whole();
    const zoomed = ["x", "y"].some((axis) => view[axis].some((end, i) => end !== first[axis][i]));
    find("[name=reset]").disabled = !zoomed;
    state.view = zoomed ? view : null;
    box.dataset.view = JSON.stringify(view);
    save();
  }

  /** Zooms by a factor around the point that is told of, or the middle. */
  function zoom(factor) {
    const ends = { x: wholeX(), y: wholeY() };
    const first = whole();
    const ranges = {};
    for (const [axis, log] of [["x", state.logX], ["y", state.logY]]) {
      const [low, high] = view[axis].map((value) => scaled(value, log));
      const at = near && (axis === "x" ? xOf(near.series)[near.k] : near.series.y[near.k]);
      const wish = at == null ? NaN : scaled(at, log);
      const centre = wish >= low && wish <= high ? wish : (low + high) / 2;
      const least = scaled(Math.min(ends[axis][0], first[axis][0]), log);
      const most = scaled(Math.max(ends[axis][1], first[axis][1]), log);
      const zoomed = [Math.max(centre + (low - centre) * factor, least), Math.min(centre + (high - centre) * factor, most)];
      ranges[axis] = zoomed.map((value) => unscaled(value, log));
    }
    look(ranges);
  }

  function zoomTo({ left: from, top: upper, width, height }) {
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    const x = width ? [plot.posToVal(from, "x"), plot.posToVal(from + width, "x")] : view.x;
    const y = height ? [plot.posToVal(upper + height, "y"), plot.posToVal(upper, "y")] : view.y;
    look({ x, y });
  }

  /** Returns the index of the series' point that is nearest to x on the scale. */
  function nearest(series, x) {
    const at = scaled(x, state.logX);
    let best = null;
    let least = Infinity;
    xOf(series).forEach((value, k) => {
      const distance = Math.abs(scaled(value, state.logX) - at);
      if (distance < least) [best, least] = [k, distance];
    });
    return best;
  }

  /** Finds the point nearest to the mouse: of marks the nearest mark, of lines the nearest line at that x. */
  function aim(x, y) {
    const value = plot.posToVal(x, "x");
    near = null;
    let least = Infinity;
    for (const series of visible()) {
      const k = nearest(series, value);
      if (k == null) continue;
      const aside = series.marker ? left(xOf(series)[k]) - x : 0;
      const distance = Math.hypot(aside, top(series.y[k]) - y);
      if (distance < least) [near, least] = [{ series, k }, distance];
    }
  }

  function words({ series, k }) {
    const y = exact(series.y[k]);
    const interval = series.low?.[k] == null ? "" : `95% interval ${exact(series.low[k])} to ${exact(series.high[k])}, `;
    const seeds = series.seeds.length ? `seeds ${series.seeds.map((seed) => exact(seed[k])).join(", ")}` : `n = ${series.n}`;
    const label = series.labels.length ? `, ${series.labels[k]}` : "";
    return `${series.name}${label}: ${y} (${interval}${seeds}) at ${place(xOf(series)[k])} ${chart.x}`;
  }

  /** Tells of the nearest point, and beside each name its value there; without one, the last value. */
  function tell() {
    find(".readout").textContent = near ? words(near) : HINT;
    const x = near && xOf(near.series)[near.k];
    chart.series.forEach((series, i) => {
      const k = near ? nearest(series, x) : series.y.length - 1;
      const row = find(".names").children[i];
      const value = k == null || k < 0 ? null : series.y[k];
      const half = value != null && series.low?.[k] != null ? ` ± ${exact((series.high[k] - series.low[k]) / 2)}` : "";
      row.querySelector(".value").textContent = value == null ? "" : `${exact(value)}${half}`;
      row.classList.toggle("near", near?.series === series);
    });
  }

  /** Moves to the point k of a series, with the cursor, and the view if it lies outside. */
  function steer(series, k) {
    near = { series, k };
    const [x, y] = [xOf(series)[k], series.y[k]];
    const ranges = {};
    for (const [axis, at, log] of [["x", x, state.logX], ["y", y, state.logY]]) {
      const [low, high] = view[axis].map((value) => scaled(value, log));
      const move = scaled(at, log) < low || scaled(at, log) > high ? scaled(at, log) - (low + high) / 2 : 0;
      ranges[axis] = move ? [unscaled(low + move, log), unscaled(high + move, log)] : view[axis];
    }
    if (ranges.x !== view.x || ranges.y !== view.y) look(ranges);
    steered = true;
    plot.setCursor({ left: left(x), top: top(y) });
    steered = false;
  }

  function pressed(event) {
    const shown = visible();
    if (event.ctrlKey || event.metaKey || event.altKey || !shown.length) return;
    const series = near ? near.series : shown[0];
    const last = series.y.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    const turns = { ArrowUp: -1, ArrowDown: 1 };
    if (event.key in moves) {
      const from = near ? near.k : event.key === "ArrowRight" ? -1 : last + 1;
      steer(series, Math.min(Math.max(from + moves[event.key], 0), last));
    } else if (event.key in turns) {
      const next = near ? shown[(shown.indexOf(series) + turns[event.key] + shown.length) % shown.length] : series;
      steer(next, near ? nearest(next, xOf(series)[near.k]) : next.y.length - 1);
    } else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0" || event.key === "Escape") look(whole());
    else return;
    event.preventDefault();
  }

  /** Draws bars, marks, and the front, which uPlot does not know, in the canvas' own pixels. */
  function drawMarks() {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    const at = (x, y) => [plot.valToPos(x, "x", true), plot.valToPos(y, "y", true)];
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const stroke = (color, width, ...corners) => {
      ctx.strokeStyle = color;
      ctx.lineWidth = width * ratio;
      ctx.beginPath();
      corners.forEach((corner, i) => ctx[i ? "lineTo" : "moveTo"](...at(...corner)));
      ctx.stroke();
    };
    const [xs = [], ys = []] = chart.front;
    ctx.globalAlpha = 0.6;
    stroke(styled("--text"), 1, ...xs.map((x, i) => [x, ys[i]]));
    ctx.globalAlpha = 1;
    for (const series of visible().filter((each) => each.marker)) {
      const x = xOf(series);
      series.y.forEach((y, k) => {
        if (series.low?.[k] != null) stroke(series.color, 1, [x[k], series.low[k]], [x[k], series.high[k]]);
        if (series.x_low?.[k] != null) stroke(series.color, 1, [series.x_low[k], y], [series.x_high[k], y]);
        for (const seed of series.seeds) dash(series.color, ...at(x[k], seed[k]));
        mark(series, ...at(x[k], y), near?.series === series && near.k === k);
      });
    }
    ctx.restore();

    function dash(color, x, y) {
      ctx.strokeStyle = color;
      ctx.beginPath();
      ctx.moveTo(x - 5 * ratio, y);
      ctx.lineTo(x + 5 * ratio, y);
      ctx.stroke();
    }

    function mark(series, x, y, chosen) {
      ctx.save();
      ctx.translate(x, y);
      ctx.scale(ratio * (chosen ? 1.5 : 1.1), ratio * (chosen ? 1.5 : 1.1));
      ctx.lineWidth = 1.5;
      ctx.strokeStyle = series.color;
      ctx.fillStyle = series.filled ? series.color : styled("--page");
      const path = new Path2D(MARKERS[series.marker]);
      ctx.fill(path);
      ctx.stroke(path);
      ctx.restore();
    }
  }

  /** Returns uPlot's columns: the ends of the bands and single seeds, then the means, which lie above them. */
  function columns() {
    // uPlot copies what it is given, so a column has its series' number.
    const columns = [{}];
    const tables = [];
    const bands = [];
    const add = (owner, values, more) => {
      columns.push({ owner: chart.series.indexOf(owner), show: shows(owner), spanGaps: true, points: { show: false }, auto: false, ...more });
      tables.push([xOf(owner), values]);
    };
    for (const series of chart.series.filter((each) => !each.marker)) {
      if (series.low) {
        bands.push({ series: [columns.length, columns.length + 1], fill: `${series.color}30` });
        add(series, series.high, { width: 0 });
        add(series, series.low, { width: 0 });
      }
      for (const seed of series.seeds) add(series, seed, { stroke: `${series.color}90`, width: 1 });
    }
    for (const series of chart.series) {
      const stroke = series.line ? series.color : "transparent";
      const dash = series.dash.length ? series.dash : undefined;
      add(series, series.y, { stroke, dash, width: 2, mean: true });
    }
    return { columns, bands, table: uPlot.join(tables) };
  }

  /** Makes the plot anew, as after another choice of axis, scale or colours. */
  function draw() {
    plot?.destroy();
    near = null;
    const { columns: series, bands, table } = columns();
    const index = new Map([...table[0]].map((x, i) => [x, i]));
    const axis = (title, log, more) => ({
      label: title,
      stroke: styled("--text"),
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      labelSize: 20,
      grid: { stroke: styled("--line"), width: 1 },
      ticks: { stroke: styled("--line"), width: 1, size: 4 },
      ...(log ? { splits: (_, __, min, max) => logTicks(min, max), filter: (_, splits) => splits } : {}),
      values: (_, splits, __, ___, step) => splits.map((tick) => (tick == null ? "" : label(tick, step))),
      ...more,
    });
    const start = state.view ?? whole();
    view = start;
    const scale = (name, log) => ({ time: false, auto: false, distr: log ? 3 : 1, range: () => view[name] });
    plot = new uPlot(
      {
        width: canvas.clientWidth,
        height: canvas.clientHeight,
        series,
        bands,
        scales: { x: { ...scale("x", state.logX), range: (_, min, max) => (min == null ? view.x : [min, max]) }, y: scale("y", state.logY) },
        axes: [axis(chart.x, state.logX, { size: 34, space: 60 }), axis(chart.y, state.logY, { size: 50 })],
        legend: { show: false },
        padding: [10, 14, 0, 0],
        cursor: {
          y: false,
          drag: { x: true, y: true, uni: 25, dist: 5, setScale: false },
          bind: { dblclick: () => () => look(whole()) && null },
          move: (_, x, y) => {
            if (!steered && x >= 0) aim(x, y);
            else if (x < 0) near = null;
            return [x, y];
          },
          points: { size: 9, fill: (u, i) => chart.series[u.series[i].owner].color, stroke: () => styled("--page"), width: 1.5 },
          dataIdx: (u, i) => {
            const owner = chart.series[u.series[i].owner];
            if (!near || !u.series[i].mean || owner.marker) return null;
            return index.get(xOf(owner)[nearest(owner, xOf(near.series)[near.k])]);
          },
        },
        hooks: {
          setCursor: [() => { tell(); if (points()) plot.redraw(false, false); }],
          setSelect: [(u) => zoomTo(u.select)],
          draw: [() => plot && drawMarks()],
        },
      },
      table,
      canvas,
    );
    look(start);
    tell();
  }

  function choose(name) {
    state.choice = name;
    chart = figure.charts.find((each) => each.choice === name);
    canvas.setAttribute("aria-label", `${chart.title}. Arrow keys: left and right through the points, up and down through the variants; plus and minus zoom, 0 resets.`);
    find("h4").textContent = figure.title;
    find("figcaption").replaceChildren(element("strong", "", `${chart.title}.`), ` ${chart.caption}`);
    find(".names").replaceChildren(...chart.series.map(named));
  }

  function named(series) {
    const box = element("input", "");
    box.type = "checkbox";
    box.checked = shows(series);
    box.addEventListener("change", () => {
      state.off = box.checked ? state.off.filter((name) => name !== series.name) : [...state.off, series.name];
      row.classList.toggle("off", !box.checked);
      if (near && !shows(near.series)) near = null;
      plot.series.forEach((each, i) => chart.series[each.owner] === series && plot.setSeries(i, { show: box.checked }));
      plot.redraw();
      tell();
      save();
    });
    const row = element("li", box.checked ? "" : "off", element("label", "", box, sample(series), element("span", "", series.name)), element("span", "value"));
    return row;
  }

  function switched(name, key) {
    const box = find(`[name=${name}]`);
    box.checked = state[key];
    box.addEventListener("change", () => {
      Object.assign(state, { [key]: box.checked, view: null });
      draw();
    });
  }

  for (const each of figure.charts) {
    const radio = element("input", "");
    Object.assign(radio, { type: "radio", name: `${figure.id}-x`, checked: each.choice === state.choice });
    radio.addEventListener("change", () => {
      Object.assign(state, { view: null, logX: each.log });
      find("[name=log-x]").checked = each.log;
      choose(each.choice);
      draw();
    });
    find(".choices").append(element("label", "", radio, each.choice));
  }
  if (figure.charts.length < 2) find("fieldset").remove();
  switched("log-x", "logX");
  switched("log-y", "logY");
  find("[name=in]").addEventListener("click", () => zoom(0.5));
  find("[name=out]").addEventListener("click", () => zoom(2));
  find("[name=reset]").addEventListener("click", () => look(whole()));
  canvas.addEventListener("keydown", pressed);
  home.classList.add("live");
  home.prepend(box);
  choose(state.choice);
  draw();
  new ResizeObserver(() => plot.setSize({ width: canvas.clientWidth, height: canvas.clientHeight })).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

/** Reads the page again while its runs are watched, once the reader has been still for that long. */
function follow(seconds) {
  let touched = Date.now();
  for (const kind of ["pointermove", "keydown", "wheel", "touchmove"]) addEventListener(kind, () => (touched = Date.now()));
  setInterval(() => Date.now() - touched >= seconds * 1000 && location.reload(), seconds * 1000);
}

const packed = document.getElementById("charts");
const states = history.state ?? {};
const save = () => history.replaceState(states, "");
for (const figure of packed ? JSON.parse(packed.textContent) : []) {
  const first = figure.charts[0];
  const off = first.series.filter((series) => !series.on).map((series) => series.name);
  const kept = states[figure.id];
  const fits = kept && figure.charts.some((chart) => chart.choice === kept.choice);
  states[figure.id] = fits ? kept : { choice: first.choice, logX: first.log, logY: false, off, view: null };
  interactive(figure, states[figure.id], save);
}
if (document.body.dataset.refresh) follow(Number(document.body.dataset.refresh));
