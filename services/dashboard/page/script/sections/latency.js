// Where the time of a group goes: its hops below each other, each beginning where the median of the one before ends; or
// the slowest workers, hosts, engines or GPUs.

import { Chart } from "../parts/chart.js";
import { PartLatencies } from "../parts/part_latencies.js";
import { panel } from "../parts/section.js";
import { Table } from "../parts/table.js";
import { drawWaterfall } from "../parts/waterfall.js";
import { el, show } from "../text/dom.js";
import { count, NONE, rate, seconds } from "../text/format.js";
import { duration, PERCENTILES, SLOWEST, TITLES } from "../text/latencies.js";
import { plain } from "../text/visible.js";

const WAY = ["rollout", "send", "queue", "train", "commit"];
const PARTS = [["env", "environment"], ["worker", "worker"], ["host", "host"], ["engine", "engine"], ["gpu", "GPU"]];
const CHOICES = 64;

// A row with the figures of the last minute or two in place of those of the whole run; none without a group in them.
function lately(row) {
  if (!row.recent_count) return { ...row, count: 0, p50_s: null, p95_s: null, p99_s: null, p999_s: null };
  return { ...row, count: row.recent_count, p50_s: row.recent_p50_s, p95_s: row.recent_p95_s, p99_s: row.recent_p99_s, p999_s: row.recent_p999_s };
}

const keyOf = (row) => [row.hop, row.env, row.split, row.engine, row.route, row.status].join("\n");

export const latency = {
  id: "latency",
  title: "Latency",
  needs: ["hops", "history"],
  mount(body, { run }) {
    const by = el("select", { id: "latency-by" }, ...PARTS.map(([value, text]) => el("option", { value, text })));
    const choice = el("select", { id: "latency-env" });
    const time = el("select", { id: "latency-time" }, el("option", { value: "run", text: "Whole run" }), el("option", { value: "lately", text: "Last minutes" }));
    const ofWay = el("span", { class: "pick-part" }, el("label", { for: "latency-env", text: "Environment " }), choice, el("label", { for: "latency-time", text: "Over " }), time);
    const parts = new PartLatencies({ ask: (query) => run.latencies(query) });
    const pick = el("p", { class: "pick" }, el("label", { for: "latency-by", text: "By " }), by, ofWay, parts.pick);
    const falls = el("div", { class: "waterfall", role: "img" });
    const hops = el("div");
    const table = new Table(hops, {
      caption: "Latency of the hops of a group", none: "No group has made its way yet.", key: keyOf,
      columns: [
        { title: "Hop", head: true, value: (row) => TITLES[row.hop] ?? row.hop }, ...PERCENTILES,
        { title: "Groups", number: true, wide: true, value: (row) => count(row.count) },
        { title: "Rate", number: true, value: (row) => rate(row.per_s) }, ...SLOWEST,
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
    const ofGroup = el("div", {}, falls, hops);
    const way = panel("Way of a group", pick, ofGroup, parts.node);
    way.classList.add("whole");
    grid.append(way);
    const chart = new Chart(grid, { title: "Median of each hop", axes: { y: { min: 0, unit: (value) => seconds(value) } }, none: "no latency measured yet" });
    chart.node.classList.add("whole");
    const others = panel("Calls and requests", calls);
    others.classList.add("whole");
    grid.append(others);
    body.append(grid);

    let last = null;
    for (const field of [by, choice, time]) field.addEventListener("change", () => last && draw(last));
    const draw = (store) => {
      last = store;
      const isWay = by.value === "env";
      for (const node of [ofWay, ofGroup]) show(node, isWay);
      parts.draw(isWay ? null : by.value);
      const all = time.value === "lately" ? store.list("hops").map(lately) : store.list("hops");
      const rows = all.filter((row) => WAY.includes(row.hop));
      const lanes = [...new Map(rows.map((row) => [`${row.env}\n${row.split}`, row])).values()].sort((left, right) => (left.split === "train" ? 0 : 1) - (right.split === "train" ? 0 : 1));
      renewChoice(choice, lanes);
      show(pick, all.length > 0);
      const [env, split] = (choice.value || "\n").split("\n");
      const shown = WAY.map((hop) => rows.find((row) => row.hop === hop && row.env === env && row.split === split)).filter(Boolean);
      drawWay(falls, shown);
      table.draw(shown);
      callTable.draw(all.filter((row) => !WAY.includes(row.hop)));
      chart.setNone(shown.length ? "no curve yet: a point takes some seconds of groups" : "no latency measured yet");
      const curves = new Map(store.history("hop"));
      chart.draw(WAY.flatMap((hop) => {
        const columns = curves.get(`${hop}:${split === "eval" ? "eval:" : ""}${env}`);
        return columns ? [{ label: TITLES[hop], times: columns.t, values: columns.p50_s ?? [], unit: seconds }] : [];
      }));
    };
    return draw;
  },
};

function renewChoice(choice, lanes) {
  const values = lanes.slice(0, CHOICES).map((row) => `${row.env}\n${row.split}`);
  if (choice.shown === values.join("\u0000")) return;
  const before = choice.value;
  choice.shown = values.join("\u0000");
  choice.replaceChildren(...values.map((value) => {
    const [env, split] = value.split("\n");
    return el("option", { value, text: split === "train" ? plain(env, 60) : `${plain(env, 60)} (${plain(split, 10)})` });
  }));
  if (values.includes(before)) choice.value = before;
}

function drawWay(node, rows) {
  let at = 0;
  const bars = rows.map((row) => {
    const bar = { label: TITLES[row.hop], row, from: at };
    at += row.p50_s ?? 0;
    return bar;
  });
  const text = rows.map((row) => `${TITLES[row.hop]}: median ${duration(row, row.p50_s)}, 99 of 100 within ${duration(row, row.p99_s)}`).join("; ");
  drawWaterfall(node, bars, `Way of a group. ${text}.`);
}
