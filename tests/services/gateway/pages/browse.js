// Runs the script of `/docs` (on stdin) against a gateway (argument), with as little of a browser as it needs.
// Prints what the page shows, as one line of JSON: its text, and the reply to each request that the forms send.
"use strict";
const [address, ...sent] = process.argv.slice(2);

class Element {
  constructor(name) { this.name = name; this.children = []; }
  set textContent(text) { this.children = [String(text)]; }
  get textContent() { return this.children.map((one) => one.textContent ?? one).join(" "); }
  append(...nodes) { this.children.push(...nodes); }
  *all() { yield this; for (const one of this.children) if (one instanceof Element) yield* one.all(); }
}

const byId = { about: new Element("p"), endpoints: new Element("div") };
globalThis.document = { createElement: (name) => new Element(name), getElementById: (id) => byId[id] };
globalThis.confirm = () => false;
const elsewhere = globalThis.fetch;
globalThis.fetch = (path, options) => elsewhere(new URL(path, address + "/docs"), options);

async function send(shown) {
  const box = [...byId.endpoints.all()].find((one) => one.name === "details" && one.children[0].textContent.startsWith(shown));
  const parts = [...box.all()], status = parts.findLast((one) => one.className === "muted");
  await parts.find((one) => one.name === "button").onclick();
  return { status: status.textContent, reply: parts.find((one) => one.name === "pre").textContent };
}

async function main() {
  const page = require("fs").readFileSync(0, "utf8"), before = Date.now();
  new Function(page.match(/<script>([^]*)<\/script>/)[1])();
  while (!byId.endpoints.children.length && Date.now() - before < 30000) await new Promise((done) => setTimeout(done, 20));
  const replies = {};
  for (const one of sent) replies[one] = await send(one);
  console.log(JSON.stringify({ text: byId.endpoints.textContent, replies }));
}
main();
