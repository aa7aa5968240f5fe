// Who waits and for what: the reasons in words, the share of time over the run, and the seconds so far.

import { Chart } from "../parts/chart.js";
import { panel } from "../parts/section.js";
import { bar, Table } from "../parts/table.js";
import { el, setText } from "../text/dom.js";
import { clock, count, percent } from "../text/format.js";
import { plain } from "../text/visible.js";

const REASONS = 6;
const LANES = 8;
const WHO = { trainer: "Trainer", workers: "Workers", producers: "Workers" };

export const waits = {
  id: "waits",
  title: "Waits",
  needs: ["history", "waits", "use", "environments"],
  mount(body) {
    const grid = el("div", { class: "grid" });
    const chart = new Chart(grid, { title: "Share of time waiting, by reason", axes: { y: { min: 0, atLeast: 0.1, unit: (value) => percent(value) } }, none: "nobody has waited" });
    const trainer = el("p", {});
    const workers = el("p", {});
    const blocked = el("p", { class: "quiet numbers" });
    const room = el("div");
    const table = new Table(room, {
      caption: "Seconds of waiting by reason", none: "Nobody has waited.", key: (row) => `${row.who}\n${row.reason}`,
      columns: [
        { title: "Who", value: (row) => WHO[row.who] ?? row.who },
        { title: "Reason", head: true, value: (row) => row.reason, mono: true },
        { title: "Waited", number: true, value: (row) => clock(row.seconds) },
        { title: "", value: (row) => row.part.toFixed(3), render: (row) => bar(row.part), class: "bar-cell" },
      ],
    });
    grid.append(panel("Reasons", trainer, workers, blocked, room));
    body.append(grid);
    return (store) => {
      const now = store.get("waits", {});
      const living = store.get("run", {}).life === "living";
      setText(trainer, `Trainer: ${plain(now.trainer, 400) || (living ? "does not wait" : "no wait known")}`);
      setText(workers, `Workers: ${plain(now.workers, 400) || (living ? "do not wait" : "no wait known")}`);
      setText(blocked, blockedText(store));
      const rows = (now.seconds ?? []).filter((row) => row.seconds > 0).sort((left, right) => right.seconds - left.seconds);
      const most = rows[0]?.seconds || 1;
      table.draw(rows.map((row) => ({ ...row, part: row.seconds / most })));
      chart.draw(shares(store));
    };
  },
};

// How many workers the broker holds back at this moment, and for which part of their time it has.
function blockedText(store) {
  const lanes = store.list("environments").filter((row) => row.waiting > 0);
  const now = lanes.map((row) => `${plain(row.env, 60)}${row.split === "eval" ? " (eval)" : ""}: ${count(row.waiting)} of ${count(row.producers)} wait for ${plain(row.wait || "credit", 40)}`);
  const { blocked } = store.get("use", {});
  const part = blocked === null || blocked === undefined ? "" : `Rollout slots waited ${percent(blocked)} of their time from the first batch.`;
  return [now.slice(0, LANES).join("; ") + (now.length > LANES ? `; and ${count(now.length - LANES)} more` : ""), part].filter(Boolean).join(". ");
}

function shares(store) {
  const total = (columns) => (columns.share ?? []).reduce((sum, value) => sum + (value ?? 0), 0);
  return store.history("wait")
    .filter(([, columns]) => total(columns) > 0)
    .sort(([, left], [, right]) => total(right) - total(left))
    .slice(0, REASONS)
    .map(([key, columns]) => ({ label: key.replace(":", ": "), times: columns.t, values: columns.share ?? [], unit: (value) => percent(value), gaps: true }));
}
