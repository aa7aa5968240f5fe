// Supply and demand: the pressure with the workers that follow it, and what is produced against what is trained.

import { Chart } from "../parts/chart.js";
import { el } from "../text/dom.js";
import { count, fixed, rate } from "../text/format.js";

const sequences = (value) => rate(value);

export const flow = {
  id: "flow",
  title: "Supply and demand",
  needs: ["history", "queue"],
  mount(body, { store }) {
    const grid = el("div", { class: "grid" });
    body.append(grid);
    const pressure = new Chart(grid, {
      title: "Rollout pressure and workers",
      axes: { y: { min: 0, atLeast: 1 }, workers: { min: 0, atLeast: 2 } },
      band: () => {
        const { low, high } = store.get("queue", {});
        return typeof low === "number" && typeof high === "number" ? [low, high] : null;
      },
    });
    const rates = new Chart(grid, { title: "Produced against trained, sequences a second", axes: { y: { min: 0, atLeast: 1 } } });
    return () => {
      const columns = store.only("queue");
      const targets = store.history("target");
      const series = columns === null ? [] : [
        { label: "pressure, batches", times: columns.t, values: columns.rollout_pressure ?? [], unit: (value) => fixed(value), gaps: true },
        { label: "ready workers", times: columns.t, values: columns.ready ?? [], scale: "workers", unit: count, stepped: true, gaps: true },
      ];
      // One line for the target: of the one environment, else of all together.
      if (targets.length === 1) {
        const [, one] = targets[0];
        series.push({ label: "target workers", times: one.t, values: one.target ?? [], scale: "workers", unit: count, stepped: true, dash: true });
      }
      pressure.draw(series);
      rates.draw(columns === null ? [] : [
        { label: "produced", times: columns.t, values: columns.produced_per_s ?? [], unit: sequences, gaps: true },
        { label: "trained", times: columns.t, values: columns.consumed_per_s ?? [], unit: sequences, gaps: true },
      ]);
    };
  },
};
