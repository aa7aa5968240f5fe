// The page of a run: its header, its sections, and where its numbers come from.

import { RemoteRun } from "./data/remote.js";
import { Store } from "./data/store.js";
import { StoredRun } from "./data/stored.js";
import { mountHeader } from "./parts/header.js";
import { mountNav } from "./parts/nav.js";
import { mountSections } from "./parts/section.js";
import { Actions } from "./parts/actions.js";
import { SECTIONS } from "./sections/all.js";

function storedData() {
  const node = document.getElementById("run-data");
  return node === null ? null : JSON.parse(node.textContent);
}

const store = new Store();
const data = storedData();
const run = data === null ? new RemoteRun(store) : new StoredRun(store, data);
const context = { store, run, actions: new Actions(store, run) };
mountHeader(document.getElementById("header"), context);
mountSections(document.getElementById("main"), SECTIONS, context);
mountNav(document.getElementById("nav"), SECTIONS, context);
run.start();
