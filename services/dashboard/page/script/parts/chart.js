// A chart of series over the time of the run, with its legend, its summary in words, and its data as a table.
//
// All charts share the span of time and the cursor, which the arrow keys move too. A series has `label`, `values`, and may have `unit` (a function from a
// number to text), `scale`, `dash`, `points` (marks only), `fill`, `stepped`. Series of one chart may have times of their own.

import { el, setAttribute, setText, show } from "../text/dom.js";
import { figure, moment } from "../text/format.js";
import { plain } from "../text/visible.js";
import { colour, onColours } from "./theme.js";
import { view } from "./view.js";

const COLOURS = 8;
const TABLE_ROWS = 24;
const LABEL_CHARS = 40;
const SAY_MS = 150;
const PAGE_PART = 10;
const KEYS_HELP = "Arrow keys, Page Up, Page Down, Home and End move along the time; Escape leaves.";
const charts = new Set();

const two = (number) => String(number).padStart(2, "0");

function timeLabel(at, step) {
  const date = new Date(at * 1000);
  if (step >= 86400) return `${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const minutes = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return step >= 60 ? minutes : `${minutes}:${two(date.getSeconds())}`;
}

export class Chart {
  /** `axes`: by scale, `{unit, min, max}`; `y` is at the left, any other at the right. `band`: a function that returns
   * `[low, high]` of `y` to shade, or null. */
  constructor(parent, { title, height = 190, axes = { y: {} }, band = null, none = "no data yet" }) {
    this.title = title;
    this.height = height;
    this.axes = axes;
    this.band = band;
    this.series = [];
    this.hidden = new Set();
    this.plot = null;
    this.legend = el("ul", { class: "legend" });
    this.time = el("span", { class: "quiet numbers chart-time" });
    this.canvas = el("div", { class: "chart-canvas", role: "img", tabindex: 0, "aria-label": `${title}: no data yet.`, "aria-description": KEYS_HELP });
    this.said = el("p", { class: "sr-only", role: "status" });
    this.place = null;
    this.canvas.addEventListener("keydown", (event) => this._key(event));
    this.canvas.addEventListener("blur", () => this._leave());
    this.none = el("p", { class: "empty", text: none });
    this.table = el("div", { class: "table-box", role: "region", tabindex: 0, "aria-label": `${title}: data` });
    this.details = el("details", { class: "chart-data" }, el("summary", { "aria-label": `Data of ${title} as a table`, text: "Data" }), this.table);
    this.details.addEventListener("toggle", () => this._drawTable());
    this.node = el("figure", { class: "panel chart", "aria-label": title },
      el("figcaption", {}, el("h3", { text: title }), this.time), this.legend, this.canvas, this.said, this.none, this.details);
    parent.append(this.node);
    new ResizeObserver(() => this._resize()).observe(this.canvas);
    charts.add(this);
    onColours(() => this._build());
    view.listen(() => this.plot?.setData(this.data));
  }

  /** Draw series, each with its `times` and `values`. */
  draw(series) {
    const shown = series.filter((one) => one.times.length > 0);
    const shape = JSON.stringify(shown.map((one) => [one.label, one.scale ?? "y", one.dash ?? 0, Boolean(one.points), one.values.length < 2]));
    this.series = shown;
    show(this.none, shown.length === 0);
    show(this.canvas, shown.length > 0);
    show(this.details, shown.length > 0);
    this.data = joined(shown);
    if (shape !== this.shape) {
      this.shape = shape;
      this._build();
    } else {
      this.plot?.setData(this.data);
    }
    this._drawLegend(this.place === null ? null : Math.min(this.place, this.data[0].length - 1));
    this._describe();
    this._drawTable();
  }

  /** Set what is shown without any data. */
  setNone(text) {
    setText(this.none, text);
  }

  // The cursor by keys: to the next point, a tenth of them, or the ends of the shown span.
  _key(event) {
    const times = this.data?.[0] ?? [];
    if (!this.plot || !times.length || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Escape") {
      this._leave();
      return;
    }
    const [first, last] = shownRange(times, this.plot.scales.x);
    const page = Math.max(1, Math.round((last - first) / PAGE_PART));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const from = this.place ?? (move < 0 ? last + 1 : first - 1);
    this.place = Math.min(last, Math.max(first, from + move));
    this.plot.setCursor({ left: this.plot.valToPos(times[this.place], "x"), top: this.plot.over.clientHeight / 2 });
    this._drawLegend(this.place);
    clearTimeout(this.saying);
    this.saying = setTimeout(() => this._say(), SAY_MS);
  }

  _leave() {
    if (this.place === null) return;
    this.place = null;
    clearTimeout(this.saying);
    setText(this.said, "");
    this.plot?.setCursor({ left: -10, top: -10 });
    this._drawLegend(null);
  }

  _say() {
    if (this.place === null || this.place >= (this.data?.[0]?.length ?? 0)) return;
    const values = this.series.flatMap((one, at) =>
      (this.hidden.has(one.label) ? [] : [`${plain(one.label, LABEL_CHARS)} ${text(one, nearest(this.data[at + 1], this.place))}`]));
    setText(this.said, `${moment(this.data[0][this.place])}: ${values.join(", ")}`);
  }

  _resize() {
    const width = Math.floor(this.canvas.clientWidth);
    if (width < 40) return;
    if (this.plot === null) this._build();
    else if (Math.abs(this.plot.width - width) > 0) this.plot.setSize({ width, height: this.height });
  }

  _build() {
    this.plot?.destroy();
    this.plot = null;
    const width = Math.floor(this.canvas.clientWidth);
    this._buildLegend();
    if (!this.series.length || width < 40) return;
    const [ink, line, shade] = [colour("quiet"), colour("line"), colour("band")];
    const scales = { x: { time: true, range: (_, low, high) => view.limits(low, high) } };
    const axes = [{ stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 4 }, size: 28, space: 70, font: FONT,
      values: (_, splits, __, ___, step) => splits.map((at) => timeLabel(at, step)) }];
    for (const [name, axis] of Object.entries(this.axes)) {
      scales[name] = { range: (_, low, high) => limits(low, high, axis) };
      if (name !== "y" && !this.series.some((one) => one.scale === name)) continue;
      axes.push({ scale: name, side: name === "y" ? 3 : 1, stroke: ink, font: FONT, size: 52, space: 32,
        grid: name === "y" ? { stroke: line, width: 1 } : { show: false }, ticks: { show: false },
        values: (_, splits) => splits.map((value) => (axis.unit ?? short)(value)) });
    }
    const series = [{}, ...this.series.map((one, at) => seriesOf(one, at, !this.hidden.has(one.label)))];
    this.plot = new window.uPlot({
      width, height: this.height, scales, axes, series, legend: { show: false }, padding: [8, 20, 0, 0],
      cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      hooks: {
        drawAxes: [(plot) => this._shade(plot, shade)],
        setCursor: [(plot) => this._drawLegend(plot.cursor.idx ?? null)],
        setSelect: [(plot) => this._select(plot)],
      },
    }, this.data, this.canvas);
    this.plot.over.addEventListener("dblclick", () => view.setZoom(null));
  }

  _shade(plot, shade) {
    const limits = this.band?.();
    if (!limits) return;
    const [top, bottom] = [plot.valToPos(limits[1], "y", true), plot.valToPos(limits[0], "y", true)];
    const { left, width, top: first, height } = plot.bbox;
    const from = Math.max(first, Math.min(top, first + height));
    const to = Math.max(first, Math.min(bottom, first + height));
    plot.ctx.save();
    plot.ctx.fillStyle = shade;
    plot.ctx.fillRect(left, from, width, to - from);
    plot.ctx.restore();
  }

  _select(plot) {
    const { left, width } = plot.select;
    if (width < 8) return;
    view.setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  _buildLegend() {
    this.legend.replaceChildren(...this.series.map((one, at) => {
      const swatch = el("span", { class: `swatch s${at % COLOURS}${one.dash ? " dashed" : ""}${one.points ? " dot" : ""}`, "aria-hidden": "true" });
      const value = el("span", { class: "numbers" });
      const button = el("button", { type: "button", class: "legend-item", "aria-pressed": String(!this.hidden.has(one.label)) },
        swatch, el("bdi", { text: plain(one.label, LABEL_CHARS) }), value);
      button.addEventListener("click", () => {
        const isShown = this.hidden.delete(one.label);
        if (!isShown) this.hidden.add(one.label);
        setAttribute(button, "aria-pressed", String(isShown));
        this.plot?.setSeries(at + 1, { show: isShown });
      });
      return el("li", {}, button);
    }));
  }

  // At the cursor, else the last value.
  _drawLegend(index) {
    this.series.forEach((one, at) => {
      const node = this.legend.children[at]?.firstElementChild?.lastElementChild;
      if (!node) return;
      const value = index === null ? lastOf(one.values) : nearest(this.data[at + 1], index);
      setText(node, ` ${text(one, value)}`);
    });
    setText(this.time, index === null || !this.data?.[0]?.length ? "" : moment(this.data[0][index]));
  }

  _describe() {
    const parts = this.series.map((one) => {
      const numbers = one.values.filter((value) => value !== null && value !== undefined);
      if (!numbers.length) return `${plain(one.label, LABEL_CHARS)}: no value`;
      let [low, high] = [Infinity, -Infinity];
      for (const value of numbers) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
      return `${plain(one.label, LABEL_CHARS)}: last ${text(one, numbers.at(-1))}, lowest ${text(one, low)}, highest ${text(one, high)}`;
    });
    setAttribute(this.canvas, "aria-label", parts.length ? `${this.title}. ${parts.join("; ")}.` : `${this.title}: no data yet.`);
  }

  _drawTable() {
    if (!this.details.open || !this.data) return;
    const [times, ...columns] = this.data;
    const step = Math.max(1, Math.ceil(times.length / TABLE_ROWS));
    const rows = [];
    for (let at = times.length - 1; at >= 0; at -= step) {
      rows.push(el("tr", {}, el("th", { scope: "row", class: "numbers", text: moment(times[at]) }),
        ...columns.map((values, column) => el("td", { class: "number", text: text(this.series[column], nearest(values, at)) }))));
    }
    this.table.replaceChildren(el("table", {}, el("caption", { class: "sr-only", text: this.title }),
      el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "time" }),
        ...this.series.map((one) => el("th", { scope: "col", class: "number", text: plain(one.label, LABEL_CHARS) })))),
      el("tbody", {}, ...rows)));
  }
}

const FONT = "11px system-ui, sans-serif";

function short(value) {
  return Math.abs(value) >= 1e4 ? new Intl.NumberFormat("en", { notation: "compact" }).format(value) : String(Number(value.toPrecision(6)));
}

function text(one, value) {
  return (one.unit ?? figure)(value ?? null);
}

function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

// Series with other times have no value at most points of the joined ones: the last one before holds.
function nearest(values, index) {
  for (let at = index; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

// The first and the last index within the shown span of time; of all points if none is within.
function shownRange(times, { min, max }) {
  const first = times.findIndex((at) => at >= min);
  const last = times.findLastIndex((at) => at <= max);
  return first < 0 || last < first ? [0, times.length - 1] : [first, last];
}

function joined(series) {
  if (!series.length) return [[]];
  if (series.every((one) => one.times === series[0].times)) return [series[0].times, ...series.map((one) => one.values)];
  return window.uPlot.join(series.map((one) => [one.times, one.values]));
}

function limits(low, high, axis) {
  let from = axis.min ?? low ?? 0;
  let to = axis.max ?? high ?? 1;
  if (low !== null && low !== undefined && low < from && axis.min !== undefined && axis.soft) from = low;
  if (high !== null && high !== undefined && axis.max !== undefined && high > to) to = high;
  if (axis.atLeast !== undefined && to < axis.atLeast) to = axis.atLeast;
  const room = (to - from || Math.abs(to) || 1) * 0.06;
  return [axis.min !== undefined && from === axis.min ? from : from - room, to + room];
}

function seriesOf(one, at, isShown) {
  const stroke = colour(`series-${at % COLOURS}`);
  const base = { label: one.label, scale: one.scale ?? "y", stroke, show: isShown, width: 1.6, spanGaps: !one.gaps,
    points: { show: false } };
  if (one.dash) base.dash = [5, 4];
  if (one.stepped) base.paths = window.uPlot.paths.stepped({ align: 1 });
  if (one.points) return { ...base, paths: () => null, points: { show: true, size: 7, fill: stroke, stroke } };
  if (one.values.length < 2) base.points = { show: true, size: 5, fill: stroke, stroke };
  return base;
}
