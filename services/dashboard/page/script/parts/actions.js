// Actions on the run: each is confirmed first, and its answer or its error is shown as the run gave it.

import { el, reconcile, setText } from "../text/dom.js";
import { moment } from "../text/format.js";
import { plain, visible } from "../text/visible.js";
import { openDialog } from "./dialog.js";

const KEPT = 20;

export class Actions {
  constructor(store, run) {
    this.store = store;
    this.run = run;
    this.log = [];
  }

  /** Return whether the run takes actions now. */
  get isOpen() {
    const run = this.store.get("run", {});
    return this.run.isLive && run.read_only === false;
  }

  /** Return why it takes none. */
  get whyNot() {
    if (!this.run.isLive) return "A report takes no actions.";
    return plain(this.store.get("run", {}).read_only_why || "The run takes no actions now.", 300);
  }

  /** Ask for a confirmation, then send an action. `body` is an object, or a function that reads the form `fields`. */
  confirm({ title, text, name, body, fields = [], label = "Confirm" }) {
    const { body: room, close } = openDialog(title);
    const answer = el("div", { class: "answer", role: "status" });
    const send = el("button", { type: "submit", class: "primary", text: label });
    const cancel = el("button", { type: "button", text: "Cancel", on: { click: close } });
    const form = el("form", {}, el("p", {}, text), ...fields, el("div", { class: "buttons" }, send, cancel), answer);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      let wanted;
      try {
        wanted = typeof body === "function" ? body() : body;
      } catch (error) {
        answer.replaceChildren(el("p", { class: "bad", text: error.message }));
        return;
      }
      send.disabled = true;
      setText(answer, "Waiting for the answer …");
      const result = await this._send(name, wanted);
      answer.replaceChildren(...result.lines.map((line) =>
        el("p", { class: result.tone }, visible(line))));
      setText(cancel, "Close");
      cancel.focus();
      if (result.tone === "bad") send.disabled = false;
      else send.remove();
    });
    room.append(form);
    (fields.length ? form.querySelector("input, select, textarea") : send)?.focus();
  }

  async _send(name, body) {
    let tone = "good";
    let lines;
    try {
      const answer = await this.run.act(name, body);
      lines = (answer.text ?? []).map(String);
      if (!answer.ok) tone = answer.code === 6 ? "warn" : "bad";
      if (!lines.length) lines = [answer.ok ? "done" : `refused, code ${answer.code}`];
    } catch (error) {
      tone = "bad";
      lines = [`error: ${error.message}`];
    }
    this.log.unshift({ at: Date.now() / 1000, name, body: JSON.stringify(body), tone, lines });
    this.log.length = Math.min(this.log.length, KEPT);
    this.store.touch("actions");
    return { tone, lines };
  }

  /** Return a list of what was sent from this page. */
  mountLog() {
    const list = el("ul", { class: "action-log" });
    const draw = () => reconcile(list, this.log, (one) => `${one.at}${one.name}${one.body}`, (one) =>
      el("li", {}, el("span", { class: "quiet numbers", text: `${moment(one.at)} ` }), el("code", {}, visible(`${one.name} ${plain(one.body, 120)}`)), " ",
        el("span", { class: one.tone }, visible(plain(one.lines.join(" · "), 400)))), () => {});
    this.store.subscribe(["actions"], draw);
    draw();
    return list;
  }
}

/** Return a button that is disabled, and says why, while the run takes no actions. */
export function actionButton(actions, text, label, open) {
  const button = el("button", { type: "button", class: "small", text, "aria-label": label });
  button.addEventListener("click", (event) => {
    event.stopPropagation();
    if (actions.isOpen) open();
  });
  renewButton(button, actions);
  return button;
}

/** Enable or disable a button by what the run takes now. */
export function renewButton(button, actions) {
  const isOpen = actions.isOpen;
  if (button.disabled === isOpen) button.disabled = !isOpen;
  const why = isOpen ? "" : actions.whyNot;
  if (button.title !== why) button.title = why;
}
