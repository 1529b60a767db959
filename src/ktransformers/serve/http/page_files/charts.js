"use strict";
// Line charts and bars as SVG elements of the page: trainings, speed and memory.

const COLOURS = ["#2f6fb0", "#c77d1e", "#6d4ea3", "#1a7f4b", "#b3362b"];
const MAX_POINTS = 600; // of a drawn curve; longer ones are thinned
const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(low, high, count = 5) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const rough = span / (count - 1),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
  const made = [];
  for (let index = Math.floor(low / step + 1e-9); index <= Math.ceil(high / step - 1e-9); index++)
    made.push(index * step);
  return made;
}

function tickText(value) {
  if (Math.abs(value) < 1e-12) return "0";
  const size = Math.abs(value);
  return size >= 10000 || size < 0.001
    ? value.toExponential(1).replace(".0e", "e").replace("e+", "e")
    : String(+value.toPrecision(6));
}

// Finite points, thinned; the last one is kept.
function thin(points) {
  const finite = points.filter((point) => point.every(Number.isFinite)),
    stride = Math.ceil(finite.length / MAX_POINTS);
  return finite.filter((_, index) => index % stride === 0 || index === finite.length - 1);
}

// series: [{name, points: [[x, y], ...]}]; points that are no numbers are left out. Returns an <svg>.
function lineChart(title, series, options = {}) {
  const wide = 420,
    high = 240,
    left = 52,
    right = wide - 10,
    top = 44,
    bottom = high - 24;
  const svg = shape("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": title, class: "chart" });
  svg.append(shape("text", { x: left, y: 18, "font-size": 13 }, title));
  const curves = series
    .map((one) => ({ ...one, points: thin(one.points) }))
    .map((one, index) => ({ ...one, colour: COLOURS[index % COLOURS.length] }))
    .filter((one) => one.points.length);
  if (!curves.length) {
    svg.append(shape("text", { x: (left + right) / 2, y: high / 2, "text-anchor": "middle" }, "no values yet"));
    return svg;
  }
  const xs = curves.flatMap((one) => one.points.map((point) => point[0]));
  const ys = curves.flatMap((one) => one.points.map((point) => point[1])).concat(options.fromZero ? [0] : []);
  const least = (list) => list.reduce((a, b) => Math.min(a, b)),
    most = (list) => list.reduce((a, b) => Math.max(a, b));
  let [low, up] = [least(ys), most(ys)];
  if (low === up) [low, up] = [options.fromZero ? 0 : low - (Math.abs(low) || 1), up + (Math.abs(up) || 1)];
  const rows = ticks(low, up);
  [low, up] = [rows[0], rows[rows.length - 1]];
  const [first, last] = [least(xs), most(xs)];
  const x = (value) => left + ((right - left) * (value - first)) / (last - first || 1);
  const y = (value) => bottom - ((bottom - top) * (value - low)) / (up - low);
  for (const value of rows) {
    svg.append(
      shape("line", {
        x1: left,
        x2: right,
        y1: y(value),
        y2: y(value),
        stroke: "currentColor",
        "stroke-opacity": 0.18,
      }),
    );
    svg.append(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, tickText(value)));
  }
  const whole = xs.every(Number.isInteger); // steps
  for (const value of ticks(first, last)) {
    if (value >= first && value <= last && (!whole || Number.isInteger(value)))
      svg.append(shape("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, tickText(value)));
  }
  let place = left;
  for (const one of curves) {
    if (one.points.length === 1)
      svg.append(shape("circle", { cx: x(one.points[0][0]), cy: y(one.points[0][1]), r: 3, fill: one.colour }));
    else
      svg.append(
        shape("polyline", {
          points: one.points.map((point) => x(point[0]).toFixed(1) + "," + y(point[1]).toFixed(1)).join(" "),
          fill: "none",
          stroke: one.colour,
          "stroke-width": 1.8,
          "stroke-linejoin": "round",
        }),
      );
    if (curves.length > 1) {
      svg.append(shape("text", { x: place, y: 35, style: `fill: ${one.colour}; opacity: 1` }, one.name));
      place += 20 + 6.5 * one.name.length;
    }
  }
  return svg;
}

function bytes(size) {
  return size >= 5e7 ? (size / 1e9).toFixed(size < 1e10 ? 2 : 1) + " GB" : (size / 1e6).toFixed(1) + " MB";
}

// rows: [{name, value, limit, text}]. Each row has its own scale, from 0 to its limit.
function bars(rows) {
  const wide = 420,
    left = 110,
    right = wide - 10;
  const svg = shape("svg", {
    viewBox: `0 0 ${wide} ${Math.max(1, rows.length) * 44 + 6}`,
    role: "img",
    "aria-label": "memory",
    class: "chart",
  });
  rows.forEach((row, index) => {
    const y = index * 44 + 6,
      share = row.limit > 0 ? Math.min(1, row.value / row.limit) : 0;
    svg.append(shape("text", { x: left - 8, y: y + 15, "text-anchor": "end" }, row.name));
    svg.append(
      shape("rect", {
        x: left,
        y,
        width: (right - left) * share,
        height: 20,
        fill: share > 0.95 ? COLOURS[4] : COLOURS[0],
      }),
    );
    svg.append(
      shape("rect", {
        x: left,
        y,
        width: right - left,
        height: 20,
        fill: "none",
        stroke: "currentColor",
        "stroke-opacity": 0.4,
      }),
    );
    svg.append(shape("text", { x: left, y: y + 34 }, row.text));
  });
  return svg;
}
