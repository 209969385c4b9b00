// Usage by model, key or day, and the API keys.
import { html, useState } from "./preact-htm.js";
import { call, get, makeKey, post, ref } from "./api.js";
import { Action, Badge, Dialog, Empty, Fault, Field, Loaded, NONE, act, number, seconds, useLoaded } from "./parts.js";

const SCOPES = [["inference", "ask models"], ["models", "pull, tag and remove models"], ["admin", "everything else"]];
const LIMITS = [["requests_per_minute", "Requests per minute"], ["tokens_per_minute", "Tokens per minute"], ["concurrency", "Requests at once"]];

function Totals() {
  const [by, setBy] = useState("model");
  const [since, setSince] = useState("30d");
  const usage = useLoaded((signal) => get(`usage?by=${by}&since=${since}`, signal), [by, since]);
  return html`<section class="card" aria-labelledby="totals"><div class="row"><h2 id="totals">Requests and tokens</h2>
    <div class="row"><select aria-label="Sum by" style=${{ width: "auto" }} value=${by} onChange=${(event) => setBy(event.target.value)}><option value="model">by model</option><option value="key">by key</option><option value="day">by day</option></select>
      <select aria-label="Since" style=${{ width: "auto" }} value=${since} onChange=${(event) => setSince(event.target.value)}><option value="1d">last day</option><option value="7d">last 7 days</option><option value="30d">last 30 days</option><option value="365d">last year</option></select></div></div>
    <${Loaded} of=${usage}>${(rows) => !rows.length ? html`<${Empty} icon="usage" title="Nothing was counted">Usage is counted with <code>telemetry = true</code> in config.toml, or once there is an API key.<//>` : html`<div class="scroll" tabindex="0" role="region" aria-label="Usage"><table class="stack">
      <thead><tr><th>${by === "day" ? "Day (UTC)" : by === "key" ? "Key" : "Model"}</th><th class="number">Requests</th><th class="number">Prompt tokens</th><th class="number">Answer tokens</th><th class="number">Engine time</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.name}><td><strong>${row.name || "nobody named"}</strong></td><td class="number" data-label="Requests">${number(row.requests)}</td><td class="number" data-label="Prompt tokens">${number(row.prompt_tokens)}</td><td class="number" data-label="Answer tokens">${number(row.completion_tokens)}</td><td class="number" data-label="Engine time">${seconds(row.engine_seconds)}</td></tr>`)}</tbody>
    </table></div>`}<//>
  </section>`;
}

function Secret({ made, onClose }) {
  return html`<${Dialog} title=${`The key ${made.key.name}`} onClose=${onClose}>
    <p>Keep this text now: nobody can see it again.</p><code class="secret">${made.text}</code>
    <div class="row end"><${Action} run=${async () => (await navigator.clipboard.writeText(made.text), "Copied")}>Copy<//><button type="button" class="primary" onClick=${onClose}>Done</button></div>
  <//>`;
}

function Create({ first, onMade, onClose }) {
  const [values, setValues] = useState({ name: "", scopes: first ? ["inference", "models", "admin"] : ["inference"], models: "", priority: "normal", expires: "" });
  const [fault, setFault] = useState(null);
  const set = (name) => (event) => setValues({ ...values, [name]: event.target.value });
  const create = async (event) => {
    event.preventDefault();
    const body = { name: values.name.trim(), scopes: values.scopes, models: values.models.split(/[\s,]+/).filter(Boolean), priority: values.priority };
    for (const [name] of LIMITS) if (values[name]) body[name] = Number(values[name]);
    if (values.expires.trim()) body.expires = values.expires.trim();
    try {
      onMade(await makeKey(body, first));
    } catch (error) {
      setFault(error);
    }
  };
  return html`<${Dialog} title="A new API key" onClose=${onClose}><form class="form" onSubmit=${create}>
    ${first && html`<p class="notice warn">With the first key, this page and every program on TCP need one. This tab logs in with it.</p>`}
    <${Field} label="Name">${(given) => html`<input ...${given} required value=${values.name} onInput=${set("name")} autocomplete="off" />`}<//>
    <fieldset><legend>Scopes</legend>${SCOPES.map(([scope, hint]) => html`<label class="check" key=${scope}><input type="checkbox" checked=${values.scopes.includes(scope)} onChange=${(event) => setValues({ ...values, scopes: event.target.checked ? [...values.scopes, scope] : values.scopes.filter((each) => each !== scope) })} />${scope} <span class="muted">${hint}</span></label>`)}</fieldset>
    <div class="form two">
      <${Field} label="Models" hint="Patterns such as hf.co/*; empty for all.">${(given) => html`<input ...${given} value=${values.models} onInput=${set("models")} />`}<//>
      <${Field} label="Expires after" hint="30d, 12h; empty for never.">${(given) => html`<input ...${given} value=${values.expires} onInput=${set("expires")} />`}<//>
      ${LIMITS.map(([name, label]) => html`<${Field} key=${name} label=${label}>${(given) => html`<input ...${given} type="number" min="1" value=${values[name] ?? ""} onInput=${set(name)} placeholder="no limit" />`}<//>`)}
      <${Field} label="Priority">${(given) => html`<select ...${given} value=${values.priority} onChange=${set("priority")}><option>normal</option><option>batch</option></select>`}<//>
    </div>
    ${fault && html`<${Fault} error=${fault} />`}
    <div class="row end"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${!values.name.trim() || !values.scopes.length}>Create</button></div>
  </form><//>`;
}

