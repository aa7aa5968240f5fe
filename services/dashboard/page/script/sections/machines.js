// What the run runs on: GPUs, engines, trainers, the host and the processes of the run.

import { actionButton, renewButton } from "../parts/actions.js";
import { panel } from "../parts/section.js";
import { bar, Table } from "../parts/table.js";
import { Chart } from "../parts/chart.js";
import { longText } from "../parts/long_text.js";
import { el, setText, show } from "../text/dom.js";
import { bytes, clock, count, fixed, NONE, percent } from "../text/format.js";
import { plain } from "../text/visible.js";

const GPUS = 8;

export const machines = {
  id: "machines",
  title: "GPUs, engines, processes",
  needs: ["gpus", "gpu_absence", "engines", "engine_target", "trainers", "host", "processes", "network", "history", "run"],
  mount(body, { actions }) {
    const grid = el("div", { class: "grid" });
    body.append(grid);
    const absence = el("p", { class: "empty" });
    const gpuRoom = el("div");
    const gpus = gpuTable(gpuRoom, actions);
    const gpuPanel = panel("GPUs", absence, gpuRoom);
    const chart = new Chart(grid, { title: "Utilisation of GPUs", axes: { y: { min: 0, max: 100, unit: (value) => `${value} %` } } });
    const engineRoom = el("div");
    const engines = engineTable(engineRoom);
    const trainerRoom = el("div");
    const trainers = new Table(trainerRoom, {
      caption: "Trainers", none: "No trainer has pulled a batch.", key: (row) => `${row.group}\n${row.consumer}`,
      columns: [
        { title: "Consumer", head: true, value: (row) => row.consumer, render: (row) => longText(row.consumer, { limit: 60 }) },
        { title: "State", value: (row) => (row.has_left ? "ended" : row.connected ? "connected" : "silent"), tone: (row) => (row.connected || row.has_left ? "" : "bad") },
        { title: "Step", number: true, value: (row) => count(row.step) },
        { title: "Last heard", number: true, value: (row) => `${clock(row.silent_s)} ago` },
      ],
    });
    const hostLine = el("p", { class: "numbers" });
    const processRoom = el("div");
    const processes = new Table(processRoom, {
      caption: "Processes of the run", none: "No process was sampled yet.", key: (row) => `${row.name}\n${row.pid}`,
      columns: [
        { title: "Process", head: true, value: (row) => row.name, render: (row) => longText(row.name, { limit: 60 }) },
        { title: "Pid", number: true, wide: true, value: (row) => String(row.pid ?? NONE) },
        { title: "CPU", number: true, value: (row) => (row.cpu_percent === null ? NONE : `${fixed(row.cpu_percent, 0)} %`) },
        { title: "Memory", number: true, value: (row) => bytes(row.rss_bytes) },
      ],
    });
    gpuPanel.classList.add("whole");
    grid.prepend(gpuPanel);
    grid.append(panel("Engines", engineRoom), panel("Trainers", trainerRoom), panel("Host and processes", hostLine, processRoom));
    const others = el("ul", { class: "plain-list" });
    const otherHosts = panel("Other hosts", others);
    grid.append(otherHosts);
    return (store) => {
      const cards = store.list("gpus");
      gpus.draw(cards);
      show(gpuRoom, cards.length > 0);
      show(absence, cards.length === 0);
      setText(absence, `No GPU is watched${store.get("gpu_absence") ? `: ${plain(store.get("gpu_absence"), 300)}` : ""}.`);
      const names = new Map(cards.map((card) => [card.uuid, `${card.index ?? ""} ${card.name ?? ""}`.trim()]));
      const series = store.history("gpu").slice(0, GPUS).map(([uuid, columns]) => ({
        label: names.get(uuid) || uuid, times: columns.t, values: columns.utilisation_percent ?? [], unit: (value) => (value === null ? NONE : `${fixed(value, 0)} %`), gaps: true }));
      show(chart.node, series.length > 0);
      chart.draw(series);
      engines.draw(store.list("engines"));
      trainers.draw(store.list("trainers"));
      processes.draw(store.list("processes"));
      const network = store.list("network");
      show(otherHosts, network.length > 0);
      others.replaceChildren(...network.map((one) => el("li", { class: one.unwell ? "warn" : "", text: `${plain(one.what, 20)}: ${plain(one.text, 400)}` })));
      const host = store.get("host");
      show(hostLine, Boolean(host));
      if (host) {
        setText(hostLine, [`${plain(host.host, 60)}: ${count(host.cpus)} cores at ${fixed(host.cpu_percent, 0)} %`, `memory ${bytes(host.memory_used_bytes)} of ${bytes(host.memory_total_bytes)}`,
          `shared memory ${bytes(host.shm_free_bytes)} free`, `disk ${bytes(host.disk_free_bytes)} free`].join(" · "));
      }
    };
  },
};

