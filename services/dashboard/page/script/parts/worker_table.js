// Thousands of workers in a table: only the rows in view exist, and only their window is asked for.
//
// All rows are equally high, so a row above and one below stand for those that do not exist. Windows that were seen stay
// until the run's workers change, so that scrolling back shows them at once.

import { el, setAttribute, setText } from "../text/dom.js";
import { count, NONE, seconds, stopwatch } from "../text/format.js";
import { plain } from "../text/visible.js";

const ROW_PX = 28;
const PAGE = 100;
const BEYOND = 12;
const MOST_PX = 460;

const COLUMNS = [
  { name: "worker", title: "Worker", class: "w-name", text: (row) => plain(row.worker, 80) },
  { name: "env", title: "Environment", class: "w-env wide-only", text: (row) => plain(row.env, 60) },
  { name: "state", title: "State", class: "w-state", text: (row) => plain(row.state, 20) },
  { name: "in_hand", title: "In hand", class: "number", text: (row) => count(row.in_hand) },
  { name: "produced", title: "Produced", class: "number", text: (row) => count(row.produced) },
  { name: "abandoned", title: "Abandoned", class: "number wide-only wider-only", text: (row) => count(row.abandoned) },
  { name: "blocked_s", title: "Blocked", class: "number wide-only", text: (row) => seconds(row.blocked_s) },
  { name: "silent_s", title: "Silent", class: "number wide-only", text: (row) => (row.silent_s === null ? NONE : `${row.silent_s.toFixed(1)} s`) },
  { name: "age_s", title: "Age", class: "number wide-only", text: (row) => (row.age_s === null ? NONE : stopwatch(row.age_s)) },
  { name: "restarts", title: "Restarts", class: "number wide-only wider-only", text: (row) => count(row.restarts) },
  { name: "pid", title: "Pid", class: "number wide-only wider-only", text: (row) => (row.pid ? String(row.pid) : NONE) },
  { name: "reason", title: "Trouble", class: "w-reason wide-only", isFixed: true, text: (row) => plain(row.trouble || row.reason, 300) },
];

