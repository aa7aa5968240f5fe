// Where the time of a group goes: its hops below each other, each beginning where the median of the one before ends.

import { panel } from "../parts/section.js";
import { Table } from "../parts/table.js";
import { Chart } from "../parts/chart.js";
import { el, setText, show, svg } from "../text/dom.js";
import { count, NONE, rate, seconds } from "../text/format.js";
import { plain } from "../text/visible.js";

const WAY = ["rollout", "send", "queue", "train", "commit"];
const TITLES = { rollout: "Rollout", send: "Send", queue: "Queue", train: "Train", commit: "Commit", call: "Call", http: "HTTP" };
const ENVIRONMENTS = 8;

// A hop between two clocks is no better known than they agree.
function duration(row, value) {
  if (value === null || value === undefined) return NONE;
  return row.clock_error_s > 0 && value < row.clock_error_s ? `< ${seconds(row.clock_error_s)}` : seconds(value);
}

const PERCENTILES = [
  { title: "p50", number: true, value: (row) => duration(row, row.p50_s) },
  { title: "p95", number: true, wide: true, value: (row) => duration(row, row.p95_s) },
  { title: "p99", number: true, value: (row) => duration(row, row.p99_s) },
  { title: "p99.9", number: true, wider: true, value: (row) => duration(row, row.p999_s) },
];

// A row with the figures of the last minute or two in place of those of the whole run; none without a group in them.
function lately(row) {
  if (!row.recent_count) return { ...row, count: 0, p50_s: null, p95_s: null, p99_s: null, p999_s: null };
  return { ...row, count: row.recent_count, p50_s: row.recent_p50_s, p95_s: row.recent_p95_s, p99_s: row.recent_p99_s, p999_s: row.recent_p999_s };
}

const keyOf = (row) => [row.hop, row.env, row.split, row.engine, row.route, row.status, row.name].join("\n");
const isSummed = (row) => row.name === null || row.name === undefined || row.name === "";

export const latency = {
  id: "latency",
  title: "Latency",
  needs: ["hops", "history"],
  mount(body) {
    const choice = el("select", { id: "latency-env" });
    const time = el("select", { id: "latency-time" }, el("option", { value: "run", text: "Whole run" }), el("option", { value: "lately", text: "Last minutes" }));
    const pick = el("p", { class: "pick" }, el("label", { for: "latency-env", text: "Environment " }), choice, el("label", { for: "latency-time", text: "Over " }), time);
    const falls = el("div", { class: "waterfall", role: "img" });
    const hops = el("div");
    const table = new Table(hops, {
      caption: "Latency of the hops of a group", none: "No group has made its way yet.", key: keyOf,
      columns: [
        { title: "Hop", head: true, value: (row) => TITLES[row.hop] ?? row.hop }, ...PERCENTILES,
        { title: "Groups", number: true, wide: true, value: (row) => count(row.count) },
        { title: "Rate", number: true, value: (row) => rate(row.per_s) },
        { title: "Slowest", number: true, wide: true, value: (row) => duration(row, row.slowest_s) },
        { title: "Its group", wide: true, mono: true, class: "id-cell", value: (row) => plain(row.slowest_id ?? "", 48) },
      ],
    });
    const calls = el("div");
    const callTable = new Table(calls, {
      caption: "Calls and requests", none: "No call or request was measured.", key: keyOf,
      columns: [
        { title: "Kind", value: (row) => TITLES[row.hop] ?? row.hop },
        { title: "To", head: true, value: (row) => plain([row.engine, row.route].filter(Boolean).join(" ") || row.env || NONE, 80) },
        { title: "Status", value: (row) => row.status || "no answer", tone: (row) => (row.status?.startsWith("2") ? "" : "warn") }, ...PERCENTILES,
        { title: "Rate", number: true, value: (row) => rate(row.per_s) },
        { title: "Tokens", number: true, wider: true, value: (row) => (row.tokens_per_s ? rate(row.tokens_per_s) : NONE) },
      ],
    });
    const grid = el("div", { class: "grid" });
    const way = panel("Way of a group", pick, falls, hops);
    way.classList.add("whole");
    grid.append(way);
    const chart = new Chart(grid, { title: "Median of each hop", axes: { y: { min: 0, unit: (value) => seconds(value) } }, none: "no latency measured yet" });
    chart.node.classList.add("whole");
    const others = panel("Calls and requests", calls);
    others.classList.add("whole");
    grid.append(others);
    body.append(grid);

    let last = null;
    for (const field of [choice, time]) field.addEventListener("change", () => last && draw(last));
    const draw = (store) => {
      last = store;
      const all = time.value === "lately" ? store.list("hops").map(lately) : store.list("hops");
      const rows = all.filter((row) => WAY.includes(row.hop) && isSummed(row));
      const lanes = [...new Map(rows.map((row) => [`${row.env}\n${row.split}`, row])).values()];
      renewChoice(choice, lanes);
      show(pick, all.length > 0);
      const [env, split] = (choice.value || "\n").split("\n");
      const shown = WAY.map((hop) => rows.find((row) => row.hop === hop && row.env === env && row.split === split)).filter(Boolean);
      drawFalls(falls, shown);
      table.draw(shown);
      callTable.draw(all.filter((row) => !WAY.includes(row.hop) && isSummed(row)));
      chart.draw(WAY.flatMap((hop) => {
        const found = store.history("hop").filter(([key]) => key === `${hop}:${env}` || (!env && key.startsWith(`${hop}:`)));
        return found.slice(0, 1).map(([, columns]) => ({ label: TITLES[hop], times: columns.t, values: columns.p50_s ?? [], unit: seconds }));
      }));
    };
    return draw;
  },
};

