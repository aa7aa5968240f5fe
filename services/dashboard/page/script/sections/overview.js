// The run at a glance: why it waits, if it does, and its figures.

import { el, setAttribute, setText } from "../text/dom.js";
import { bytes, clock, count, figure, fixed, percent, rate } from "../text/format.js";
import { plain } from "../text/visible.js";

function pressureTone(queue) {
  const value = queue.rollout_pressure;
  if (value === null || value === undefined || queue.low === undefined) return "";
  return value < queue.low ? "warn" : value <= queue.high ? "good" : "";
}

const isKnown = (value) => value !== null && value !== undefined;

const TILES = [
  { title: "Rollout pressure", needs: "queue", value: ({ queue }) => fixed(queue.rollout_pressure), unit: "batches",
    note: ({ queue }) => (queue.low === undefined ? "" : `target ${figure(queue.low, 2)} to ${figure(queue.high, 2)}`), tone: ({ queue }) => pressureTone(queue) },
  { title: "Reward", value: ({ state }) => figure(state.reward), note: () => "mean of the last steps" },
  { title: "Staleness", value: ({ queue }) => count(queue.staleness_max), unit: ({ queue }) => `of ${count(queue.staleness_bound)}`,
    note: () => "steps, largest so far", tone: ({ queue }) => (queue.staleness_max > queue.staleness_bound ? "bad" : "") },
  { title: "Produced", value: ({ queue }) => rate(queue.produced_per_s), note: () => "sequences" },
  { title: "Trained", value: ({ queue }) => rate(queue.consumed_per_s), note: ({ state }) => (state.steps_per_s ? `sequences · ${rate(state.steps_per_s, "steps")}` : "sequences") },
  { title: "Workers", value: ({ counts }) => count(counts.ready ?? 0), unit: ({ target }) => (target === null ? "" : `of ${count(target)}`),
    note: ({ counts }) => Object.entries(counts).filter(([name, number]) => name !== "ready" && number).map(([name, number]) => `${count(number)} ${plain(name, 20)}`).join(" · ") || "ready" },
  { title: "Queue", value: ({ queue }) => count(queue.queued_groups), unit: () => "groups",
    note: ({ queue }) => `${bytes((queue.queued_bytes ?? 0) + (queue.leased_bytes ?? 0))} of ${bytes(queue.high_bytes)}` },
  { title: "Trainer starved", value: ({ queue }) => clock(queue.starved_s),
    note: ({ use }) => [isKnown(use.starved_of_run) ? `${percent(use.starved_of_run)} of the whole run` : "", isKnown(use.starved) ? `${percent(use.starved)} from the first batch` : ""].filter(Boolean).join(" · ") },
  { title: "Workers blocked", value: ({ use }) => percent(use.blocked ?? null), unit: ({ use }) => (isKnown(use.blocked) ? "of their time" : ""),
    note: ({ use }) => (isKnown(use.blocked) ? ["from the first batch", plain(use.blocked_reason ?? "", 40)].filter(Boolean).join(" · ") : "") },
];

function activity(store) {
  const life = store.get("run", {}).life;
  if (life === "living") return "Nobody waits: workers roll out and the trainer trains.";
  return life ? "The run is over: these are its last values." : "";
}

export const overview = {
  id: "overview",
  title: "Overview",
  needs: ["run", "queue", "waits", "use", "environments", "worker_counts", "problems", "trainer_trouble"],
  mount(body) {
    const alerts = el("ul", { class: "alerts", "aria-label": "Problems" });
    const why = el("p", { class: "why" });
    const tiles = TILES.map((tile) => {
      const value = el("span", { class: "tile-value" });
      const unit = el("span", { class: "tile-unit" });
      const note = el("span", { class: "tile-note" });
      const node = el("div", { class: "tile" }, el("dt", { text: tile.title }), el("dd", {}, value, " ", unit, note));
      return { ...tile, node, parts: { value, unit, note } };
    });
    body.append(alerts, why, el("dl", { class: "tiles" }, ...tiles.map((tile) => tile.node)));
    return (store) => {
      drawAlerts(alerts, store);
      const text = plain(store.get("waits", {}).why || activity(store), 600);
      setText(why, text);
      const environments = store.list("environments").filter((one) => one.split === "train" && one.target !== null && one.target !== undefined);
      const facts = {
        state: store.get("run", {}), queue: store.get("queue", {}), use: store.get("use", {}), counts: store.get("worker_counts", {}),
        target: environments.length ? environments.reduce((sum, one) => sum + one.target, 0) : null,
      };
      for (const { node, parts, value, unit, note, tone } of tiles) {
        setText(parts.value, value(facts));
        setText(parts.unit, typeof unit === "function" ? unit(facts) : unit ?? "");
        setText(parts.note, note(facts));
        setAttribute(node, "class", `tile ${tone?.(facts) ?? ""}`.trim());
      }
    };
  },
};

function drawAlerts(list, store) {
  const run = store.get("run", {});
  const found = store.list("problems").map((one) => `${one.what}: ${one.text}`);
  if (run.notice) found.unshift(run.notice);
  if (store.get("trainer_trouble", "")) found.push(`trainer: ${store.get("trainer_trouble")}`);
  const lines = found.map((text) => plain(text, 600));
  if (list.shown === lines.join("\n")) return;
  list.shown = lines.join("\n");
  list.hidden = lines.length === 0;
  list.replaceChildren(...lines.map((text) => el("li", { class: "bad", text })));
}

