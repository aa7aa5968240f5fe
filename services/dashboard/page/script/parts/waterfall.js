// Bars of durations below each other: the median, and how far the slow ones reach.

import { el, show, svg } from "../text/dom.js";
import { seconds } from "../text/format.js";
import { plain } from "../text/visible.js";

const WIDTH = 1000;
const ROW = 26;
const LABEL_CHARS = 40;

/** Draw bars. Each has `label`, `row` with `p50_s`, `p95_s` and `p99_s`, and `from`, the seconds at which it begins.
 * `said` is the drawing in words. */
export function drawWaterfall(node, bars, said) {
  show(node, bars.length > 0);
  if (!bars.length) return;
  const places = bars.map(({ label, row, from }) => {
    const [median, tail, far] = [row.p50_s ?? 0, row.p95_s ?? 0, row.p99_s ?? 0];
    return { label, from, to: from + median, tail: from + Math.max(tail, median), far: from + Math.max(far, tail, median) };
  });
  const end = Math.max(...places.map((place) => place.far), 1e-9);
  const x = (value) => (WIDTH * value) / end;
  node.setAttribute("aria-label", said);
  node.style.setProperty("--rows", String(bars.length));
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${bars.length * ROW}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  places.forEach(({ from, to, tail, far }, index) => {
    const top = index * ROW + 5;
    const box = (start, stop, name) => drawing.append(svg("rect", { x: x(start), y: top, width: Math.max(1.5, x(stop) - x(start)), height: ROW - 10, class: name }));
    box(from, far, "fall far");
    box(from, tail, "fall tail");
    box(from, to, "fall median");
  });
  const labels = el("div", { class: "fall-labels", "aria-hidden": "true" }, ...bars.map(({ label }) => el("span", { text: plain(label, LABEL_CHARS) })));
  const axis = el("div", { class: "fall-axis numbers quiet", "aria-hidden": "true" }, el("span", { text: "0" }), el("span", { text: seconds(end / 2) }), el("span", { text: seconds(end) }));
  const key = el("div", { class: "fall-key quiet", "aria-hidden": "true" },
    el("span", { class: "key median", text: "p50" }), el("span", { class: "key tail", text: "p95" }), el("span", { class: "key far", text: "p99" }));
  node.replaceChildren(labels, drawing, axis, key);
}
