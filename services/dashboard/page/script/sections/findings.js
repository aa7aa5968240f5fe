// Findings about the rewards, each with what to do.

import { el } from "../text/dom.js";
import { moment, plural } from "../text/format.js";
import { longText } from "../parts/long_text.js";
import { Table } from "../parts/table.js";

const lasting = (store) => store.list("findings").filter((one) => one.finding !== "solved");

export const findings = {
  id: "findings",
  title: "Findings",
  needs: ["findings"],
  note: (store) => {
    const found = lasting(store).length;
    return found ? String(found) : "";
  },
  mount(body) {
    const table = new Table(body, {
      caption: "Findings about rewards",
      none: "No finding: rewards look healthy, or no batch has shown anything yet.",
      key: (row) => `${row.env}\n${row.finding}\n${row.at}`,
      columns: [
        { title: "Since", wide: true, value: (row) => moment(row.at), class: "numbers nowrap" },
        { title: "Environment", head: true, value: (row) => row.env, render: (row) => longText(row.env, { limit: 60 }) },
        { title: "Finding", class: "reason", value: (row) => row.problem, render: (row) => longText(row.problem, { limit: 300 }), tone: (row) => (row.finding === "solved" ? "good" : "warn") },
        { title: "What to do", class: "reason", value: (row) => row.remedy, render: (row) => longText(row.remedy, { limit: 300 }) },
      ],
    });
    body.append(el("p", { class: "sr-only", role: "status" }));
    const said = body.lastElementChild;
    return (store) => {
      table.draw(store.list("findings"));
      const text = lasting(store).length ? plural(lasting(store).length, "finding") : "";
      if (said.textContent !== text) said.textContent = text;
    };
  },
};
