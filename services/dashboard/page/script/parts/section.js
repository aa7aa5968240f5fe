// Sections: each draws when what it needs has changed, at once if it is in view. The others follow every few seconds: a
// search of the page and a screen reader find them without scrolling.

import { el } from "../text/dom.js";

const MARGIN = "300px 0px";
const UNSEEN_MS = 5000;

/** Mount sections below each other. A section has `id`, `title`, `needs`, and `mount(body, context)`, which returns
 * the function that draws it. */
export function mountSections(root, sections, context) {
  const drawOf = new Map();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const one = drawOf.get(entry.target);
      one.isSeen = entry.isIntersecting;
      if (one.isSeen && one.isDue) one.draw();
    }
  }, { rootMargin: MARGIN });
  for (const section of sections) {
    const body = el("div", { class: "section-body" });
    const node = el("section", { id: section.id, "aria-labelledby": `${section.id}-title`, tabindex: -1 },
      el("h2", { id: `${section.id}-title`, text: section.title }), body);
    root.append(node);
    const render = section.mount(body, context);
    const one = { isSeen: false, isDue: true };
    one.draw = () => {
      one.isDue = false;
      render(context.store);
    };
    drawOf.set(node, one);
    context.store.subscribe(section.needs, () => {
      one.isDue = true;
      if (one.isSeen) one.draw();
    });
    observer.observe(node);
  }
  setInterval(() => {
    for (const one of drawOf.values()) if (one.isDue) one.draw();
  }, UNSEEN_MS);
}

/** Return a titled box within a section. */
export function panel(title, ...children) {
  return el("div", { class: "panel" }, el("h3", { text: title }), ...children);
}
