// Requests: the last ones as a waterfall, throughput and latency of the last hour, and logs.
import { html, useEffect, useMemo, useRef, useState } from "./preact-htm.js";
import { post, ref, text } from "./api.js";
import { history, live, useStore } from "./live.js";
import { Action, Badge, Empty, Fault, NONE, bytes, clock, number, plural, seconds, shortName, useClock, useLoaded } from "./parts.js";
import { Plot } from "./plot.js";

const STEP = 10;
const SHOWN = 60;
const KEPT_LOG = 400000; // characters

function Plots({ steps }) {
  const time = useClock();
  const to = Math.floor(time / 1000 / STEP) * STEP - STEP;
  const { rates, failed, tokens, median, slow } = useMemo(() => {
    const found = new Map(steps.map((step) => [step.time, step]));
    const at = Array.from({ length: 360 }, (_, i) => to - (359 - i) * STEP);
    const line = (pick) => at.map((when) => [when, found.has(when) ? pick(found.get(when)) : 0]);
    const gaps = (pick) => at.map((when) => [when, found.has(when) ? pick(found.get(when)) : null]);
    return {
      rates: line((step) => step.requests / STEP), failed: line((step) => step.failed / STEP), tokens: line((step) => step.completion_tokens / STEP),
      median: gaps((step) => step.first_byte_p50), slow: gaps((step) => step.first_byte_p95),
    };
  }, [steps, to]);
  const range = { from: to - 359 * STEP, to };
  return html`<section class="card" aria-labelledby="hour"><h2 id="hour">The last hour</h2><div class="plots">
    <${Plot} title="Requests per second" show=${number} lines=${[{ name: "all", hue: 0, points: rates }, { name: "failed", hue: 5, points: failed }]} ...${range} />
    <${Plot} title="Tokens per second" show=${number} lines=${[{ name: "answers", hue: 1, points: tokens }]} ...${range} />
    <${Plot} title="Time to the first token" show=${seconds} lines=${[{ name: "median", hue: 0, points: median }, { name: "95 %", hue: 2, points: slow }]} ...${range} />
  </div></section>`;
}

function spans(request) {
  const { queued, loading, first_byte: first, duration } = request;
  const begun = queued + loading;
  if (!request.status && !request.runner) return [["queued", duration]];
  if (first == null) return [["queued", queued], ["loading", loading], [hasFailed(request) ? "failed" : "first", Math.max(0, duration - begun)]];
  return [["queued", queued], ["loading", loading], ["first", Math.max(0, first - begun)], [hasFailed(request) ? "failed" : "answer", Math.max(0, duration - first)]];
}

const WORDS = { queued: "queued", loading: "loading", first: "until the first token", answer: "answering", failed: "until the fault" };
const LEFT = 499; // its client left: a person stopped the answer
const hasFailed = ({ status, error }) => status !== LEFT && (status >= 400 || Boolean(status && error)); // a stream may break off after its 200
const statusKind = (request) => (!request.status ? "calm" : request.status === LEFT ? "" : hasFailed(request) ? "bad" : "good");

function Row({ request, longest }) {
  const [open, setOpen] = useState(false);
  const parts = spans(request);
  const width = (size) => ({ width: `${(100 * size) / longest}%` });
  const name = shortName(request.model_name || request.model) || request.route;
  return html`<li>
    <button type="button" class="request" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>
      <span class="when muted figure">${clock(request.time)}</span><span class="name">${name}</span>
      <span><${Badge} kind=${statusKind(request)}>${!request.status ? "now" : request.status === LEFT ? "left" : request.status < 400 && request.error ? "cut" : request.status}<//></span>
      <span class="span" aria-hidden="true">${parts.map(([part, size]) => html`<div key=${part} class=${`w-${part}`} style=${width(size)}></div>`)}</span>
      <span class="number">${seconds(request.duration)}</span><span class="tokens number muted">${request.tokens_per_second ? `${number(request.tokens_per_second)} t/s` : ""}</span>
    </button>
    ${open && html`<div class="details form">
      <dl>${parts.map(([part, size]) => html`<div key=${part}><dt>${WORDS[part]}</dt><dd>${seconds(size)}</dd></div>`)}
        <div><dt>prompt</dt><dd>${plural(request.prompt_tokens, "token")}${request.cached_tokens ? ` (${number(request.cached_tokens)} cached)` : ""}</dd></div>
        <div><dt>answer</dt><dd>${plural(request.completion_tokens, "token")}</dd></div>
        <div><dt>bytes</dt><dd>${bytes(request.bytes_in)} in, ${bytes(request.bytes_out)} out</dd></div>
        <div class="wide"><dt>route</dt><dd>${request.route}</dd></div><div><dt>caller</dt><dd>${request.caller || NONE}</dd></div>
        <div><dt>engine</dt><dd>${request.backend || NONE} ${request.runner}</dd></div>
        ${request.error && html`<div class="wide"><dt>error</dt><dd>${request.error}</dd></div>`}
        <div class="wide"><dt>request ID</dt><dd class="mono">${request.request_id}</dd></div></dl>
      ${!request.status && html`<div><${Action} kind="small" run=${async () => (await post(`engines/requests/${ref(request.request_id)}/cancel`), "The request is cancelled")}>Cancel the request<//></div>`}
    </div>`}
  </li>`;
}

