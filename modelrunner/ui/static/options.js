// The options of a conversation: system prompt, sampling, a schema, tools, presets of these, and the request as code.
import { html, useState } from "./preact-htm.js";
import { body } from "./answers.js";
import { get } from "./api.js";
import { Action, Dialog, Field } from "./parts.js";

const PRESETS = "modelrunner-presets";
const NUMBERS = [
  ["temperature", "0 is the same answer each time; the model's own if empty", 0, 5, "any"],
  ["top_p", "only tokens of the likeliest part", 0, 1, "any"],
  ["top_k", "only so many of the likeliest tokens", 0, undefined, "1"],
  ["min_p", "only tokens with this part of the likeliest one's probability", 0, 1, "any"],
  ["max_tokens", "where an answer is cut off", 1, undefined, "1"],
  ["seed", "for an answer that can be repeated", undefined, undefined, "1"],
  ["presence_penalty", "against what was said at all", -2, 2, "any"],
  ["frequency_penalty", "against what was said often", -2, 2, "any"],
  ["repeat_penalty", "llama.cpp's; 1 is none", 0, undefined, "any"],
];
const EFFORTS = ["none", "low", "medium", "high"];

function presets() {
  try {
    return JSON.parse(localStorage.getItem(PRESETS)) || {};
  } catch {
    return {};
  }
}

const json = (value) => (value === undefined ? "" : JSON.stringify(value, null, 1));
const texts = (system, sampling) => ({ ...sampling, system, tools: json(sampling.tools), schema: json(sampling.schema), stop: (sampling.stop || []).join("\n") });

// Returns the fields of a conversation that the form's texts mean. Throws what is wrong with them.
function meant(values) {
  const sampling = Object.fromEntries(NUMBERS.map(([name]) => [name, values[name]]).filter(([, value]) => value !== undefined && value !== "").map(([name, value]) => [name, Number(value)]));
  if (values.reasoning_effort) sampling.reasoning_effort = values.reasoning_effort;
  if (values.stop.trim()) sampling.stop = values.stop.split("\n").filter(Boolean);
  for (const [name, word] of [["tools", "tools are"], ["schema", "schema is"]]) {
    try {
      if (values[name].trim()) sampling[name] = JSON.parse(values[name]);
    } catch {
      throw new Error(`The ${word} not valid JSON.`);
    }
  }
  return { system: values.system, sampling };
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(path, asked) {
  return `curl ${location.origin}/${path} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(asked))}`;
}

function python(path, asked) {
  return `import json, urllib.request

body = json.loads(r"""${JSON.stringify(asked, null, 1).replaceAll('"""', '\\u0022\\u0022\\u0022')}""")
request = urllib.request.Request("${location.origin}/${path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))
print(${path.endsWith("chat/completions") ? 'answer["choices"][0]["message"]["content"]' : 'answer["choices"][0]["text"]'})`;
}

export function Options({ talk, messages, plain, change, onClose }) {
  const [values, setValues] = useState(texts(talk.system, talk.sampling));
  const [named, setNamed] = useState("");
  const [known, setKnown] = useState(presets);
  const [fault, setFault] = useState("");
  const attempt = (work) => {
    try {
      setFault("");
      return work(meant(values));
    } catch (error) {
      setFault(error.message);
      return undefined;
    }
  };
  const submit = (event) => {
    event.preventDefault();
    attempt((found) => (change(found), onClose()));
  };
  const store = (all) => (localStorage.setItem(PRESETS, JSON.stringify(all)), setKnown(all));
  const keep = () => attempt((found) => store({ ...known, [named.trim()]: found }));
  const drop = () => store(Object.fromEntries(Object.entries(known).filter(([name]) => name !== named)));
  const choose = (event) => {
    const found = known[event.target.value];
    setNamed(event.target.value);
    if (found) setValues(texts(found.system, found.sampling));
  };
  const code = (write) => async () => {
    const { stream, stream_options: options, ...asked } = attempt((found) => body({ ...talk, ...found }, messages, plain)) || {};
    if (!asked.model) throw new Error("Mend the options first.");
    await navigator.clipboard.writeText(write(plain ? "v1/completions" : "v1/chat/completions", asked));
    return "Copied";
  };
  const addTools = async () => {
    const { data, errors } = await get("v1/tools");
    const added = data.map(({ name, description, parameters }) => ({ type: "function", function: { name, description, parameters } }));
    if (!added.length) throw new Error(Object.values(errors)[0] || "The daemon has no tools: `[mcp.NAME]` in config.toml names a server of them.");
    attempt(({ sampling }) => setValues({ ...values, tools: json([...(sampling.tools || []).filter((each) => !added.some((one) => one.function.name === each.function?.name)), ...added]) }));
    return `${added.length} tools are added`;
  };
  const set = (name) => (event) => setValues({ ...values, [name]: event.target.value });
  return html`<${Dialog} wide title="Options of this conversation" onClose=${onClose}>
    <form class="form" onSubmit=${submit}>
      <div class="toolbar">
        ${Object.keys(known).length > 0 && html`<div class="field"><label for="preset">Preset</label><select id="preset" value=${known[named] ? named : ""} onChange=${choose}><option value="">none</option>${Object.keys(known).sort().map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></div>`}
        <div class="field"><label for="preset-name">Name of a preset</label><input id="preset-name" value=${named} onInput=${(event) => setNamed(event.target.value)} /></div>
        <button type="button" disabled=${!named.trim()} onClick=${keep}>Keep as a preset</button>${known[named] && html`<button type="button" class="danger" onClick=${drop}>Remove the preset</button>`}
      </div>
      <${Field} label="System prompt">${(given) => html`<textarea ...${given} rows="4" dir="auto" value=${values.system} onInput=${set("system")}></textarea>`}<//>
      <div class="form two">${NUMBERS.map(([name, hint, min, max, step]) => html`<${Field} key=${name} label=${name} hint=${hint}>${(given) => html`<input ...${given} type="number" min=${min} max=${max} step=${step} value=${values[name] ?? ""} onInput=${set(name)} />`}<//>`)}
        <${Field} label="reasoning_effort" hint="how long it thinks">${(given) => html`<select ...${given} value=${values.reasoning_effort || ""} onChange=${set("reasoning_effort")}><option value="">the model's own</option>${EFFORTS.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select>`}<//>
        <${Field} label="stop" hint="texts that end an answer, one on each line">${(given) => html`<textarea ...${given} rows="2" value=${values.stop} onInput=${set("stop")}></textarea>`}<//></div>
      <${Field} label="JSON schema" hint="Answers are JSON of this schema.">${(given) => html`<textarea ...${given} rows="3" class="mono" value=${values.schema} onInput=${set("schema")}></textarea>`}<//>
      <${Field} label="Tools" hint="A JSON list, as OpenAI's API has it. Calls are shown; those of the daemon's tools run when you say so.">${(given) => html`<textarea ...${given} rows="3" class="mono" value=${values.tools} onInput=${set("tools")}></textarea>`}<//>
      <div><${Action} kind="small" run=${addTools}>Add the daemon's tools<//></div>
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}
      <div class="row"><div class="row start"><${Action} kind="small" run=${code(curl)}>Copy as curl<//><${Action} kind="small" run=${code(python)}>Copy as Python<//></div>
        <div class="row end"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary">Save</button></div></div>
    </form>
  <//>`;
}
