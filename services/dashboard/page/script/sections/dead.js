// Dead letters: the list, the contents of one as text with its mask in colours, and the order to queue them again.

import { actionButton, renewButton } from "../parts/actions.js";
import { openDialog } from "../parts/dialog.js";
import { longText } from "../parts/long_text.js";
import { Table } from "../parts/table.js";
import { el, setText, show } from "../text/dom.js";
import { bytes, count, figure, moment, NONE, plural } from "../text/format.js";
import { plain, visible } from "../text/visible.js";

const PAGE = 50;
const SEQUENCES = 4;

export const dead = {
  id: "dead",
  title: "Dead letters",
  needs: ["dead", "link", "run"],
  note: (store) => (store.get("dead", {}).count ? count(store.get("dead").count) : ""),
  mount(body, { run, actions }) {
    const message = el("p", { class: "quiet", role: "status" });
    const all = actionButton(actions, "Requeue all …", "Requeue all dead groups", () => actions.confirm({
      title: "Queue all dead groups again?", text: "Each starts with a delivery count of zero. Groups that cannot be queued stay dead, with the reason.", name: "requeue", body: { all: true }, label: "Requeue all" }));
    const table = letters(body, run, actions);
    const more = el("button", { type: "button", text: "Older ones" });
    const fewer = el("button", { type: "button", text: "Newer ones" });
    body.prepend(message);
    body.append(el("div", { class: "buttons" }, fewer, more, all));
    let offset = 0;
    let shown = null;
    const load = async (store) => {
      const wanted = `${store.get("dead", {}).count}\n${store.link.kind}\n${offset}`;
      if (shown === wanted) return;
      shown = wanted;
      try {
        const found = await run.deadList(offset, PAGE);
        table.draw(found.rows ?? []);
        setText(message, found.total ? `${plural(found.total, "dead group")}${found.total > PAGE ? `, ${count(offset + 1)} to ${count(Math.min(found.total, offset + PAGE))} shown` : ""}` : "");
        show(more, offset + PAGE < found.total);
        show(fewer, offset > 0);
        show(all, found.total > 0);
      } catch (error) {
        shown = null;
        setText(message, `The dead letters cannot be read: ${plain(error.message, 300)}`);
      }
    };
    let last = null;
    const turn = (step) => {
      offset = Math.max(0, offset + step);
      load(last);
    };
    more.addEventListener("click", () => turn(PAGE));
    fewer.addEventListener("click", () => turn(-PAGE));
    show(more, false);
    show(fewer, false);
    show(all, false);
    return (store) => {
      last = store;
      renewButton(all, actions);
      for (const row of table.body.rows) for (const button of row.querySelectorAll("button.small")) renewButton(button, actions);
      load(store);
    };
  },
};

function letters(body, run, actions) {
  return new Table(body, {
    caption: "Dead letters, newest first", none: "No group is dead.", key: (row) => `${row.order}\n${row.group_id ?? row.file}`,
    columns: [
      { title: "Since", wide: true, class: "numbers nowrap", value: (row) => moment(row.at) },
      { title: "Group", head: true, mono: true, value: (row) => row.group_id ?? row.file, render: (row) => groupLink(row, run, actions) },
      { title: "Environment", wide: true, value: (row) => row.env ?? NONE, render: (row) => longText(row.env ?? NONE, { limit: 40 }) },
      { title: "Reason", class: "reason", value: (row) => row.damaged || row.reason, render: (row) => longText(row.damaged ? `damaged: ${row.damaged}` : row.reason, { limit: 160 }), tone: (row) => (row.damaged ? "bad" : "") },
      { title: "Sequences", number: true, wide: true, value: (row) => count(row.sequences) },
      { title: "Size", number: true, wide: true, value: (row) => (row.kept === false ? "not kept" : bytes(row.bytes)) },
      { title: "Deliveries", number: true, wide: true, value: (row) => count(row.deliveries) },
      { title: "Action", class: "action-cell", value: () => "", render: (row) => (row.damaged ? el("span") : actionButton(actions, "Requeue …", `Requeue ${plain(row.group_id, 60)}`, () => requeue(actions, row.group_id))) },
    ],
  });
}

function groupLink(row, run, actions) {
  if (!row.group_id) return longText(row.file, { limit: 40 });
  const link = el("button", { type: "button", class: "link mono", "aria-label": `Contents of ${plain(row.group_id, 60)}` }, visible(plain(row.group_id, 40)));
  link.addEventListener("click", () => showGroup(row, run, actions));
  return link;
}

