// A text of any length: a first part, and a button for each further part. A megabyte in one node would halt the page.

import { el } from "../text/dom.js";
import { count } from "../text/format.js";
import { head, visible } from "../text/visible.js";

const FURTHER = 8000;

/** Return an element with the first `limit` units of a text and, if there is more, a button that adds the next part.
 * `total` is the length of the whole text where the server has cut it. */
export function longText(value, { limit = 160, lines = false, total = undefined } = {}) {
  const text = String(value ?? "");
  const size = Math.max(total ?? 0, text.length);
  if (size <= limit) return visible(text, { lines });
  const shown = el("span", { class: lines ? "long-text lines" : "long-text" });
  const more = el("button", { type: "button", class: "link" });
  let at = 0;
  const add = (step) => {
    const part = head(text.slice(at), step);
    shown.insertBefore(visible(part, { lines }), more.isConnected || more.parentNode ? more : null);
    at += part.length;
    const left = text.length - at;
    if (left <= 0) {
      more.remove();
      if (size > text.length) shown.append(el("span", { class: "quiet", text: ` … ${count(size - text.length)} more characters are not shown` }));
      return;
    }
    more.textContent = `… ${count(left)} more characters`;
    more.setAttribute("aria-label", `Show more of this text, ${count(left)} characters left`);
  };
  shown.append(more);
  more.addEventListener("click", (event) => {
    event.stopPropagation();
    add(FURTHER);
  });
  add(limit);
  return shown;
}
