// Plots over time, drawn by uPlot, which is loaded when the first plot is shown. Each plot has a text with the same figures.

import {clock, el, gib, percent} from "./dom.js";

const HOUR_S = 3600;
const HEIGHT = 180;
/** figure: a value in words; divisor: the unit of the axis; least: the top of a scale without larger values. */
const FORMATS = {
  bytes: {figure: gib, divisor: 2 ** 30, label: "GiB", least: 1},
  ratio: {figure: percent, divisor: 0.01, label: "%", least: 100},
  count: {figure: value => value.toLocaleString("en"), divisor: 1, label: "", least: 1},
};
let library = null;

/** Return a plot with a title: {element, show, close}. */
export function plot(title) {
  const box = el("div"), text = el("p", {class: "quiet"}), element = el("div", {class: "plot", role: "group", "aria-label": title}, el("h4", {}, title), box, text);
  let drawn = null, drawnAs = "", lastShown = null, isClosed = false;

  /**
   * at: Unix times in seconds, ascending; the last is now. span_s: the seconds shown. series: [{label, values, colour, unit, fill, dash}], with a value for each time that holds
   * until the next, or null. most: the top of the scale. marks: [{at_s, letter, colour}].
   */
  async function show({at, series, marks = [], most = null, span_s = HOUR_S}) {
    lastShown = {at, series, marks, most, span_s};
    const uPlot = await (library ??= loaded());
    if (isClosed || lastShown.at !== at) return;
    const shape = JSON.stringify([series.map(each => [each.label, each.colour]), most, span_s, getComputedStyle(element).color]);
    const data = [at, ...series.map(({values, unit}) => values.map(value => value === null ? null : value / FORMATS[unit].divisor))];
    text.textContent = series.length ? summary(at, series[0], span_s) : "";
    if (drawn && shape === drawnAs) {
      drawn.marks = marks;
      drawn.setData(data);
      return;
    }
    drawn?.destroy();
    drawn = new uPlot(options(uPlot, box.clientWidth || 600, series, most, span_s, element), data, box);
    drawn.marks = marks;
    drawn.redraw(false);  // only commit: otherwise the scale of time, which is set in a microtask, would be reset
    drawnAs = shape;
  }
  const resized = new ResizeObserver(() => { if (drawn && box.clientWidth) drawn.setSize({width: box.clientWidth, height: HEIGHT}); });
  resized.observe(box);
  const scheme = matchMedia("(prefers-color-scheme: dark)"), themed = () => { if (lastShown) show({...lastShown, at: [...lastShown.at]}); };
  scheme.addEventListener("change", themed);
  return {element, show, close: () => { isClosed = true; resized.disconnect(); scheme.removeEventListener("change", themed); drawn?.destroy(); }};
}

/** Load uPlot, whose small build is a script with a global name, not a module. */
function loaded() {
  return new Promise((done, fail) => {
    const script = el("script", {src: "page/uplot.js"});
    script.onload = () => done(window.uPlot);
    script.onerror = () => {
      library = null; // the next plot tries again
      fail(new Error("page/uplot.js cannot be loaded"));
    };
    document.head.append(script);
  });
}

/** Return the function that formats times of a plot. If the plot shows more than a day, times include the day. */
const clockOf = span_s => span_s <= 24 * HOUR_S ? clock : seconds => new Date(1000 * seconds).toLocaleString("en-GB", {day: "numeric", month: "short", hour: "2-digit", minute: "2-digit"});

/** Return the current and the highest value of the first series in words. */
function summary(at, {label, values, unit}, span_s) {
  const known = values.map((value, i) => [value, at[i]]).filter(([value, when]) => value !== null && when >= at.at(-1) - span_s);
  const {figure} = FORMATS[unit];
  if (!known.length) return `${label}: not measured in ${span_s === HOUR_S ? "the last hour" : "this range"}`;
  const [highest, when] = known.reduce((most, each) => each[0] > most[0] ? each : most);
  const now = values.at(-1);
  return `${label}: ${now === null ? "unknown now" : `${figure(now)} now`}, at most ${figure(highest)} at ${clockOf(span_s)(when)}`;
}

function options(uPlot, width, series, most, span_s, element) {
  const resolve = colour => { const probe = el("i", {}); probe.style.color = colour; element.append(probe); const found = getComputedStyle(probe).color; probe.remove(); return found; };
  const {unit} = series[0], format = FORMATS[unit], time = clockOf(span_s);
  const axis = {stroke: resolve(`var(--quiet)`), grid: {stroke: resolve("var(--line)"), width: 1}, ticks: {stroke: resolve("var(--line)")}, font: "11px system-ui, sans-serif"};
  return {
    width, height: HEIGHT,
    cursor: {y: false, drag: {x: false, y: false}},
    scales: {
      x: {range: (_, __, last) => [last - span_s, last]},
      y: {range: (_, __, highest) => [0, most === null ? Math.max((highest ?? 0) * 1.1, format.least) : most / format.divisor]},
    },
    axes: [{...axis, size: 28, values: (_, splits) => splits.map(time)}, {...axis, size: 48, label: format.label, labelSize: 14, labelFont: axis.font, values: (_, splits) => splits.map(value => value.toLocaleString("en"))}],
    series: [{label: "Time", value: (self, value) => time(value ?? self.data[0].at(-1))}, ...series.map(each => ({
      label: each.label, stroke: resolve(each.colour), width: 2, dash: each.dash, fill: each.fill ? resolve(`color-mix(in srgb, ${each.colour} 22%, transparent)`) : undefined,
      points: {show: false}, paths: uPlot.paths.stepped({align: 1}), value: (self, value, number, at) => {
        const shown = at === null ? self.data[number].at(-1) : value;  // without a cursor the newest
        return shown === null || shown === undefined ? "unknown" : format.figure(shown * format.divisor);
      },
    }))],
    hooks: {draw: [self => drawMarks(self, resolve)]},
  };
}

/** Draw a line with a letter for each mark in the shown time. */
function drawMarks(self, resolve) {
  const {ctx, bbox} = self, ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.font = `${10 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  let lettered = -Infinity;
  for (const {at_s, letter, colour} of self.marks ?? []) {
    const x = self.valToPos(at_s, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = resolve(colour);
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath(); ctx.moveTo(x, bbox.top + 10 * ratio); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    if (x - lettered < 9 * ratio) continue;
    lettered = x;
    ctx.fillText(letter, x, bbox.top + 8 * ratio);
  }
  ctx.restore();
}

/** Return what the times and values of a history mean. */
export function about(body) {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return `Times in ${zone}. At most one value every ${body.resolution_s} s; memory rounded to ${body.resolution_bytes / 2 ** 20} MiB. Source: ${body.source}.`;
}
