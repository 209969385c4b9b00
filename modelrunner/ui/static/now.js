// Now: memory of each device, runners, what waits and why, requests under way, and what happened last.
import { html, useEffect, useState } from "./preact-htm.js";
import { get, post, ref } from "./api.js";
import { live, useStore } from "./live.js";
import { Action, Badge, Bar, Empty, Fault, NONE, Skeleton, bytes, clock, number, plural, seconds, shortName, useClock } from "./parts.js";

const STATES = { starting: "warn", ready: "good", sleeping: "calm", draining: "warn", stopping: "warn" };
const HUES = 6;
const HAPPENED = {
  load: "is loading", ready: "is ready", sleep: "sleeps", wake: "wakes", evict: "is evicted", stop: "ends", crash: "crashed",
  refuse: "was refused", pull: "was pulled", push: "was pushed", configure: "was configured", install: "engine", damage: "is damaged", remove: "was removed", tag: "is a new name", move: "was moved", check: "was checked",
};

const figures = (memory) => [memory.ram, ...memory.vram];
const counted = (runner, device) => {
  const predicted = figures(runner.memory.estimated)[device] || 0;
  const measured = runner.memory.measured && (figures(runner.memory.measured)[device] || 0);
  return { predicted, counted: measured ?? predicted, known: measured != null };
};

// `why` of each model that waits, asked again when the runners or the line change.
function useReasons(now) {
  const [reasons, setReasons] = useState({});
  const waiting = Object.keys(now.waiting).sort();
  const inputs = JSON.stringify([now.waiting, now.paused, now.runners.map((each) => [each.id, each.state, each.stage, each.leases > 0])]);
  useEffect(() => {
    const stop = new AbortController();
    if (!waiting.length) return setReasons({});
    Promise.all(waiting.map((model) => get(`engines/why?model=${ref(model)}`, stop.signal).catch(() => null))).then((found) => {
      if (!stop.signal.aborted) setReasons(Object.fromEntries(waiting.map((model, i) => [model, found[i]])));
    });
    return () => stop.abort();
  }, [inputs]);
  return reasons;
}

// What the driver says of a device beside its memory, and what other programs hold of it.
const about = (device) => device && [
  device.name, `${bytes(device.total)} in all`, device.others > 0 && `other programs hold ${bytes(device.others)}`,
  device.utilization != null && `${device.utilization} % busy`, device.temperature != null && `${device.temperature} °C`,
  device.hides_processes && "measured by its free memory",
].filter(Boolean).join(" · ");

