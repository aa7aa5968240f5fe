// Dialogs over the page: for what takes room, and for what wants a confirmation. The browser keeps the focus inside and
// returns it; Escape closes.

import { el } from "../text/dom.js";

let number = 0;

/** Open a dialog and return it. It is removed once closed. */
export function openDialog(title, { wide = false } = {}) {
  number += 1;
  const id = `dialog-${number}`;
  const body = el("div", { class: "dialog-body" });
  const close = el("button", { type: "button", class: "small", text: "Close" });
  const node = el("dialog", { class: wide ? "wide" : "", "aria-labelledby": id },
    el("div", { class: "dialog-head" }, el("h2", { id }, title), close), body);
  close.addEventListener("click", () => node.close());
  node.addEventListener("click", (event) => {
    if (event.target === node) node.close(); // the backdrop
  });
  node.addEventListener("close", () => node.remove());
  document.body.append(node);
  node.showModal();
  return { node, body, close: () => node.close() };
}