export class WorkerTable {
  /** `ask(query)` returns a promise of a window; `open(row)` shows one worker. */
  constructor(parent, { ask, open }) {
    this.ask = ask;
    this.open = open;
    this.sort = "worker";
    this.order = "asc";
    this.filter = "";
    this.total = 0;
    this.matching = 0;
    this.pages = new Map();
    this.stale = new Set();
    this.asked = new Set();
    this.generation = 0;
    this.message = el("p", { class: "quiet", role: "status" });
    this.head = el("tr", { "aria-rowindex": 1 });
    this.above = el("tr", { class: "spacer", "aria-hidden": "true" }, el("td"));
    this.below = el("tr", { class: "spacer", "aria-hidden": "true" }, el("td"));
    this.body = el("tbody", {}, this.above, this.below);
    this.table = el("table", { class: "workers" }, el("caption", { class: "sr-only", text: "Workers" }), el("thead", {}, this.head), this.body);
    this.box = el("div", { class: "worker-box", role: "region", tabindex: 0, "aria-label": "Workers, a list that scrolls" }, this.table);
    this.rows = [];
    this._headers();
    parent.append(this.message, this.box);
    let isPlanned = false;
    this.box.addEventListener("scroll", () => {
      if (isPlanned) return;
      isPlanned = true;
      requestAnimationFrame(() => {
        isPlanned = false;
        this.draw();
      });
    }, { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  setFilter(text) {
    this.filter = text;
    this._restart();
  }

  /** The workers have changed: ask again for what is in view. */
  renew() {
    for (const page of this.pages.keys()) this.stale.add(page);
    this.draw();
  }

  _restart() {
    this.generation += 1;
    this.pages.clear();
    this.stale.clear();
    this.asked.clear();
    this.box.scrollTop = 0;
    this.draw();
  }

  _headers() {
    this.head.replaceChildren(...COLUMNS.map((column) => {
      if (column.isFixed) return el("th", { scope: "col", class: column.class, text: column.title });
      const button = el("button", { type: "button", class: "sort", text: column.title });
      button.addEventListener("click", () => {
        const isSame = this.sort === column.name;
        this.order = isSame && this.order === "asc" ? "desc" : "asc";
        this.sort = column.name;
        this._markSort();
        this._restart();
      });
      return el("th", { scope: "col", class: column.class, data: { column: column.name } }, button);
    }));
    this._markSort();
  }

  _markSort() {
    for (const cell of this.head.children) {
      const isSorted = cell.dataset.column === this.sort;
      setAttribute(cell, "aria-sort", isSorted ? (this.order === "asc" ? "ascending" : "descending") : null);
    }
  }

  async _fetch(page) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const { generation } = this;
    try {
      const found = await this.ask({ sort: this.sort, order: this.order, filter: this.filter, offset: page * PAGE, limit: PAGE });
      if (generation !== this.generation) return;
      this.pages.set(page, found.rows ?? []);
      this.total = found.total ?? 0;
      this.matching = found.matching ?? 0;
      this.problem = "";
    } catch (error) {
      if (generation !== this.generation) return;
      this.problem = error.message;
    } finally {
      if (generation === this.generation) {
        this.asked.delete(page);
        this.stale.delete(page);
      }
    }
    if (generation === this.generation) this._place(false);
  }

  draw() {
    this._place(true);
  }

  _place(mayAsk) {
    const known = Math.max(this.matching, 0);
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_PX) - BEYOND);
    const last = Math.min(known, first + Math.ceil(Math.max(MOST_PX, this.box.clientHeight) / ROW_PX) + 2 * BEYOND);
    if (mayAsk) {
      const pages = new Set([Math.floor(first / PAGE), Math.floor(Math.max(first, last - 1) / PAGE)]);
      for (const page of pages) if (!this.pages.has(page) || this.stale.has(page)) this._fetch(page);
    }
    this._resize(last - first);
    // No higher than its rows: few workers leave no hole in the page.
    this.box.style.setProperty("--rows", String(Math.min(known, 1000)));
    this.above.firstChild.style.height = `${first * ROW_PX}px`;
    this.below.firstChild.style.height = `${Math.max(0, known - last) * ROW_PX}px`;
    setAttribute(this.table, "aria-rowcount", known + 1);
    for (let at = first; at < last; at += 1) this._fill(this.rows[at - first], this.pages.get(Math.floor(at / PAGE))?.[at % PAGE], at);
    const part = this.filter ? `${count(known)} of ${count(this.total)} workers match` : `${count(this.total)} workers`;
    setText(this.message, this.problem ? `The workers cannot be read: ${plain(this.problem, 300)}` : part);
  }

  _resize(wanted) {
    while (this.rows.length > wanted) this.rows.pop().remove();
    while (this.rows.length < wanted) {
      const row = el("tr", {});
      row.append(...COLUMNS.map((column, at) => el(at === 0 ? "th" : "td", { class: column.class, scope: at === 0 ? "row" : undefined })));
      const name = el("button", { type: "button", class: "link" });
      name.addEventListener("click", () => row.worker && this.open(row.worker));
      row.firstChild.append(name);
      row.shown = [];
      this.body.insertBefore(row, this.below);
      this.rows.push(row);
    }
  }

  _fill(node, row, at) {
    node.worker = row;
    setAttribute(node, "aria-rowindex", at + 2);
    setAttribute(node, "class", row?.unwell ? "unwell" : null);
    COLUMNS.forEach((column, index) => {
      const text = row ? column.text(row) : "…";
      if (node.shown[index] === text) return;
      node.shown[index] = text;
      if (index === 0) setText(node.firstChild.firstChild, text);
      else setText(node.children[index], text);
      if (column.name === "state") setAttribute(node.children[index], "data-state", row?.state ? plain(row.state, 20) : "");
      if (column.name === "reason") setAttribute(node.children[index], "title", text || null);
    });
  }
}
