// Machine: processor, memory and devices of the last hour, engines, disk, and the settings of the daemon.
import { html, useEffect, useState } from "./preact-htm.js";
import { get, post } from "./api.js";
import { live, useStore } from "./live.js";
import { Action, Badge, Dialog, Fault, Field, Loaded, NONE, act, bytes, number, plural, shortName, useLoaded } from "./parts.js";
import { Plot } from "./plot.js";
import { Work, start, work } from "./work.js";

const STEP = 10; // seconds
const VARIANTS = ["cuda", "rocm", "vulkan", "metal", "cpu"]; // llama.cpp's
const percent = (value) => `${number(value)} %`;

function Hour() {
  const [turn, setTurn] = useState(0);
  const loaded = useLoaded((signal) => get("engines/machine", signal), [turn]);
  useEffect(() => {
    const timer = setInterval(() => setTurn((old) => old + 1), STEP * 1000);
    return () => clearInterval(timer);
  }, []);
  return html`<section class="card" aria-labelledby="hour"><h2 id="hour">The last hour</h2><${Loaded} of=${loaded}>${({ devices, totals, steps }) => {
    const place = (time) => Math.floor(time / STEP);
    const to = steps.length ? place(steps.at(-1).time) : place(Date.now() / 1000);
    const found = new Map(steps.map((step) => [place(step.time), step]));
    const line = (pick) => Array.from({ length: 360 }, (_, i) => to - 359 + i).map((at) => [at * STEP, found.has(at) ? pick(found.get(at)) ?? null : null]);
    const range = { from: (to - 359) * STEP, to: to * STEP };
    const names = devices.map((name, i) => (devices.length > 1 ? `${i}: ${name}` : name));
    const busy = [{ name: "processor", hue: 0, points: line((step) => step.processor) }, ...names.map((name, i) => ({ name, hue: (i + 1) % 6, points: line((step) => step.busy[i]) }))];
    const full = [`main memory, ${bytes(totals[0])}`, ...names.map((name, i) => `${name}, ${bytes(totals[i + 1])}`)].map((name, i) => ({ name, hue: i % 6, points: line((step) => (step.memory[i] == null ? null : (100 * step.memory[i]) / Math.max(1, totals[i]))) }));
    return html`<div class="plots"><${Plot} title="Busy" most=${100} show=${percent} lines=${busy} ...${range} /><${Plot} title="Memory in use" most=${100} show=${percent} lines=${full} ...${range} /></div>`;
  }}<//></section>`;
}