function Device({ name, budget, free, runners, queued, device }) {
  const used = budget - free;
  const width = (size) => ({ width: `${(100 * size) / scale}%` });
  const parts = runners.map(({ runner, hue, figure }) => ({ runner, hue, ...figure })).filter((part) => part.counted || part.predicted);
  const scale = Math.max(budget, used + queued, 1);
  const told = `${name}: ${bytes(used)} of ${bytes(budget)} in use${queued ? `, ${bytes(queued)} queued` : ""}`;
  return html`<div class="device">
    <div class="row"><h3>${name}</h3><p class="figure"><strong>${bytes(used)}</strong> <span class="muted">of ${bytes(budget)}</span></p></div>
    ${device && html`<p class="muted figure">${about(device)}</p>`}
    ${device?.fault && html`<p><${Badge} kind="bad">not used<//> ${device.fault}</p>`}
    <div class="memory" role="img" aria-label=${told}>
      ${parts.map((part) => html`<div key=${part.runner.id} class=${`hue${part.hue}${part.known ? " measured" : ""}`} style=${width(part.counted)} title=${`${shortName(part.runner.model_name)}: ${bytes(part.counted)}`}></div>`)}
      ${queued > 0 && html`<div class="queued" style=${width(queued)} title=${`Queued: ${bytes(queued)}`}></div>`}
    </div>
    <div class="memory thin" aria-hidden="true" title="What was predicted">${parts.map((part) => html`<div key=${part.runner.id} class=${`hue${part.hue}`} style=${width(part.predicted)}></div>`)}</div>
    <ul class="legend">
      ${parts.map((part) => html`<li key=${part.runner.id}><span class=${`swatch hue${part.hue}`}></span>${shortName(part.runner.model_name)}
        <span class="muted figure">${part.known ? `${bytes(part.counted)} measured, ${bytes(part.predicted)} predicted` : `${bytes(part.predicted)} predicted`}</span></li>`)}
      ${queued > 0 && html`<li><span class="swatch queued"></span>Queued <span class="muted figure">${bytes(queued)}</span></li>`}
      <li><span class="swatch"></span>Free <span class="muted figure">${bytes(free)}</span></li>
    </ul>
  </div>`;
}

function Memory({ now, reasons }) {
  const budget = figures(now.budget), free = figures(now.free);
  const loading = new Set(now.runners.map((runner) => runner.model_name));
  const devices = budget.map((size, device) => ({
    name: device ? `GPU ${device - 1}` : "Main memory",
    budget: size,
    free: free[device] || 0,
    runners: now.runners.map((runner, i) => ({ runner, hue: i % HUES, figure: counted(runner, device) })).filter(({ runner }) => !runner.host),
    device: device ? now.devices[device - 1] : null,
    queued: Object.entries(reasons).reduce((sum, [model, why]) => sum + (why?.needed && !loading.has(model) ? figures(why.needed)[device] || 0 : 0), 0),
  }));
  return html`<section class="card" aria-labelledby="memory"><h2 id="memory">Memory</h2>${devices.map((device) => html`<${Device} key=${device.name} ...${device} />`)}</section>`;
}

// Where a runner computes, if that is not the processor of this machine.
const place = ({ host, memory }) => {
  const devices = figures(memory.estimated).flatMap((size, device) => device && size ? [`device ${device - 1}`] : []);
  return [host && `on ${host}`, ...devices].filter(Boolean).join(", ");
};

const unload = (name) => async () => {
  const done = await post("engines/unload", { models: [name] });
  return done.kept.length ? done.kept[0].reason : `${shortName(name)} is unloaded`;
};
const order = (action, model) => async () => (await post(`engines/${action}`, { model })).message;

function Runner({ runner, hue, speed, time }) {
  const name = runner.model_name;
  const left = runner.expires_at ? Math.max(0, (Date.parse(runner.expires_at) - time) / 1000) : null;
  const memory = runner.memory.measured || runner.memory.estimated;
  const total = figures(memory).reduce((sum, size) => sum + size, 0);
  return html`<article class="runner" aria-label=${shortName(name)}>
    <header>
      <span class=${`swatch hue${hue}`}></span>
      <h3 title=${name}>${shortName(name)}</h3>
      <${Badge} kind=${STATES[runner.state]}>${runner.state}<//>
      ${runner.pinned && html`<${Badge}>pinned<//>`}
      ${runner.variant && html`<${Badge} kind="warn">${runner.variant}<//>`}
      <span class="muted">${runner.backend_name} · ${runner.mode} · context ${number(runner.context_size)}${place(runner) && ` · ${place(runner)}`}</span>
    </header>
    ${runner.loading && html`<div class="stage"><${Bar} label=${`Loading ${shortName(name)}`} /><p>${runner.stage || "starting"} · <span class="figure">${seconds(Math.max(0, Math.round((time - Date.parse(runner.started_at)) / 1000)))}</span></p></div>`}
    <dl>
      <div><dt>Answers</dt><dd>${runner.leases}<span class="muted"> of ${runner.parallel}</span></dd></div>
      <div><dt>Queue</dt><dd>${runner.queued}</dd></div>
      <div><dt>Tokens/s</dt><dd>${speed ? number(speed) : NONE}</dd></div>
      <div><dt>Memory</dt><dd>${bytes(total)}</dd></div>
      <div><dt>Time left</dt><dd>${runner.pinned ? "pinned" : left != null ? seconds(Math.round(left)) : runner.leases ? "in use" : NONE}</dd></div>
    </dl>
    <footer>
      <${Action} kind="small" label=${`Unload ${shortName(name)}`} run=${unload(name)}>Unload<//>
      <${Action} kind="small" label=${`${runner.pinned ? "Unpin" : "Pin"} ${shortName(name)}`} run=${order(runner.pinned ? "unpin" : "pin", name)}>${runner.pinned ? "Unpin" : "Pin"}<//>
      <${Action} kind="small" label=${`Pause ${shortName(name)}`} run=${order("pause", name)}>Pause<//>
    </footer>
  </article>`;
}

function Waiting({ now, reasons, names }) {
  const waiting = Object.entries(now.waiting);
  if (!waiting.length && !now.paused.length) return null;
  return html`<section class="card" aria-labelledby="waiting"><h2 id="waiting">Waiting</h2>
    ${waiting.map(([model, count]) => {
      const why = reasons[model];
      return html`<article class="waiting" key=${model}>
        <header><h3 title=${model}>${shortName(model)}</h3><${Badge} kind="warn">${plural(count, "request")}<//>${why?.waiting_for && html`<${Badge}>waits for ${why.waiting_for}<//>`}</header>
        <p>${why ? why.reason : "Asking why…"}</p>
        ${why && html`<dl>
          ${why.position && html`<div><dt>Place in line</dt><dd>${why.position}</dd></div>`}
          ${why.needed && html`<div><dt>Needs</dt><dd>${bytes(figures(why.needed).reduce((a, b) => a + b))}</dd></div>`}
          ${why.expected_seconds != null && html`<div><dt>Expected in</dt><dd>${seconds(why.expected_seconds)}</dd></div>`}
          ${why.victims.length > 0 && html`<div><dt>Makes room</dt><dd>${why.victims.map(shortName).join(", ")}</dd></div>`}
        </dl>`}
      </article>`;
    })}
    ${now.paused.map((id) => html`<article class="waiting" key=${id}>
      <header><h3>${shortName(names[id] || id.slice(0, 19))}</h3><${Badge}>paused<//></header>
      <p>Its requests wait until it is resumed.</p>
      <footer><${Action} kind="small" run=${order("resume", names[id] || id)} label=${`Resume ${shortName(names[id] || id)}`}>Resume<//></footer>
    </article>`)}
  </section>`;
}

const phase = (request) => (request.first_byte != null ? ["answers", "good"] : request.runner ? ["works", "calm"] : request.loading ? ["loads", "warn"] : ["waits", "warn"]);

function UnderWay({ now }) {
  return html`<section class="card" aria-labelledby="under-way"><h2 id="under-way">Requests under way <span class="muted figure">${now.running || ""}</span></h2>
    ${!now.requests.length && html`<p class="muted">None. Requests appear here as they come, with a button that ends them.</p>`}
    <ul class="lines">${now.requests.slice(0, 20).map((request) => {
      const [word, kind] = phase(request);
      return html`<li key=${request.request_id}>
        <${Badge} kind=${kind}>${word}<//><span class="grow">${shortName(request.model_name || request.model)}</span>
        ${request.caller && html`<span class="muted hide-small">${request.caller}</span>`}
        <span class="figure">${seconds(request.duration)}</span>
        <${Action} kind="small" label=${`Cancel the request ${request.request_id}`} run=${async () => (await post(`engines/requests/${ref(request.request_id)}/cancel`), "The request is cancelled")}>Cancel<//>
      </li>`;
    })}</ul>
    ${now.running > 20 && html`<p class="muted">and ${number(now.running - 20)} more</p>`}
  </section>`;
}

// What an event says of its model, and the kind of its dot. A pull that failed is a pull event, too.
function told({ event, reason }) {
  const failure = event === "pull" && reason.startsWith("failed: ") ? reason.slice(8) : null;
  return failure == null ? [event, HAPPENED[event] || event, reason] : ["crash", "could not be pulled", failure];
}

function Happened({ events }) {
  return html`<section class="card" aria-labelledby="happened"><h2 id="happened">What happened</h2>
    ${!events.length && html`<p class="muted">Nothing yet. Loads, evictions, pulls and crashes are listed here.</p>`}
    <ol class="lines events">${events.slice(-12).reverse().map((event) => [event, ...told(event)]).map(([event, kind, happened, reason]) => html`<li key=${event.id}>
      <time class="muted figure" datetime=${event.time}>${clock(event.time)}</time>
      <span class=${`event ${kind}`}></span>
      <span class="grow"><strong>${shortName(event.model) || "The daemon"}</strong> ${happened}${reason && html`<span class="muted"> · ${reason}</span>`}</span>
    </li>`)}</ol>
  </section>`;
}

// Names of models by ID, for those that are paused: they have no runner that tells its name.
function useNames(ids) {
  const [names, setNames] = useState({});
  useEffect(() => {
    if (!ids.some((id) => !(id in names))) return;
    get("models").then((models) => setNames(Object.fromEntries(models.map((model) => [model.id, model.tags[0] || model.id]))), () => {});
  }, [ids.join()]);
  return names;
}

const STATUS = {
  starting: ["Starting", "warn"], ready: ["Ready", "good"], busy: ["Requests wait", "warn"], shutting_down: ["Shutting down", "warn"], error: ["The last plan failed", "bad"],
};

export function Now() {
  const { now, events, phase, error } = useStore(live);
  if (phase === "denied") return html`<h1>Now</h1><${Fault} error=${{ status: 403, message: error }} />`;
  if (!now) return html`<h1>Now</h1><${Skeleton} lines=${6} />`;
  return html`<${Live} now=${now} events=${events} />`;
}

function Live({ now, events }) {
  const time = useClock();
  const { speeds } = useStore(live);
  const reasons = useReasons(now);
  const names = useNames(now.paused);
  const [word, kind] = STATUS[now.status] || [now.status, ""];
  return html`<header class="title"><h1>Now</h1><${Badge} kind=${kind}>${word}<//>
      <p class="muted figure">${plural(now.runners.length, "runner")} · ${plural(now.running, "request")} under way</p></header>
    <div class="columns">
      <div>
        <${Memory} now=${now} reasons=${reasons} />
        <section class="card" aria-labelledby="runners"><h2 id="runners">Runners</h2>
          ${!now.runners.length && html`<${Empty} icon="now" title="No model is loaded">A request loads its model by itself. <a href="#/chat">Start a chat</a>, or load one under <a href="#/models">Models</a>.<//>`}
          ${now.runners.map((runner, i) => html`<${Runner} key=${runner.id} runner=${runner} hue=${i % HUES} speed=${speeds[runner.id]} time=${time} />`)}
        </section>
      </div>
      <div>
        <${Waiting} now=${now} reasons=${reasons} names=${names} />
        <${UnderWay} now=${now} />
        <${Happened} events=${events} />
      </div>
    </div>`;
}
