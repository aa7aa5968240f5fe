// Tables of some rows: kept by key, so that a renewed number moves nothing and no focus is lost.

import { el, reconcile, setAttribute } from "../text/dom.js";
import { visible } from "../text/visible.js";

/** A table. A column has `title`, `value(row)` for its text, and may have `number` (right aligned), `render(row)` for a
 * node instead, `wide` and `wider` (hidden on a narrow page), and `tone(row)` for a class. */
export class Table {
  constructor(parent, { caption, columns, key, none = "none" }) {
    this.columns = columns;
    this.key = key;
    this.body = el("tbody");
    const head = el("tr", {}, ...columns.map((column) => el("th", { scope: "col", class: classOf(column) }, column.title || el("span", { class: "sr-only", text: column.said ?? "as a bar" }))));
    this.none = el("p", { class: "empty", text: none, hidden: true });
    this.table = el("table", {}, el("caption", { class: "sr-only", text: caption }), el("thead", {}, head), this.body);
    this.box = el("div", { class: "table-box" }, this.table);
    parent.append(this.box, this.none);
    // A box that scrolls is a region that takes the focus, so that the arrow keys scroll it.
    new ResizeObserver(() => {
      const isCut = this.box.scrollWidth > this.box.clientWidth + 1;
      setAttribute(this.box, "tabindex", isCut ? 0 : null);
      setAttribute(this.box, "role", isCut ? "region" : null);
      setAttribute(this.box, "aria-label", isCut ? `${caption}, a table that scrolls` : null);
    }).observe(this.box);
  }

  draw(rows) {
    this.none.hidden = rows.length > 0;
    this.box.hidden = rows.length === 0;
    reconcile(this.body, rows, this.key, () => this._row(), (node, row) => this._renew(node, row));
  }

  _row() {
    const row = el("tr", {}, ...this.columns.map((column) =>
      el(column.head ? "th" : "td", { class: classOf(column), scope: column.head ? "row" : undefined })));
    row.shown = [];
    return row;
  }

  _renew(node, row) {
    this.columns.forEach((column, at) => {
      const cell = node.children[at];
      if (column.tone) setAttribute(cell, "class", `${classOf(column)} ${column.tone(row) ?? ""}`.trim());
      const text = column.value ? String(column.value(row) ?? "") : "";
      if (column.renew && cell.firstElementChild) {
        column.renew(cell.firstElementChild, row);
        return;
      }
      if (node.shown[at] === text && (cell.hasChildNodes() || !column.render)) return;
      node.shown[at] = text;
      cell.replaceChildren(column.render ? column.render(row) : column.number ? text : visible(text));
      if (column.renew) column.renew(cell.firstElementChild, row);
    });
  }
}

function classOf(column) {
  return [column.number ? "number" : "", column.wide ? "wide-only" : "", column.wider ? "wider-only" : "", column.mono ? "mono" : "", column.class ?? ""].filter(Boolean).join(" ");
}

/** Return a bar of a part from 0 to 1, for the eye beside its number. */
export function bar(part, tone = "") {
  const node = el("span", { class: `bar ${tone}`.trim(), "aria-hidden": "true" });
  node.style.setProperty("--part", String(Math.max(0, Math.min(1, part || 0))));
  return node;
}
