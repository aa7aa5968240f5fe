// Live settings: their values against the configuration, the order to change one, and what was sent from this page.

import { actionButton, renewButton } from "../parts/actions.js";
import { panel } from "../parts/section.js";
import { Table } from "../parts/table.js";
import { el, setText, show } from "../text/dom.js";
import { plain } from "../text/visible.js";

/** Return a typed text as the value that `rolloutmq set` would send: a number, true or false, else the text. */
function valueOf(text) {
  const trimmed = text.trim();
  if (trimmed === "") throw new Error("The value is empty.");
  if (trimmed === "true" || trimmed === "false") return trimmed === "true";
  return /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(trimmed) ? Number(trimmed) : trimmed;
}

export const settings = {
  id: "settings",
  title: "Settings and actions",
  needs: ["settings", "run", "link"],
  mount(body, { actions, run }) {
    const grid = el("div", { class: "grid" });
    const refusal = el("p", { class: "quiet" });
    const room = el("div");
    const table = new Table(room, {
      caption: "Live settings", none: "No live setting is known.", key: (row) => row.key,
      columns: [
        { title: "Key", head: true, mono: true, value: (row) => row.key },
        { title: "Now", number: true, value: (row) => plain(row.now, 60), tone: (row) => (row.now !== row.configured ? "warn" : "") },
        { title: "Configured", number: true, wide: true, value: (row) => plain(row.configured, 60) },
        { title: "Action", class: "action-cell", value: () => "", render: (row) => {
          const button = actionButton(actions, "Set …", `Set ${plain(row.key, 80)}`, () => change(actions, button.row));
          return button;
        }, renew: (button, row) => {
          button.row = row;
          renewButton(button, actions);
        } },
      ],
    });
    const other = actionButton(actions, "Set another key …", "Set another key", () => change(actions, null));
    grid.append(panel("Live settings", refusal, room, el("div", { class: "buttons" }, other)));
    if (run.isLive) grid.append(panel("Sent from this page", actions.mountLog()));
    body.append(grid);
    return (store) => {
      table.draw(store.list("settings"));
      renewButton(other, actions);
      setText(refusal, actions.isOpen ? "" : actions.whyNot);
      show(refusal, !actions.isOpen);
    };
  },
};

function change(actions, row) {
  const key = el("input", { type: "text", id: "set-key", value: row?.key ?? "", maxlength: 256, autocomplete: "off", spellcheck: "false", readonly: row !== null });
  const value = el("input", { type: "text", id: "set-value", value: row === null ? "" : String(row.now), maxlength: 256, autocomplete: "off", spellcheck: "false" });
  actions.confirm({
    title: row === null ? "Set a live setting" : `Set ${plain(row.key, 80)}`,
    text: "The change applies at once and survives a restart of the broker.",
    fields: [el("p", {}, el("label", { for: "set-key", text: "Key " }), key), el("p", {}, el("label", { for: "set-value", text: "Value " }), value)],
    name: "set", label: "Set",
    body: () => {
      if (!key.value.trim()) throw new Error("The key is empty.");
      return { values: { [key.value.trim()]: valueOf(value.value) } };
    },
  });
}
