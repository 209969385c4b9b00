// The daemon's HTTP interface: JSON, lines of progress, and server-sent events, with the API key of this session.
const BASE = new URL("../", import.meta.url);
const KEY = "modelrunner-key";
const encoder = new TextEncoder();

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set(text) {
    if (text) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
  },
};

let making = null; // settles once the key that this tab makes is known

async function send(method, path, { body, signal, headers = {} } = {}) {
  const sent = key.get();
  const own = sent ? { Authorization: `Bearer ${sent}` } : {};
  const init = { method, signal, headers: { ...own, ...headers }, credentials: "omit", cache: "no-store" };
  if (body instanceof FormData) init.body = body;
  else if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(new URL(path, BASE), init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The daemon does not answer. Is it running? `modelrunner status` says.");
  }
  if (response.ok) return response;
  if (response.status === 401 && making && !(method === "POST" && path === "keys")) {
    await making;
    if (key.get() !== sent) return send(method, path, { body, signal, headers });
  }
  const text = await response.text();
  let found = {};
  try {
    found = JSON.parse(text).error || {};
  } catch { /* not JSON */ }
  const message = typeof found === "string" ? found : found.message;
  if (response.status === 401) window.dispatchEvent(new CustomEvent("unauthorized", { detail: key.get() ? message : "" }));
  throw new ApiError(response.status, message || text || `The daemon answered ${response.status}.`, found.code);
}

export async function call(method, path, body, signal) {
  const response = await send(method, path, { body, signal });
  return response.status === 204 ? null : response.json();
}

export const get = (path, signal) => call("GET", path, undefined, signal);
export const post = (path, body = {}, signal) => call("POST", path, body, signal);

// Makes an API key. With the first one this tab logs in, if the key may do everything: other requests of the page can be
// refused before the text of the key arrives, and are sent again with it.
export async function makeKey(body, first) {
  let settle;
  making = new Promise((resolve) => (settle = resolve));
  try {
    const made = await post("keys", body);
    if (first && made.key.scopes.includes("admin")) key.set(made.text);
    return made;
  } finally {
    making = null;
    settle();
  }
}

export const ref = (name) => encodeURIComponent(name);

async function* read(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const pieces = (response) => read(response.body.pipeThrough(new TextDecoderStream()));

async function* split(response, separator) {
  let rest = "";
  for await (const text of pieces(response)) {
    const parts = (rest + text).split(separator);
    rest = parts.pop();
    yield* parts;
  }
  if (rest.trim()) yield rest;
}

// Yields the lines of progress of a pull, a load or an installation; throws the error that one of them carries.
export async function* progress(path, body, signal) {
  const response = await send("POST", path, { body, signal, headers: { Accept: "application/json" } });
  for await (const line of split(response, "\n")) {
    if (!line.trim()) continue;
    const step = JSON.parse(line);
    if (step.type === "error") throw new ApiError(500, step.message, step.error?.code);
    yield step;
  }
}

// Yields {event, data, place} of a stream of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html),
// where `place` is the number of bytes up to the end of the event. A stream is read by fetch, since EventSource cannot send
// a key. `opened` is called with the answer's head.
export async function* events(path, { method = "GET", body, signal, headers = {}, opened } = {}) {
  const response = await send(method, path, { body, signal, headers: { Accept: "text/event-stream", ...headers } });
  opened?.(response);
  let rest = "", place = 0;
  for await (const text of pieces(response)) {
    rest += text;
    for (let end; (end = /\r?\n\r?\n/.exec(rest)); ) {
      const block = rest.slice(0, end.index), size = end.index + end[0].length;
      place += encoder.encode(rest.slice(0, size)).length;
      rest = rest.slice(size);
      const event = parsed(block);
      if (event) yield { ...event, place };
    }
  }
}

function parsed(block) {
  let event = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") event = value;
    else if (name === "data") data.push(value);
  }
  return data.length ? { event, data: data.join("\n") } : null;
}

export async function* text(path, signal) {
  yield* pieces(await send("GET", path, { signal }));
}

export async function* bytes(path, body, signal) {
  yield* read((await send("POST", path, { body, signal })).body);
}
