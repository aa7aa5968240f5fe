// All workers: sorted, filtered, and one of them in detail with its actions.

import { actionButton } from "../parts/actions.js";
import { openDialog } from "../parts/dialog.js";
import { longText } from "../parts/long_text.js";
import { WorkerTable } from "../parts/worker_table.js";
import { el, setText } from "../text/dom.js";
import { clock, count, NONE, plural, seconds } from "../text/format.js";
import { plain, visible } from "../text/visible.js";

const TYPING_MS = 200;

export const workers = {
  id: "workers",
  title: "Workers",
  needs: ["workers_version", "worker_counts", "link"],
  mount(body, { run, actions }) {
    const search = el("input", { type: "search", id: "worker-filter", placeholder: "name, environment, state, reason", autocomplete: "off", spellcheck: "false", maxlength: 200 });
    const counts = el("span", { class: "quiet numbers" });
    body.append(el("p", { class: "pick" }, el("label", { for: "worker-filter", text: "Filter " }), search, " ", counts));
    const table = new WorkerTable(body, { ask: (query) => run.workers(query), open: (row) => showWorker(row, actions) });
    let timer = 0;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => table.setFilter(search.value.trim()), TYPING_MS);
    });
    return (store) => {
      const states = Object.entries(store.get("worker_counts", {})).map(([state, number]) => `${count(number)} ${plain(state, 20)}`);
      setText(counts, states.join(" · "));
      table.renew();
    };
  },
};

function showWorker(row, actions) {
  const { body, close } = openDialog(visible(row.worker), { wide: true });
  const facts = [
    ["Environment", row.env], ["State", row.state], ["Trouble", row.trouble || NONE], ["Reason", row.reason || NONE], ["Pid", row.pid || NONE],
    ["Age", row.age_s === null ? NONE : clock(row.age_s)], ["Rollouts in hand", count(row.in_hand)], ["Groups produced", count(row.produced)],
    ["Rollouts abandoned", count(row.abandoned)], ["Blocked", seconds(row.blocked_s)], ["Silent", seconds(row.silent_s)],
    ["Crashes in a row", count(row.crashes)], ["Restarts", count(row.restarts)],
    ["Next start", row.next_start_s === null || row.next_start_s === undefined ? NONE : `in ${clock(row.next_start_s)}`],
    ["Drain ends", row.ends_s === null || row.ends_s === undefined ? NONE : `in ${clock(row.ends_s)}`],
  ];
  const list = el("dl", { class: "facts" });
  for (const [name, value] of facts) list.append(el("dt", { text: name }), el("dd", {}, longText(value, { limit: 400 })));
  body.append(list);
  const lines = row.last_lines ?? [];
  body.append(el("h3", { text: "Last lines of its log" }));
  if (lines.length) {
    body.append(el("div", { class: "log", role: "region", tabindex: 0, "aria-label": `Last ${plural(lines.length, "line")} of the log` }, ...lines.map((line) => el("div", {}, longText(line, { limit: 1000 })))));
  } else {
    body.append(el("p", { class: "empty", text: "None are kept: lines of a failed worker show here." }));
  }
  const name = plain(row.worker, 80);
  const open = (spec) => {
    close();
    actions.confirm(spec);
  };
  const now = () => {
    const box = el("input", { type: "checkbox", id: "restart-now" });
    return { fields: [el("p", {}, box, el("label", { for: "restart-now", text: " At once, without draining" }))], body: () => ({ worker: row.worker, now: box.checked }) };
  };
  body.append(el("div", { class: "buttons" },
    actionButton(actions, "Drain …", `Drain ${name}`, () => open({ title: `Drain ${name}?`, text: "It finishes its rollouts, starts no new ones, and exits.", name: "drain", body: { worker: row.worker }, label: "Drain" })),
    actionButton(actions, "Restart …", `Restart ${name}`, () => open({ title: `Restart ${name}?`, text: "Another worker starts in its place.", name: "restart", ...now(), label: "Restart" }))));
}
