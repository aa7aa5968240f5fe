// Latencies by worker, host, engine or GPU: the slowest of each hop, asked for while they are shown.

import { el, setText, show } from "../text/dom.js";
import { count, NONE, plural, rate } from "../text/format.js";
import { duration, PERCENTILES, SLOWEST, TITLES } from "../text/latencies.js";
import { plain } from "../text/visible.js";
import { Table } from "./table.js";
import { drawWaterfall } from "./waterfall.js";

const ROWS = 50;
const BARS = 12;
const RENEW_MS = 2000;
const TYPING_MS = 200;
const HAS_STATUS = new Set(["call", "http"]);

export class PartLatencies {
  /** `ask(query)` returns a promise of the rows. `pick` holds the filter, `node` what is shown. */
  constructor({ ask }) {
    this.ask = ask;
    this.by = null;
    this.askedAt = -Infinity;
    this.generation = 0;
    this.isAsking = false;
    const filter = el("input", { type: "search", id: "latency-filter", placeholder: "part of the name", autocomplete: "off", spellcheck: "false", maxlength: 200 });
    this.filter = filter;
    this.pick = el("span", { class: "pick-part", hidden: true }, el("label", { for: "latency-filter", text: "Filter " }), filter);
    this.message = el("p", { class: "quiet", role: "status" });
    this.falls = el("div", { class: "waterfall named", role: "img" });
    const room = el("div");
    this.table = new Table(room, {
      caption: "Latency by part of the run", none: "None was measured.", key: (row) => [row.name, row.hop, row.split, row.status].join("\n"),
      columns: [
        { title: "Name", head: true, value: (row) => plain(row.name, 60) },
        { title: "Hop", value: hopOf },
        { title: "Status", wide: true, value: (row) => (HAS_STATUS.has(row.hop) ? row.status || "no answer" : NONE), tone: (row) => (!row.status || row.status.startsWith("2") ? "" : "warn") },
        ...PERCENTILES,
        { title: "Count", number: true, wide: true, value: (row) => count(row.count) },
        { title: "Rate", number: true, wide: true, value: (row) => rate(row.per_s) }, ...SLOWEST,
      ],
    });
    this.node = el("div", { hidden: true }, this.message, this.falls, room);
    let timer = 0;
    filter.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this._renew(), TYPING_MS);
    });
  }

  /** Show the rows by `by`; null hides them. */
  draw(by) {
    show(this.node, by !== null);
    show(this.pick, by !== null);
    const isOther = by !== this.by;
    this.by = by;
    if (by === null) return;
    if (isOther) {
      this.filter.value = "";
      this._renew();
    } else if (performance.now() - this.askedAt >= RENEW_MS && !this.isAsking) {
      this._renew();
    }
  }

  async _renew() {
    this.generation += 1;
    const { generation } = this;
    this.askedAt = performance.now();
    this.isAsking = true;
    let found = null;
    let problem = "";
    try {
      found = await this.ask({ by: this.by, filter: this.filter.value.trim(), limit: ROWS });
    } catch (error) {
      problem = error.message;
    }
    if (generation !== this.generation) return;
    this.isAsking = false;
    if (found === null) {
      setText(this.message, `The latencies cannot be read: ${plain(problem, 300)}`);
      return;
    }
    this._place(found);
  }

  _place({ rows, total, matching }) {
    const part = rows.length < matching ? `${count(rows.length)} of ${count(matching)} rows: the slowest of each hop` : `${plural(matching, "row")}, the slowest of each hop first`;
    setText(this.message, matching < total ? `${part}; ${count(total)} without the filter` : `${part}. Of the whole run.`);
    this.table.draw(rows);
    const bars = rows.slice(0, BARS).map((row) => ({ label: `${row.name} ${hopOf(row).toLowerCase()}`, row, from: 0 }));
    const text = rows.slice(0, BARS).map((row) => `${plain(row.name, 60)}, ${hopOf(row)}: median ${duration(row, row.p50_s)}, 99 of 100 within ${duration(row, row.p99_s)}`).join("; ");
    drawWaterfall(this.falls, bars, `The slowest. ${text}.`);
  }
}

function hopOf(row) {
  const title = TITLES[row.hop] ?? row.hop;
  return row.split === "eval" ? `${title} (eval)` : title;
}
