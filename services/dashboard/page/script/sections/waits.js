// Who waits and for what: the reasons in words, the share of time over the run, and the seconds so far.

import { Chart } from "../parts/chart.js";
import { panel } from "../parts/section.js";
import { bar, Table } from "../parts/table.js";
import { el, setText } from "../text/dom.js";
import { clock, percent } from "../text/format.js";
import { plain } from "../text/visible.js";

const REASONS = 6;
const WHO = { trainer: "Trainer", workers: "Workers", producers: "Workers" };

export const waits = {
  id: "waits",
  title: "Waits",
  needs: ["history", "waits"],
  mount(body) {
    const grid = el("div", { class: "grid" });
    const chart = new Chart(grid, { title: "Share of time waiting, by reason", axes: { y: { min: 0, atLeast: 0.1, unit: (value) => percent(value) } }, none: "nobody has waited" });
    const trainer = el("p", {});
    const workers = el("p", {});
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
    grid.append(panel("Reasons", trainer, workers, room));
    body.append(grid);
    return (store) => {
      const now = store.get("waits", {});
      const living = store.get("run", {}).life === "living";
      setText(trainer, `Trainer: ${plain(now.trainer, 400) || (living ? "does not wait" : "no wait known")}`);
      setText(workers, `Workers: ${plain(now.workers, 400) || (living ? "do not wait" : "no wait known")}`);
      const rows = (now.seconds ?? []).filter((row) => row.seconds > 0).sort((left, right) => right.seconds - left.seconds);
      const most = rows[0]?.seconds || 1;
      table.draw(rows.map((row) => ({ ...row, part: row.seconds / most })));
      chart.draw(shares(store));
    };
  },
};

function shares(store) {
  const total = (columns) => (columns.share ?? []).reduce((sum, value) => sum + (value ?? 0), 0);
  return store.history("wait")
    .filter(([, columns]) => total(columns) > 0)
    .sort(([, left], [, right]) => total(right) - total(left))
    .slice(0, REASONS)
    .map(([key, columns]) => ({ label: key.replace(":", ": "), times: columns.t, values: columns.share ?? [], unit: (value) => percent(value), gaps: true }));
}
