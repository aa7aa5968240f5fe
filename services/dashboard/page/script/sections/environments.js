// The environments: their queues, their workers against the target, and the order to scale.

import { actionButton, renewButton } from "../parts/actions.js";
import { longText } from "../parts/long_text.js";
import { Table } from "../parts/table.js";
import { el, setText, show } from "../text/dom.js";
import { count, figure, NONE, percent, rate, seconds } from "../text/format.js";
import { plain } from "../text/visible.js";

function workersText(row) {
  if (row.target === null || row.target === undefined) return NONE;
  const pinned = row.pinned === null || row.pinned === undefined ? "" : ", pinned";
  return `${count(row.current)} of ${count(row.target)}${pinned}`;
}

const why = (row) => [row.given_up, row.limit, row.target_reason].filter(Boolean).join("; ");

export const environments = {
  id: "environments",
  title: "Environments",
  needs: ["environments", "engine_target", "run", "use"],
  mount(body, { actions }) {
    const table = new Table(body, {
      caption: "Environments", none: "No environment has registered.", key: (row) => `${row.env}\n${row.split}`,
      columns: [
        { title: "Environment", head: true, value: (row) => row.env, render: (row) => longText(row.env, { limit: 40 }) },
        { title: "Split", wide: true, value: (row) => row.split },
        { title: "Reward", number: true, value: (row) => (row.reward_mean === null ? NONE : `${figure(row.reward_mean)} ± ${figure(row.reward_deviation, 2)}`) },
        { title: "Queued", number: true, wide: true, value: (row) => count(row.queued_groups) },
        { title: "Leased", number: true, wider: true, value: (row) => count(row.leased_groups) },
        { title: "Trained", number: true, wider: true, value: (row) => count(row.trained_groups) },
        { title: "Groups", number: true, value: (row) => rate(row.accepted_per_s) },
        { title: "Rollout", number: true, wider: true, value: (row) => (row.rollout_s ? seconds(row.rollout_s) : NONE) },
        { title: "Waiting", number: true, wide: true, value: (row) => (row.waiting === undefined ? NONE : `${count(row.waiting)} of ${count(row.producers)}`), tone: (row) => (row.waiting ? "warn" : "") },
        { title: "For", wide: true, value: (row) => row.wait || NONE, mono: true },
        { title: "Blocked", number: true, wider: true, value: (row) => percent(row.blocked ?? null) },
        { title: "Workers", number: true, value: workersText },
        { title: "Why that many", wide: true, class: "reason", value: why, render: (row) => longText(why(row), { limit: 120 }) },
        { title: "Action", class: "action-cell", value: () => "",
          render: (row) => {
            const button = actionButton(actions, "Scale …", `Scale ${plain(row.env, 60)}`, () => scale(actions, button.row));
            return button;
          },
          renew: (button, row) => {
            button.row = row;
            button.hidden = row.split === "eval";
            renewButton(button, actions);
          } },
      ],
    });
    const note = el("p", { class: "quiet left-out", hidden: true });
    body.append(note);
    return (store) => {
      const blocked = store.get("use", {}).blocked_by_env ?? {};
      const rows = store.list("environments").map((row) => ({ ...row, blocked: row.split === "eval" ? null : blocked[row.env] }));
      // Engines are scaled, too, under the name of their service.
      const engines = store.get("engine_target");
      const lanes = store.get("run", {}).lanes ?? 0;
      const shown = rows.filter((row) => row.queued_groups !== undefined).length;
      setText(note, lanes > shown ? `${count(shown)} of ${count(lanes)} are shown; rolloutmq status --json has all.` : "");
      show(note, lanes > shown);
      table.draw(engines ? [...rows, { env: "inference", split: "engines", reward_mean: null, ...engines, target_reason: engines.reason, isEngines: true }] : rows);
    };
  },
};

function scale(actions, row) {
  const name = plain(row.env, 80);
  const number = el("input", { type: "number", id: "scale-count", min: 0, max: 100000, step: 1, value: row.pinned ?? row.target ?? row.current ?? 1 });
  const auto = el("input", { type: "checkbox", id: "scale-auto" });
  auto.addEventListener("change", () => {
    number.disabled = auto.checked;
  });
  actions.confirm({
    title: `Scale ${name}`,
    text: row.isEngines ? "Pin the number of engines, or return it to autoscaling." : "Pin the number of workers, or return it to autoscaling. Workers that go are drained first.",
    fields: [
      el("p", {}, el("label", { for: "scale-count", text: row.isEngines ? "Engines " : "Workers " }), number),
      el("p", {}, auto, el("label", { for: "scale-auto", text: " Autoscaling" })),
    ],
    name: "scale", label: "Scale",
    body: () => {
      if (auto.checked) return { env: row.env, count: null };
      const wanted = number.valueAsNumber;
      if (!Number.isInteger(wanted) || wanted < 0) throw new Error("The number must be whole, and 0 or more.");
      return { env: row.env, count: wanted };
    },
  });
}