function renewChoice(choice, lanes) {
  const values = lanes.slice(0, 64).map((row) => `${row.env}\n${row.split}`);
  if (choice.shown === values.join("\u0000")) return;
  const before = choice.value;
  choice.shown = values.join("\u0000");
  choice.replaceChildren(...values.map((value) => {
    const [env, split] = value.split("\n");
    return el("option", { value, text: split === "train" ? plain(env, 60) : `${plain(env, 60)} (${plain(split, 10)})` });
  }));
  if (values.includes(before)) choice.value = before;
}

const WIDTH = 1000;
const ROW = 26;

function drawFalls(node, rows) {
  show(node, rows.length > 0);
  if (!rows.length) return;
  let at = 0;
  const places = rows.map((row) => {
    const from = at;
    at += row.p50_s ?? 0;
    return { row, from, to: at, tail: from + Math.max(row.p95_s ?? 0, row.p50_s ?? 0), far: from + Math.max(row.p99_s ?? 0, row.p95_s ?? 0, row.p50_s ?? 0) };
  });
  const end = Math.max(...places.map((place) => place.far), 1e-9);
  const x = (value) => (WIDTH * value) / end;
  const text = rows.map((row) => `${TITLES[row.hop]}: median ${duration(row, row.p50_s)}, 99 of 100 within ${duration(row, row.p99_s)}`).join("; ");
  node.setAttribute("aria-label", `Way of a group. ${text}.`);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${rows.length * ROW}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  places.forEach(({ from, to, tail, far }, index) => {
    const top = index * ROW + 5;
    const box = (start, stop, name) => drawing.append(svg("rect", { x: x(start), y: top, width: Math.max(1.5, x(stop) - x(start)), height: ROW - 10, class: name }));
    box(from, far, "fall far");
    box(from, tail, "fall tail");
    box(from, to, "fall median");
  });
  const labels = el("div", { class: "fall-labels", "aria-hidden": "true" }, ...rows.map((row) => el("span", { text: TITLES[row.hop] })));
  const axis = el("div", { class: "fall-axis numbers quiet", "aria-hidden": "true" }, el("span", { text: "0" }), el("span", { text: seconds(end / 2) }), el("span", { text: seconds(end) }));
  const key = el("div", { class: "fall-key quiet", "aria-hidden": "true" },
    el("span", { class: "key median", text: "p50" }), el("span", { class: "key tail", text: "p95" }), el("span", { class: "key far", text: "p99" }));
  node.replaceChildren(labels, drawing, axis, key);
  setText(key.firstChild, "p50");
}