function Engine({ name, status, usage, remove }) {
  const [variant, setVariant] = useState("");
  const [word, ...rest] = status.split(": ");
  const missing = word === "Not Installed", works = word === "Running"; // it can run
  const order = (title, action, more) => () => start(`${title} ${name}`, `engines/${action}-backend`, { backend: name, ...more });
  return html`<li class="engine" aria-label=${name}><div class="row"><div class="grow"><strong>${name}</strong> <${Badge} kind=${missing ? "" : works ? "good" : "warn"}>${works ? "installed" : word.toLowerCase()}<//> <span class="muted">${rest.join(": ")}</span>
      ${usage && html` <span class="hint figure">${bytes(usage.size)}${usage.state ? `, ${bytes(usage.state)} of saved conversations` : ""}</span>`}</div>
    <div class="row end">${name === "llama.cpp" && html`<select aria-label=${`Variant of ${name}`} style=${{ width: "auto" }} value=${variant} onChange=${(event) => setVariant(event.target.value)}><option value="">what suits this machine</option>${VARIANTS.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select>`}
      <button type="button" class="small" aria-label=${`Install ${name}`} onClick=${order("Install", "install", variant ? { variant } : {})}>Install</button>
      ${!missing && html`<button type="button" class="small" aria-label=${`Update ${name}`} onClick=${order("Update", "update", variant ? { variant } : {})}>Update</button><button type="button" class="small" aria-label=${`Remove ${name}`} onClick=${remove}>Remove</button>`}</div></div></li>`;
}

function Engines({ usage, changed }) {
  const { done } = useStore(work);
  const loaded = useLoaded((signal) => get("engines/status", signal), [done, changed]);
  const [doomed, setDoomed] = useState(null);
  const remove = () => (setDoomed(null), start(`Remove ${doomed}`, "engines/uninstall-backend", { backend: doomed }));
  return html`<section class="card" aria-labelledby="engines"><h2 id="engines">Engines</h2>
    <${Loaded} of=${loaded}>${(found) => html`<ul class="lines engines">${Object.entries(found).map(([name, status]) => html`<${Engine} key=${name} name=${name} status=${status} usage=${usage?.backends.find((each) => each.name === name)} remove=${() => setDoomed(name)} />`)}</ul>`}<//>
    <${Work} />
    <p class="hint">The logs of running engines stand under <a href="#/requests">Requests</a>.</p>
    ${doomed && html`<${Dialog} title=${`Remove ${doomed}?`} onClose=${() => setDoomed(null)}><p>Its models stay. The next one that needs this engine installs it again.</p>
      <div class="row end"><button type="button" onClick=${() => setDoomed(null)}>Keep it</button><button type="button" class="danger" onClick=${remove}>Remove</button></div><//>`}
  </section>`;
}

function Prune({ found, onClose }) {
  const [fault, setFault] = useState(null);
  const remove = async () => {
    try {
      const { freed } = await post("models/prune");
      act(() => `${bytes(freed)} came free`);
      onClose(true);
    } catch (error) {
      setFault(error);
    }
  };
  return html`<${Dialog} title="Remove leftovers?" onClose=${() => onClose(false)}>
    ${found.removed.length ? html`<p>These belong to no model, and take <strong class="figure">${bytes(found.freed)}</strong>:</p><ul class="form">${found.removed.slice(0, 50).map((each) => html`<li key=${each.name}>${each.kind} <span class="muted">${shortName(each.name)}</span> <span class="figure">${bytes(each.size)}</span></li>`)}</ul>` : html`<p>There are none.</p>`}
    ${fault && html`<${Fault} error=${fault} />`}
    <div class="row end"><button type="button" onClick=${() => onClose(false)}>${found.removed.length ? "Keep them" : "Close"}</button>${found.removed.length > 0 && html`<button type="button" class="danger" onClick=${remove}>Remove</button>`}</div>
  <//>`;
}

function Disk({ of }) {
  const [found, setFound] = useState(null);
  const close = (again) => (setFound(null), again && of.reload());
  const forget = async () => {
    const { freed } = await post("engines/prune");
    of.reload();
    return `${bytes(freed)} came free`;
  };
  return html`<section class="card" aria-labelledby="disk"><h2 id="disk">Disk</h2><${Loaded} of=${of}>${({ folders, backends, default_backend_disk_usage: engines }) => {
    const saved = backends.reduce((sum, each) => sum + each.state, 0);
    return html`<div class="scroll" tabindex="0" role="region" aria-label="Folders"><table class="stack"><thead><tr><th>Folder of models</th><th class="number">Models</th><th class="number">Unfinished</th><th class="number">Free</th></tr></thead>
      <tbody>${folders.map((each) => html`<tr key=${each.path}><td><code>${each.path}</code>${each.absent && html` <${Badge} kind="bad">away<//> ${each.absent}`}</td><td class="number" data-label="Models">${each.absent ? NONE : bytes(each.size)}</td><td class="number" data-label="Unfinished">${each.absent ? NONE : bytes(each.partial)}</td><td class="number" data-label="Free">${each.absent ? NONE : bytes(each.free)}</td></tr>`)}</tbody></table></div>
      <p class="muted">Engines take <span class="figure">${bytes(engines)}</span>, saved conversations <span class="figure">${bytes(saved)}</span>.</p>
      <div class="row start"><${Action} kind="small" run=${async () => setFound(await post("models/prune?dry_run=true"))}>Remove leftovers<//>${saved > 0 && html`<${Action} kind="small" run=${forget}>Forget saved conversations<//>`}</div>`;
  }}<//>${found && html`<${Prune} found=${found} onClose=${close} />`}</section>`;
}

// The settings by what they are about: each with its default, and what it says.
const GROUPS = {
  Memory: { keep_alive: ["5m", "how long an idle model stays loaded; 0 unloads it at once, -1 keeps it"], memory_budget: ["what is free", "the most main memory of all models, as 24GiB"], memory_reserve: ["10 %", "what the default budget leaves alone, as 2GiB"] },
  Requests: { max_queue: ["512", "how many may wait for one model"], max_wait: ["10m", "the longest wait of one"], max_seconds: ["none", "the longest work on one, as 20m"] },
  Disk: { models_quota: ["none", "the most bytes of all models, as 500GiB"], download_rate: ["none", "bytes per second of all pulls, as 10MiB"], verify_every: ["never", "reads the files of models again, as 30d"] },
  Records: { telemetry: ["false", "counts requests, and keeps the last ones without their texts"], log_level: ["info", "how much the log says"], access_log: ["off", "a line for each request"] },
};
const CHOICES = { telemetry: ["true", "false"], log_level: ["debug", "info", "warning", "error"], access_log: ["off", "text", "json"] };

// The settings that the daemon lets a page write, and what a reload does with those that it does not have yet.
function Settings() {
  const loaded = useLoaded(async (signal) => {
    const [settings, { changes }] = await Promise.all([get("engines/settings", signal), post("engines/reload", { dry_run: true }, signal)]);
    return { settings, changes };
  }, []);
  const [edited, edit] = useState({});
  const save = (event) => (event.preventDefault(), act(async () => {
    await post("engines/settings", { values: edited });
    edit({});
    loaded.reload();
    return "config.toml is written";
  }));
  const apply = async () => {
    const { changes } = await post("engines/reload");
    loaded.reload();
    return `${plural(changes.length, "setting")} read again`;
  };
  return html`<section class="card" aria-labelledby="settings"><div class="row"><h2 id="settings">Settings</h2><button type="button" class="small" onClick=${loaded.reload}>Read the file again</button></div>
    <${Loaded} of=${loaded}>${({ settings, changes }) => html`<form class="form" onSubmit=${save}><div class="form two compact">${Object.entries(GROUPS).map(([title, group]) => html`<fieldset key=${title}><legend>${title}</legend>${Object.entries(group).map(([name, [standard, hint]]) => {
      const { value, source } = settings.find((each) => each.name === name) || { value: "", source: "" };
      const fixed = source.startsWith("MODELRUNNER_"), shown = edited[name] ?? value;
      const set = (event) => edit({ ...edited, [name]: event.target.value });
      return html`<${Field} key=${name} label=${name} hint=${fixed ? `set by ${source}` : hint}>${(given) => (CHOICES[name]
        ? html`<select ...${given} disabled=${fixed} value=${shown} onChange=${set}><option value="">${standard} (default)</option>${CHOICES[name].map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select>`
        : html`<input ...${given} disabled=${fixed} placeholder=${standard} value=${shown} onInput=${set} />`)}<//>`;
    })}</fieldset>`)}</div><div class="row end"><button type="submit" class="primary" disabled=${!Object.keys(edited).length}>Write config.toml</button></div></form>
      ${changes.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="What a reload does"><table class="stack"><thead><tr><th>Setting</th><th>Now</th><th>In config.toml</th><th>A reload</th></tr></thead>
        <tbody>${changes.map((each) => html`<tr key=${each.what}><td><code>${each.what}</code></td><td data-label="Now">${each.from}</td><td data-label="In the file">${each.to}</td><td data-label="A reload">${each.effect}</td></tr>`)}</tbody></table></div>
        <div><${Action} kind="small" run=${apply}>Reload<//></div>`}
      <p class="hint">The other settings name programs, folders and addresses: <code>modelrunner config</code> shows them and their file.</p>`}<//>
  </section>`;
}

export function Machine() {
  const { phase, error, events } = useStore(live);
  const { done } = useStore(work);
  const changed = events.findLast((event) => ["pull", "install", "remove", "move"].includes(event.event))?.id;
  const disk = useLoaded((signal) => get("engines/df", signal), [done, changed]);
  if (phase === "denied") return html`<h1>Machine</h1><${Fault} error=${{ status: 403, message: error }} />`;
  return html`<header class="title"><h1>Machine</h1></header><${Hour} /><${Engines} usage=${disk.value} changed=${changed} /><${Disk} of=${disk} /><${Settings} />`;
}