const part = (used, total) => (total ? used / total : 0);

function gpuTable(room, actions) {
  return new Table(room, {
    caption: "GPUs", key: (row) => row.uuid,
    columns: [
      { title: "GPU", head: true, value: (row) => `${row.index ?? ""} ${row.name ?? ""} ${row.host ?? ""}`, render: (row) => longText(`${row.index ?? ""} ${row.name ?? row.uuid}${row.host ? ` on ${row.host}` : ""}`, { limit: 60 }) },
      { title: "State", value: (row) => (row.cordoned ? `cordoned: ${row.reason || (row.causes ?? []).join(", ")}` : row.state === "ok" ? "in use" : `${row.state}: ${row.why}`),
        tone: (row) => (row.cordoned ? "warn" : row.state === "ok" || !row.state ? "" : "bad") },
      { title: "Busy", number: true, value: (row) => (row.utilisation_percent === null ? NONE : `${fixed(row.utilisation_percent, 0)} %`) },
      { title: "", wider: true, class: "bar-cell", value: (row) => fixed(row.utilisation_percent, 0), render: (row) => bar((row.utilisation_percent ?? 0) / 100) },
      { title: "Memory", number: true, wide: true, value: (row) => `${bytes(row.memory_used_bytes)} of ${bytes(row.memory_total_bytes)}` },
      { title: "", wider: true, class: "bar-cell", value: (row) => part(row.memory_used_bytes, row.memory_total_bytes).toFixed(2), render: (row) => bar(part(row.memory_used_bytes, row.memory_total_bytes)) },
      { title: "Temperature", number: true, wide: true, value: (row) => (row.temperature_c === null ? NONE : `${fixed(row.temperature_c, 0)} °C`) },
      { title: "Workers", wide: true, value: (row) => (row.holders ?? []).join(", ") || NONE, render: (row) => longText((row.holders ?? []).join(", ") || NONE, { limit: 60 }) },
      { title: "Action", class: "action-cell", value: (row) => String(row.cordoned), render: (row) => gpuButton(actions, row), renew: (button, row) => {
        renewButton(button, actions);
        button.card = row;
        const text = row.cordoned ? "Uncordon …" : "Cordon …";
        if (button.textContent !== text) button.textContent = text;
        button.setAttribute("aria-label", `${text.slice(0, -2)} GPU ${plain(row.index ?? row.uuid, 40)}`);
      } },
    ],
  });
}

function gpuButton(actions, row) {
  const button = actionButton(actions, row.cordoned ? "Uncordon …" : "Cordon …", `${row.cordoned ? "Uncordon" : "Cordon"} GPU ${plain(row.index ?? row.uuid, 40)}`, () => {
    const card = button.card ?? row;
    const name = plain(`${card.index ?? ""} ${card.name ?? card.uuid}`.trim(), 80);
    if (card.cordoned) {
      actions.confirm({ title: `Uncordon GPU ${name}?`, text: "New workers may use it again. The event that caused the cordon is ignored from now on.", name: "uncordon", body: { gpu: card.uuid }, label: "Uncordon" });
      return;
    }
    const reason = el("input", { type: "text", id: "cordon-reason", maxlength: 200, value: "asked" });
    actions.confirm({ title: `Cordon GPU ${name}?`, text: "It takes no new workers. Its present workers stay.", fields: [el("p", {}, el("label", { for: "cordon-reason", text: "Reason " }), reason)],
      name: "cordon", body: () => ({ gpu: card.uuid, reason: reason.value.trim() || "asked" }), label: "Cordon" });
  });
  button.card = row;
  return button;
}

function engineTable(room) {
  return new Table(room, {
    caption: "Engines", none: "No engine is heard.", key: (row) => row.name,
    columns: [
      { title: "Engine", head: true, value: (row) => row.name, render: (row) => longText(row.name, { limit: 60 }) },
      { title: "State", value: (row) => (row.trouble ? row.trouble : row.draining ? "draining" : "serving"), tone: (row) => (row.trouble ? "bad" : row.draining ? "warn" : ""), render: (row) => longText(row.trouble || (row.draining ? "draining" : "serving"), { limit: 120 }) },
      { title: "In hand", number: true, value: (row) => count(row.in_hand) },
      { title: "Busy", number: true, value: (row) => percent(row.busy) },
      { title: "", wider: true, class: "bar-cell", value: (row) => (row.busy ?? 0).toFixed(2), render: (row) => bar(row.busy) },
      { title: "Address", wider: true, mono: true, value: (row) => plain(row.url, 60) },
    ],
  });
}
