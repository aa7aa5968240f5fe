// What the policy learns: rewards by environment with the evaluation, staleness, loss and the other figures.

import { Chart } from "../parts/chart.js";
import { panel } from "../parts/section.js";
import { Table } from "../parts/table.js";
import { el, setText, show } from "../text/dom.js";
import { count, figure } from "../text/format.js";
import { plain } from "../text/visible.js";

const ENVIRONMENTS = 6;
// A loss moves in its later digits.
const precise = (value) => figure(value, 5);

export const learning = {
  id: "learning",
  title: "Learning",
  needs: ["history", "evaluation", "figures", "not_finite", "curricula"],
  mount(body) {
    const grid = el("div", { class: "grid" });
    const reward = new Chart(grid, { title: "Reward by environment", none: "no step yet" });
    const staleness = new Chart(grid, { title: "Staleness, optimizer steps", axes: { y: { min: 0, atLeast: 1 } }, none: "no step yet" });
    const loss = new Chart(grid, { title: "Loss", none: "no loss reported" });
    const points = el("div");
    const figures = new Table(points, {
      caption: "Last figures of training", none: "The trainer has logged no figures.", key: (row) => row.name,
      columns: [
        { title: "Figure", head: true, value: (row) => row.name, mono: true },
        { title: "Last", number: true, value: (row) => (row.isFinite ? precise(row.value) : "not finite"), tone: (row) => (row.isFinite ? "" : "bad") },
      ],
    });
    const evaluated = el("p", { class: "numbers" });
    const left = el("p", { class: "warn" });
    const samplers = el("ul", { class: "plain-list" });
    grid.append(panel("Figures and evaluation", evaluated, left, points, samplers));
    body.append(grid);
    return (store) => {
      const steps = store.only("steps");
      reward.draw(rewards(store, steps));
      staleness.draw(steps === null ? [] : [
        { label: "largest", times: steps.t, values: steps.staleness_max ?? [], unit: count },
        { label: "mean", times: steps.t, values: steps.staleness_mean ?? [], unit: (value) => figure(value, 2) },
      ].filter((one) => one.values.some((value) => value !== null)));
      loss.draw(steps === null || !(steps.loss ?? []).some((value) => value !== null) ? [] : [{ label: "loss", times: steps.t, values: steps.loss, unit: precise }]);
      const bad = new Set(store.list("not_finite"));
      const rows = Object.entries(store.get("figures", {})).map(([name, value]) => ({ name, value, isFinite: !bad.has(name) }));
      for (const name of bad) if (!rows.some((row) => row.name === name)) rows.push({ name, value: null, isFinite: false });
      figures.draw(rows);
      const evaluation = store.get("evaluation", {});
      setText(evaluated, evaluation.last ? `Evaluation, point ${count(evaluation.points)} at step ${count(evaluation.last.step)}: ${plain(evaluation.last.text, 400)}` : "No evaluation point yet.");
      setText(left, plain(evaluation.left_out ?? "", 400));
      show(left, Boolean(evaluation.left_out));
      samplers.replaceChildren(...store.list("curricula").map((one) => el("li", { text: `Curriculum of ${plain(one.env, 60)}: ${plain(one.text, 300)}` })));
    };
  },
};

function rewards(store, steps) {
  const environments = store.history("reward");
  const series = environments.slice(0, ENVIRONMENTS).map(([env, columns]) => ({ label: env, times: columns.t, values: columns.mean ?? [] }));
  if (!series.length && steps !== null) series.push({ label: "all environments", times: steps.t, values: steps.reward ?? [] });
  const evaluation = store.only("evaluation");
  if (evaluation !== null) {
    for (const [name, label] of [["greedy", "evaluation, greedy"], ["mean", "evaluation, sampled"]]) {
      if ((evaluation[name] ?? []).some((value) => value !== null)) series.push({ label, times: evaluation.t, values: evaluation[name], points: true });
    }
  }
  return series;
}