function Keys() {
  const keys = useLoaded((signal) => get("keys", signal), []);
  const [opened, open] = useState({});
  const close = () => (open({}), keys.reload());
  const isLast = keys.value?.length === 1;
  const revoke = (name) => act(async () => {
    await call("DELETE", `keys/${ref(name)}${isLast ? "?open=true" : ""}`);
    close();
    return `The key ${name} is revoked`;
  });
  return html`<section class="card" aria-labelledby="keys"><div class="row"><h2 id="keys">API keys</h2>${keys.value && html`<button type="button" class="small" onClick=${() => open({ create: true })}>New key</button>`}</div>
    <${Loaded} of=${keys}>${(found) => !found.length ? html`<${Empty} icon="usage" title="There are no keys">Whoever reaches this port may do everything. With the first key, everybody on TCP needs one.<//>` : html`<div class="scroll" tabindex="0" role="region" aria-label="Keys"><table class="stack">
      <thead><tr><th>Name</th><th>Scopes</th><th>Models</th><th>Limits</th><th>Expires</th><th><span class="hidden">Actions</span></th></tr></thead>
      <tbody>${found.map((each) => html`<tr key=${each.name}>
        <td><strong>${each.name}</strong>${each.priority === "batch" && html` <${Badge}>batch<//>`}</td><td data-label="Scopes">${each.scopes.join(", ")}</td><td data-label="Models">${each.models.join(", ") || "all"}</td>
        <td data-label="Limits">${LIMITS.filter(([name]) => each[name]).map(([name, label]) => `${number(each[name])} ${label.toLowerCase()}`).join(", ") || NONE}</td>
        <td data-label="Expires">${each.expired ? html`<${Badge} kind="bad">expired<//>` : each.expires ? new Date(each.expires).toLocaleDateString() : "never"}</td>
        <td><div class="row end"><${Action} kind="small" label=${`Rotate the key ${each.name}`} run=${async () => open({ secret: await post(`keys/${ref(each.name)}/rotate`) })}>Rotate<//><button type="button" class="small" aria-label=${`Revoke the key ${each.name}`} onClick=${() => open({ revoke: each.name })}>Revoke</button></div></td>
      </tr>`)}</tbody></table></div>`}<//>
    ${opened.create && html`<${Create} first=${!keys.value.length} onMade=${(made) => open({ secret: made })} onClose=${() => open({})} />`}
    ${opened.secret && html`<${Secret} made=${opened.secret} onClose=${close} />`}
    ${opened.revoke && html`<${Dialog} title=${`Revoke the key ${opened.revoke}?`} onClose=${() => open({})}><p>Its clients are refused at once, and what it stored stays out of reach of other keys.</p>
      ${isLast && html`<p class="notice warn">It is the last key: without it, whoever reaches this port may do everything, whatever key they send.</p>`}
      <div class="row end"><button type="button" onClick=${() => open({})}>Keep it</button><button type="button" class="danger" onClick=${() => revoke(opened.revoke)}>${isLast ? "Revoke and open" : "Revoke"}</button></div><//>`}
  </section>`;
}

export const Usage = () => html`<header class="title"><h1>Usage</h1></header><${Totals} /><${Keys} />`;
