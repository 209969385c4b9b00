// The daemon's state as this page knows it: one stream of events, opened again when it breaks, closed while the page is
// hidden. Browsers allow few connections to a host, so every view uses this one.
import { useEffect, useState } from "./preact-htm.js";
import { events, get } from "./api.js";

const KEPT_EVENTS = 200;
const KEPT_REQUESTS = 1000;
const LONGEST_PAUSE = 10000; // ms

// A value and those who show it. They are told once for each picture of the screen, however often it changes.
export class Store {
  constructor(value) {
    this.value = value;
    this.listeners = new Set();
    this.told = true;
  }
  set(change) {
    this.value = { ...this.value, ...change };
    if (!this.told) return;
    this.told = false;
    requestAnimationFrame(() => {
      this.told = true;
      for (const listener of this.listeners) listener(this.value);
    });
  }
}

export function useStore(store) {
  const [value, setValue] = useState(store.value);
  useEffect(() => {
    setValue(store.value);
    store.listeners.add(setValue);
    return () => store.listeners.delete(setValue);
  }, [store]);
  return value;
}

// `joined` grows with each connection after the daemon was away. `phase` is connecting, live, reconnecting, denied (the key lacks a scope) or locked (a key is needed).
export const live = new Store({
  phase: "connecting", error: "", retryAt: 0, now: null, events: [], requests: [], skipped: 0, speeds: {}, steps: [], joined: 0,
});

const tail = (list, count) => (list.length > count ? list.slice(-count) : list);

// The tokens per second of each runner's last request.
const speedsOf = (requests) => Object.fromEntries(requests.filter((each) => each.tokens_per_second).map((each) => [each.runner, each.tokens_per_second]));

const keyOf = (request) => `${request.request_id} ${request.time}`;

const handlers = {
  now(now) {
    if (!live.value.now && now.counted) get("engines/requests?limit=40").then((last) => live.set({ speeds: speedsOf(last.reverse()) }), () => {});
    live.set({ now, phase: "live", error: "" });
  },
  events(news) {
    const last = live.value.events.at(-1)?.id || 0;
    live.set({ events: tail([...live.value.events, ...news.filter((event) => event.id > last)], KEPT_EVENTS) });
  },
  requests({ ended, newest }) {
    const speeds = { ...live.value.speeds, ...speedsOf(newest) };
    for (const runner of Object.keys(speeds)) {
      if (!live.value.now?.runners.some((each) => each.id === runner)) delete speeds[runner];
    }
    const known = new Set(live.value.requests.map(keyOf)); // `history` may have brought them before
    const requests = tail([...live.value.requests, ...newest.filter((each) => !known.has(keyOf(each)))], KEPT_REQUESTS);
    live.set({ requests, speeds, skipped: live.value.skipped + ended - newest.length });
  },
  history(step) {
    if (step.time > (live.value.steps.at(-1)?.time || 0)) live.set({ steps: tail([...live.value.steps, step], 360) });
  },
};

let current = null; // of the stream
let pause = 0;
let timer = 0;

async function follow() {
  clearTimeout(timer);
  current?.abort();
  const mine = (current = new AbortController());
  try {
    for await (const { event, data } of events("engines/now", { signal: mine.signal })) {
      if (mine.signal.aborted) return;
      if (pause) { // the daemon may have started anew: its last requests are others
        pause = 0;
        live.set({ joined: live.value.joined + 1 });
        history();
      }
      handlers[event]?.(JSON.parse(data));
    }
    throw new Error("The daemon ended the connection.");
  } catch (error) {
    if (mine.signal.aborted) return;
    if (error.status === 401 || error.status === 403) {
      live.set({ phase: error.status === 401 ? "locked" : "denied", error: error.message });
      return;
    }
    pause = Math.min(LONGEST_PAUSE, pause * 2 || 500);
    live.set({ phase: live.value.now ? "reconnecting" : "disconnected", error: error.message, retryAt: Date.now() + pause });
    timer = setTimeout(follow, pause);
  }
}

// Fetches the requests and the throughput that the daemon keeps.
export async function history() {
  const [requests, steps] = await Promise.all([get("engines/requests?limit=1000"), get("engines/history")]);
  live.set({ requests: requests.filter((each) => each.status).reverse(), steps, skipped: 0 });
}

export function connect() {
  live.set({ phase: live.value.now ? "reconnecting" : "connecting", error: "" });
  follow();
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    current?.abort();
  } else if (live.value.phase !== "locked" && live.value.phase !== "denied") {
    connect();
  }
});
window.addEventListener("online", connect);