function requeue(actions, id) {
  actions.confirm({ title: `Queue ${plain(id, 60)} again?`, text: "It starts with a delivery count of zero.", name: "requeue", body: { groups: [id] }, label: "Requeue" });
}

async function showGroup(row, run, actions) {
  const id = row.group_id;
  const { body, close, node } = openDialog(visible(plain(id, 80)), { wide: true });
  const state = el("p", { class: "quiet", role: "status", text: "Reading …" });
  const facts = el("dl", { class: "facts" });
  const list = el("div", { class: "sequences" });
  const more = el("button", { type: "button", text: "Further sequences", hidden: true });
  const rest = el("div");
  body.append(state, facts, list, el("div", { class: "buttons" }, more,
    actionButton(actions, "Requeue …", `Requeue ${plain(id, 60)}`, () => {
      close();
      requeue(actions, id);
    })), rest);
  let next = 0;
  const load = async () => {
    let found;
    try {
      found = await run.deadGroup(row, next, SEQUENCES);
    } catch (error) {
      setText(state, plain(error.message, 400));
      state.className = "bad";
      return;
    }
    if (!node.isConnected) return;
    if (next === 0) {
      drawFacts(facts, found);
      drawRest(rest, found);
    }
    setText(state, plain(found.problem ?? "", 400));
    for (const one of found.sequences ?? []) {
      list.append(sequence(one));
      next = one.index + 1;
    }
    show(more, (found.sequences ?? []).length > 0 && next < found.sequences_total && run.isLive);
    setText(more, `Further sequences (${count(found.sequences_total - next)} left)`);
  };
  more.addEventListener("click", load);
  await load();
}

function drawFacts(list, found) {
  const facts = [["Environment", found.env], ["Split", found.split], ["Producer", found.producer], ["Reason", found.reason], ["Dead since", moment(found.at)],
    ["Deliveries", `${count(found.deliveries)}, ${count(found.failures)} failed`], ["Sequences", count(found.sequences_total)], ["Text by", found.tokenizer]];
  for (const [name, value] of facts) list.append(el("dt", { text: name }), el("dd", {}, longText(value ?? NONE, { limit: 300 })));
  list.after(el("p", { class: "mask-key" }, el("span", { class: "piece trained", text: "trained on (mask 1)" }), " ", el("span", { class: "piece", text: "context (mask 0)" })));
}

function sequence(one) {
  const head = [`Sequence ${count(one.index)}`, `score ${figure(one.score, 4)}`, `advantage ${figure(one.advantage, 4)}`, plural(one.tokens_total ?? 0, "token")];
  const text = el("div", { class: "trajectory", role: "region", tabindex: 0, "aria-label": `Text of sequence ${one.index}` }, ...(one.pieces ?? []).map(piece));
  if (one.cut) text.append(el("span", { class: "quiet", text: " … further tokens are not shown" }));
  return el("article", { class: "sequence", "aria-label": `Sequence ${one.index}` }, el("h3", { class: "numbers", text: head.join("  ·  ") }), text);
}

function piece(one) {
  const shown = one.text || (one.ids ?? []).join(" ");
  const notes = [plural(one.tokens ?? 0, "token")];
  if (one.logprob_mean !== null && one.logprob_mean !== undefined) notes.push(`mean log-probability ${figure(one.logprob_mean)}`);
  if (one.advantage_mean !== null && one.advantage_mean !== undefined) notes.push(`mean advantage ${figure(one.advantage_mean)}`);
  const node = el("span", { class: one.trained ? "piece trained" : "piece", title: `${one.trained ? "trained on" : "context"}: ${notes.join(", ")}` });
  node.append(el("span", { class: "sr-only", text: one.trained ? "[trained on] " : "[context] " }), longText(shown, { limit: 4000, lines: true }));
  return node;
}

function drawRest(room, found) {
  if (found.columns?.length) {
    const table = new Table(room, { caption: "Columns of the group", key: (row) => row.name, columns: [
      { title: "Column", head: true, mono: true, value: (row) => row.name }, { title: "Kind", mono: true, value: (row) => row.kind },
      { title: "First values", mono: true, value: (row) => row.preview, render: (row) => longText(row.preview, { limit: 120 }) }] });
    room.prepend(el("h3", { text: "Columns" }));
    table.draw(found.columns);
  }
  if (found.history?.length) {
    room.append(el("h3", { text: "History" }), el("div", { class: "log", role: "region", tabindex: 0, "aria-label": "History of the group" }, ...found.history.map((line) => el("div", {}, longText(line, { limit: 400 })))));
  }
}
