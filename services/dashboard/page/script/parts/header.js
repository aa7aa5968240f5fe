// The line above everything: which run, whether its numbers are fresh, how far it is, and the switches of the page.

import { LINK } from "../data/store.js";
import { el, setAttribute, setText, show } from "../text/dom.js";
import { clock, count, percent, rate } from "../text/format.js";
import { plain } from "../text/visible.js";
import { SPANS, view } from "./view.js";
import { currentTheme, setTheme, THEMES } from "./theme.js";

const LIVES = { ended: "finished", dead: "launcher killed", absent: "not running", removed: "directory removed" };

/** Return what the badge says: a kind for its colour, a word, and a sentence. */
function standing(store) {
  const { kind, text } = store.link;
  const run = store.get("run", {});
  if (kind === LINK.STORED) return { tone: "quiet", word: "report", sentence: [text, run.ended ? `The run has ended: ${run.ended}.` : run.text].filter(Boolean).join(" ") };
  if (kind === LINK.SIGNED_OUT) {
    return { tone: "bad", word: "signed out", sentence: `Open the link that \`rolloutmq dashboard\` printed: ${text}.` };
  }
  if (kind === LINK.OVER) return { tone: "done", word: LIVES.ended, sentence: text };
  if (kind === LINK.CONNECTING) return { tone: "quiet", word: "connecting", sentence: "" };
  if (kind === LINK.LOST) return { tone: "bad", word: "disconnected", sentence: `Values are old: ${text}.` };
  if (kind === LINK.STALE) return { tone: "warn", word: "stale", sentence: `Values are old: ${text}.` };
  const loaded = store.get("record", {}).loaded ?? 1;
  if (loaded < 1) return { tone: "quiet", word: "reading", sentence: `The record of the run is being read: ${percent(loaded)}.` };
  if (run.life in LIVES) {
    const why = run.life === "ended" && run.ended ? `The run has ended: ${run.ended}.` : run.text || store.ended || "";
    return { tone: run.life === "ended" ? "done" : "bad", word: LIVES[run.life], sentence: why };
  }
  if (run.silent_s > 0) return { tone: "warn", word: "stale", sentence: `The broker has been silent for ${clock(run.silent_s)}.` };
  return { tone: "good", word: "live", sentence: "" };
}

export function mountHeader(root, { store, run }) {
  const name = el("h1", { class: "run-name" });
  const badge = el("span", { class: "badge" });
  const age = el("span", { class: "quiet age" });
  const bar = el("progress", { class: "steps", max: 1, value: 0, "aria-label": "Optimizer steps" });
  const steps = el("span", { class: "numbers" });
  const spans = el("select", { "aria-label": "Time span of the charts" },
    ...SPANS.map(([value, label]) => el("option", { value, text: label })));
  spans.value = view.span;
  spans.addEventListener("change", () => view.setSpan(spans.value));
  const zoom = el("button", { type: "button", class: "small", text: "Reset zoom", hidden: true, on: { click: () => view.setZoom(null) } });
  view.listen(() => {
    show(zoom, view.zoom !== null);
    spans.value = view.span;
  });
  const theme = el("select", { "aria-label": "Colours" }, ...THEMES.map(([value, label]) => el("option", { value, text: label })));
  theme.value = currentTheme();
  theme.addEventListener("change", () => setTheme(theme.value));
  const sentence = el("p", { class: "notice-line", role: "status", hidden: true });

  root.append(
    el("div", { class: "header-line" },
      el("span", { class: "brand", text: "RolloutMQ" }), name, badge, age,
      el("span", { class: "progress" }, bar, steps),
      el("span", { class: "controls" }, zoom, spans, theme)),
    sentence);

  const draw = () => {
    const state = store.get("run", {});
    const title = plain(state.name ?? "", 80);
    setText(name, title || "…");
    setAttribute(name, "title", plain(state.dir ?? "", 400));
    const now = standing(store);
    setText(badge, now.word);
    setAttribute(badge, "class", `badge ${now.tone}`);
    document.title = title ? `${title} · ${now.word}` : "RolloutMQ";
    setText(sentence, plain(now.sentence, 600));
    show(sentence, now.sentence !== "");
    setAttribute(sentence, "class", `notice-line ${now.tone}`);
    setAttribute(document.body, "data-link", store.link.kind);
    const total = state.total_steps;
    show(bar, Boolean(total));
    if (total) bar.value = Math.min(1, (state.step ?? 0) / total);
    const parts = [total ? `step ${count(state.step)} of ${count(total)}` : `step ${count(state.step)}`];
    const isLiving = state.life === "living" && store.link.kind !== LINK.OVER;
    if (isLiving && state.steps_per_s) parts.push(rate(state.steps_per_s, state.steps_per_s === 1 ? "step" : "steps"));
    if (state.ran_s !== null && state.ran_s !== undefined) parts.push(clock(state.ran_s));
    if (isLiving && state.left_s !== null && state.left_s !== undefined) parts.push(`${clock(state.left_s)} left`);
    setText(steps, "step" in state ? parts.join("  ·  ") : "");
  };
  store.subscribe(["run", "record", "link"], draw);
  draw();

  // The age of what is shown, once it is old: also when nothing arrives that could draw.
  if (run.isLive) {
    setInterval(() => {
      const seconds = store.heardAt ? Date.now() / 1000 - store.heardAt : 0;
      const isOld = store.link.kind !== LINK.LIVE && store.heardAt > 0;
      setText(age, isOld ? `last heard ${clock(seconds)} ago` : "");
    }, 1000);
  }
}

