// A run behind the server of `rolloutmq dashboard`: requests, the stream of events, and the exchange of the token.

import { plain } from "../text/visible.js";
import { LINK } from "./store.js";

const STALE_MS = 12_000;
const RETRY_MS = 2_000;
const PATIENCE_MS = 35_000;

/** An answer other than the one asked for, with what the server said. */
class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(PATIENCE_MS), ...options });
  } catch (error) {
    const isLate = error?.name === "TimeoutError";
    throw new Refused(0, "unreachable", isLate ? "the server did not answer in time" : "the server of this page does not answer");
  }
  if (answer.status === 204) return null;
  let body = null;
  try {
    body = await answer.json();
  } catch {
    throw new Refused(answer.status, "malformed", `the server answered ${answer.status} without JSON`);
  }
  if (!answer.ok) throw new Refused(answer.status, body?.error?.code ?? "error", body?.error?.message ?? `status ${answer.status}`);
  return body;
}

const post = (path, body) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

export class RemoteRun {
  constructor(store) {
    this.store = store;
    this.isLive = true;
    this._source = null;
    this._heard = performance.now();
    this._timer = 0;
    this._signedIn = new Promise((tell) => {
      this._tellSignedIn = tell;
    });
  }

  /** Exchange the token of the address for a cookie, then follow the run. The token leaves the address first. */
  async start() {
    await this._exchange();
    this._tellSignedIn();
    setInterval(() => this._watch(), 1000);
    window.addEventListener("hashchange", () => this._exchange().then((isNew) => isNew && this._connect()));
    document.addEventListener("visibilitychange", () => this._watch());
    this._connect();
  }

  async _exchange() {
    const found = /^#token=(.+)$/.exec(location.hash);
    if (!found) return false;
    history.replaceState(null, "", "/");
    let token = found[1];
    try {
      token = decodeURIComponent(token);
    } catch {
      // As it stands: the server refuses it.
    }
    try {
      await post("/api/session", { token });
    } catch (error) {
      this._why = error.message; // A valid cookie may still be there: the stream tells.
    }
    return true;
  }

  _connect() {
    clearTimeout(this._timer);
    this._source?.close();
    const source = new EventSource("/api/events");
    this._source = source;
    const hear = (type, take) =>
      source.addEventListener(type, (event) => {
        if (source !== this._source) return;
        this._heard = performance.now();
        this.store.heardAt = Date.now() / 1000;
        let data;
        try {
          data = JSON.parse(event.data);
        } catch {
          this.store.setLink(LINK.STALE, "the server sent an event that is not JSON");
          return;
        }
        take(data);
        if (type !== "leave") this.store.setLink(LINK.LIVE);
      });
    hear("state", (data) => this.store.takeState(data.sections ?? {}, Boolean(data.full)));
    hear("history", (data) => this.store.takeHistory(data));
    hear("beat", () => {});
    hear("end", (data) => this.store.setEnded(plain(data.text, 400) || "the run has ended"));
    hear("leave", (data) => this.store.setLink(data.over ? LINK.OVER : LINK.LOST, plain(data.text, 600)));
    source.addEventListener("error", () => {
      if (source !== this._source) return;
      if (source.readyState === EventSource.CLOSED) this._refused();
      else this._lose("the connection is lost; trying again");
    });
  }

  // A server that ended with its run is not missed, but looked for: another may begin at its address.
  _lose(text) {
    if (this.store.link.kind !== LINK.OVER) this.store.setLink(LINK.LOST, text);
  }

  // A stream that the server refused is closed for good: a request tells why.
  async _refused() {
    try {
      await ask("/api/state");
      this._lose("the server takes no further page; trying again");
    } catch (error) {
      if (error.status === 401) {
        this.store.setLink(LINK.SIGNED_OUT, this._why ?? error.message);
        return;
      }
      this._lose(`${error.message}; trying again`);
    }
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this._connect(), RETRY_MS);
  }

  _watch() {
    if (this.store.link.kind !== LINK.LIVE) return;
    const silence = performance.now() - this._heard;
    if (silence > STALE_MS) this.store.setLink(LINK.STALE, "the server is silent");
  }

  async workers({ sort, order, filter, offset, limit }) {
    await this._signedIn;
    return ask(`/api/workers?${new URLSearchParams({ sort, order, filter, offset, limit })}`);
  }

  async latencies({ by, filter, limit }) {
    await this._signedIn;
    return ask(`/api/latencies?${new URLSearchParams({ by, filter, limit })}`);
  }

  async deadList(offset, limit) {
    await this._signedIn;
    return ask(`/api/dead?${new URLSearchParams({ offset, limit })}`);
  }

  async deadGroup({ group_id: id, order }, sequence, limit) {
    return ask(`/api/dead/${encodeURIComponent(id)}?${new URLSearchParams({ sequence, limit, order })}`);
  }

  act(name, body) {
    return post(`/api/actions/${name}`, body);
  }
}
