// The ledger: every accepted group in one state, and that the states add up.

import { panel } from "../parts/section.js";
import { bar, Table } from "../parts/table.js";
import { el, setAttribute, setText } from "../text/dom.js";
import { count, percent } from "../text/format.js";

const STATES = [
  ["queued", "waits in a queue"], ["leased", "in a trainer's hands"], ["trained", "trained on, not yet covered by a checkpoint"],
  ["committed", "covered by a checkpoint"], ["filtered", "left out of training by a rule"], ["expired", "too stale to train on"],
  ["dead", "kept as a dead letter"], ["discarded", "dropped by an order"],
];
const BESIDE = [["rewound", "delivered again after a resume"], ["lost_before_accept", "lost by a producer before acceptance"]];

export const ledger = {
  id: "ledger",
  title: "Ledger",
  needs: ["ledger", "by_split"],
  mount(body) {
    const grid = el("div", { class: "grid" });
    const room = el("div");
    const sum = el("p", { class: "numbers" });
    const table = new Table(room, {
      caption: "Accepted groups by state", none: "No group was accepted yet.", key: (row) => row.name,
      columns: [
        { title: "State", head: true, value: (row) => row.name.replaceAll("_", " ") },
        { title: "Groups", number: true, value: (row) => count(row.groups) },
        { title: "Share", number: true, value: (row) => (row.isBeside ? "" : percent(row.part, 1)) },
        { title: "", class: "bar-cell", value: (row) => row.part.toFixed(3), render: (row) => bar(row.part) },
        { title: "", said: "meaning", wide: true, class: "quiet", value: (row) => row.text },
      ],
    });
    const reasonRoom = el("div");
    const reasons = new Table(reasonRoom, {
      caption: "Groups by state and reason", none: "No group left by a rule.", key: (row) => row.name,
      columns: [{ title: "State and reason", head: true, value: (row) => row.name, mono: true }, { title: "Groups", number: true, value: (row) => count(row.groups) }],
    });
    const splitRoom = el("div");
    const splits = new Table(splitRoom, {
      caption: "By split", key: (row) => row.split,
      columns: [{ title: "Split", head: true, value: (row) => row.split }, { title: "Groups", number: true, value: (row) => count(row.groups) }, { title: "Sequences", number: true, value: (row) => count(row.sequences) }],
    });
    grid.append(panel("Accepted groups", sum, room), panel("Reasons and splits", reasonRoom, splitRoom));
    body.append(grid);
    return (store) => {
      const counts = store.get("ledger", {});
      const accepted = counts.accepted ?? 0;
      const total = STATES.reduce((all, [name]) => all + (counts[name] ?? 0), 0);
      const isEven = total === accepted;
      setText(sum, isEven ? `${count(accepted)} accepted = the sum of all states.` : `${count(accepted)} accepted, but the states add up to ${count(total)}.`);
      setAttribute(sum, "class", isEven ? "numbers" : "numbers bad");
      const rows = STATES.map(([name, text]) => ({ name, text, groups: counts[name] ?? 0, part: accepted ? (counts[name] ?? 0) / accepted : 0 }));
      for (const [name, text] of BESIDE) if (counts[name]) rows.push({ name, text, groups: counts[name], part: 0, isBeside: true });
      table.draw(accepted ? rows : []);
      reasons.draw(Object.entries(counts.reasons ?? {}).sort(([, left], [, right]) => right - left).map(([name, groups]) => ({ name, groups })));
      splits.draw(store.list("by_split"));
    };
  },
};
