// Links to the sections, with the count of what wants attention, and the section in view marked.

import { el, setAttribute, setText, show } from "../text/dom.js";

export function mountNav(root, sections, { store }) {
  const list = el("ul");
  const links = new Map();
  for (const section of sections) {
    const note = el("span", { class: "nav-note", hidden: true });
    const link = el("a", { href: `#${section.id}` }, section.title, note);
    links.set(section.id, link);
    list.append(el("li", {}, link));
    if (!section.note) continue;
    const draw = () => {
      const text = section.note(store);
      setText(note, text ? ` ${text}` : "");
      show(note, Boolean(text));
    };
    store.subscribe(section.needs, draw);
  }
  root.append(list);

  // The last section whose top has passed the header is the one in view.
  let isPlanned = false;
  const mark = () => {
    isPlanned = false;
    let current = sections[0].id;
    for (const section of sections) {
      const top = document.getElementById(section.id).getBoundingClientRect().top;
      if (top <= 120) current = section.id;
    }
    const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 4;
    if (isAtEnd && scrollY > 0) current = sections.at(-1).id;
    for (const [id, link] of links) setAttribute(link, "aria-current", id === current ? "true" : null);
  };
  const plan = () => {
    if (!isPlanned) requestAnimationFrame(mark);
    isPlanned = true;
  };
  addEventListener("scroll", plan, { passive: true });
  addEventListener("resize", plan);
  mark();
}
