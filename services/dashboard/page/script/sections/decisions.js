// The decisions of the orchestrator in words, newest first.

import { longText } from "../parts/long_text.js";
import { Table } from "../parts/table.js";
import { moment } from "../text/format.js";

export const decisions = {
  id: "decisions",
  title: "Decisions",
  needs: ["decisions"],
  mount(body) {
    const table = new Table(body, {
      caption: "Decisions, newest first", none: "Nothing was decided yet.", key: (row) => `${row.at}\n${row.env}\n${row.text}`,
      columns: [
        { title: "At", class: "numbers nowrap", value: (row) => moment(row.at) },
        { title: "Of", head: true, value: (row) => row.env, render: (row) => longText(row.env, { limit: 40 }) },
        { title: "Decision", class: "reason", value: (row) => row.text, render: (row) => longText(row.text, { limit: 240 }) },
      ],
    });
    return (store) => table.draw([...store.list("decisions")].sort((left, right) => right.at - left.at));
  },
};