function Waterfall({ running, ended, skipped, counted }) {
  const [model, setModel] = useState("");
  const [status, setStatus] = useState("");
  const [words, setWords] = useState("");
  const [shown, setShown] = useState(SHOWN);
  const all = [...running, ...ended.toReversed()];
  const counts = {}; // clients may give several requests one ID; a row stays the same when its request ends
  const keys = new Map(all.toReversed().map((each) => [each, `${each.request_id} ${(counts[each.request_id] = (counts[each.request_id] || 0) + 1)}`]));
  const models = [...new Set(all.map((each) => each.model_name || each.model).filter(Boolean))].sort();
  const passes = { "": () => true, ok: (each) => each.status && !hasFailed(each), failed: hasFailed, running: (each) => !each.status };
  const found = all.filter((each) => (!model || (each.model_name || each.model) === model) && passes[status](each)
    && (!words || [each.request_id, each.route, each.caller, each.error].some((word) => word.toLowerCase().includes(words.toLowerCase()))));
  const longest = Math.max(0.001, ...found.slice(0, shown).map((each) => each.duration));
  return html`<section class="card" aria-labelledby="last"><div class="row"><h2 id="last">Requests</h2>
      <ul class="legend">${["queued", "loading", "first", "answer", "failed"].map((part) => html`<li key=${part}><span class=${`swatch w-${part}`}></span>${WORDS[part]}</li>`)}</ul></div>
    ${!counted && html`<p class="notice">The daemon keeps no requests that ended: <code>telemetry = true</code> in config.toml lets it, or the first API key. Their texts are never kept.</p>`}
    ${all.length > 0 && html`<div class="toolbar">
      <div class="field"><label for="by-model">Model</label><select id="by-model" value=${model} onChange=${(event) => setModel(event.target.value)}><option value="">all</option>${models.map((name) => html`<option key=${name} value=${name}>${shortName(name)}</option>`)}</select></div>
      <div class="field"><label for="by-status">State</label><select id="by-status" value=${status} onChange=${(event) => setStatus(event.target.value)}><option value="">all</option><option value="ok">answered</option><option value="failed">failed</option><option value="running">under way</option></select></div>
      <div class="field"><label for="by-words">Route, caller, ID or error</label><input id="by-words" type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></div>
    </div>`}
    ${!found.length && html`<${Empty} icon="requests" title=${all.length ? "No request is like this" : "No request yet"}>${all.length ? "Change the filters to see others." : "Requests appear here as they end, without their texts."}<//>`}
    <ol class="waterfall">${found.slice(0, shown).map((each) => html`<${Row} key=${keys.get(each)} request=${each} longest=${longest} />`)}</ol>
    ${found.length > shown && html`<button type="button" class="small" onClick=${() => setShown(shown + 200)}>Show more of ${number(found.length)}</button>`}
    ${skipped > 0 && html`<p class="hint">${plural(skipped, "request")} that came in between ${skipped === 1 ? "is" : "are"} not listed: at most 200 a second are.</p>`}
  </section>`;
}

// The lines that have all of the words, in any case.
function kept(lines, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return lines;
  return lines.split("\n").filter((line) => wanted.every((word) => line.toLowerCase().includes(word))).join("\n");
}

function Log({ source, follow, words }) {
  const [lines, setLines] = useState("");
  const [fault, setFault] = useState(null);
  const [turn, setTurn] = useState(0);
  const box = useRef(null);
  useEffect(() => {
    const stop = new AbortController();
    setLines("");
    setFault(null);
    (async () => {
      try {
        for await (const piece of text(`logs?lines=300${follow ? "&follow=true" : ""}${source ? `&runner=${ref(source)}` : ""}`, stop.signal)) {
          setLines((old) => (old + piece).slice(-KEPT_LOG));
        }
        if (follow && !stop.signal.aborted) setFault(new Error("The log ended with the daemon."));
      } catch (error) {
        if (!stop.signal.aborted) setFault(error);
      }
    })();
    return () => stop.abort();
  }, [source, follow, turn]);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  return html`${fault && html`<${Fault} error=${fault} retry=${() => setTurn(turn + 1)} />`}<pre class="log" ref=${box} tabindex="0" role="log" aria-live="off" aria-label="Log">${!lines ? "The log is empty." : kept(lines, words) || "No line has these words."}</pre>`;
}

function Logs({ runners }) {
  const [open, setOpen] = useState(false);
  const [source, setSource] = useState("");
  const [follow, setFollow] = useState(true);
  const [words, setWords] = useState("");
  const known = source === "" || runners.some((runner) => runner.id === source);
  return html`<section class="card" aria-labelledby="logs"><div class="row"><h2 id="logs">Logs</h2><button type="button" class="small" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>${open ? "Hide" : "Show"}</button></div>
    ${open && html`<div class="toolbar">
      <div class="field"><label for="log-of">Log of</label><select id="log-of" value=${source} onChange=${(event) => setSource(event.target.value)}><option value="">the daemon</option>
        ${runners.map((runner) => html`<option key=${runner.id} value=${runner.id}>${shortName(runner.model_name)} (${runner.backend_name})</option>`)}${!known && html`<option value=${source}>a runner that ended</option>`}</select></div>
      <div class="field"><label for="log-words">Lines with</label><input id="log-words" type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></div>
      <label class="check"><input type="checkbox" checked=${follow} onChange=${(event) => setFollow(event.target.checked)} />Follow</label></div>
    <${Log} source=${source} follow=${follow} words=${words} />`}
  </section>`;
}

export function Requests() {
  const { now, requests, steps, skipped, phase, error } = useStore(live);
  const loaded = useLoaded(async () => (await history(), true), []);
  if (phase === "denied") return html`<h1>Requests</h1><${Fault} error=${{ status: 403, message: error }} />`;
  return html`<header class="title"><h1>Requests</h1></header>
    ${loaded.error && html`<${Fault} error=${loaded.error} retry=${loaded.reload} />`}
    <${Plots} steps=${steps} />
    <${Waterfall} running=${now?.requests || []} ended=${requests} skipped=${skipped} counted=${now?.counted ?? true} />
    <${Logs} runners=${now?.runners || []} />`;
}
