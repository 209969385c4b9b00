// The settings of a model as a form, made from the daemon's JSON schema of them.
import { html, useState } from "./preact-htm.js";
import { get, post, ref } from "./api.js";
import { Dialog, Fault, Field, Loaded, act, shortName, useLoaded } from "./parts.js";

const LOCAL = new Set(["lora"]); // files of the daemon's machine: named only on its Unix socket
const LONG = new Set(["chat-template"]);

// The schema without null, with its reference followed.
function plain(schema, defs) {
  const known = schema.anyOf?.filter((each) => each.type !== "null") || [schema];
  const one = known.length === 1 ? known[0] : { type: "json" };
  const found = one.$ref ? defs[one.$ref.split("/").at(-1)] : one;
  return { ...found, description: schema.description || (one.$ref ? undefined : found.description) };
}

function kind(schema) {
  if (schema.enum) return "choice";
  if (schema.type === "object" && schema.properties) return "table";
  if (schema.type === "array") return ["string", "integer", "number"].includes(schema.items?.type) ? "list" : "json";
  return ["boolean", "integer", "number", "string"].includes(schema.type) ? schema.type : "json";
}

const shown = (value, schema) => {
  if (value == null) return "";
  const form = kind(schema);
  return form === "list" ? value.join("\n") : form === "json" ? JSON.stringify(value) : String(value);
};

function read(text, schema, name) {
  if (text.trim() === "") return null;
  switch (kind(schema)) {
    case "integer": case "number": return Number(text);
    case "boolean": return text === "true";
    case "list": {
      const words = text.split("\n").map((word) => word.trim()).filter(Boolean);
      return schema.items.type === "string" ? words : words.map(Number);
    }
    case "json":
      try {
        return JSON.parse(text);
      } catch {
        throw new Error(`${name} is not valid JSON.`);
      }
    default: return text;
  }
}

// One level of settings as fields; `path` leads to it, `values` are texts by path.
function Fields({ schema, defs, path, values, effective, set }) {
  return Object.entries(schema.properties).map(([name, raw]) => {
    const found = plain(raw, defs);
    const where = [...path, name];
    const id = where.join(".");
    const form = kind(found);
    if (form === "table") {
      return html`<fieldset key=${id}><legend>${name}</legend>${found.description && path.length === 0 && html`<p class="hint">${found.description.split("\n")[0]}</p>`}
        <div class="form two"><${Fields} schema=${found} defs=${found.$defs || defs} path=${where} values=${values} effective=${effective?.[name]} set=${set} /></div></fieldset>`;
    }
    const now = shown(effective?.[name], found);
    const hint = LOCAL.has(name) ? `${found.description} Set it with modelrunner configure.` : found.description;
    return html`<${Field} key=${id} label=${name} hint=${hint}>${(given) => {
      const common = { ...given, name: id, value: values[id] ?? "", onInput: (event) => set(id, event.target.value), disabled: LOCAL.has(name) };
      if (form === "boolean" || form === "choice") {
        const options = form === "boolean" ? [["true", "on"], ["false", "off"]] : found.enum.map((each) => [each, each]);
        return html`<select ...${common}><option value="">default${now && ` (${options.find(([value]) => value === now)?.[1] || now})`}</option>${options.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select>`;
      }
      if (form === "list" || form === "json" || LONG.has(name)) {
        return html`<textarea ...${common} rows=${LONG.has(name) ? 4 : 2} class="mono" placeholder=${form === "list" ? "one on each line" : ""}></textarea>`;
      }
      const numeric = form === "integer" || form === "number";
      return html`<input ...${common} type=${numeric ? "number" : "text"} step=${form === "number" ? "any" : undefined} min=${found.minimum} max=${found.maximum} placeholder=${now ? `default: ${now}` : "default"} />`;
    }}<//>`;
  });
}

// Texts by path of what is set.
function flat(schema, defs, config, path = [], into = {}) {
  for (const [name, raw] of Object.entries(schema.properties)) {
    const found = plain(raw, defs);
    if (config?.[name] == null) continue;
    if (kind(found) === "table") flat(found, found.$defs || defs, config[name], [...path, name], into);
    else into[[...path, name].join(".")] = shown(config[name], found);
  }
  return into;
}

// A JSON merge patch with the fields that differ.
function patch(schema, defs, before, after, path = []) {
  const found = {};
  for (const [name, raw] of Object.entries(schema.properties)) {
    const each = plain(raw, defs);
    const id = [...path, name].join(".");
    if (kind(each) === "table") {
      const inner = patch(each, each.$defs || defs, before, after, [...path, name]);
      if (Object.keys(inner).length) found[name] = inner;
    } else if ((before[id] ?? "") !== (after[id] ?? "")) {
      found[name] = read(after[id] ?? "", each, id);
    }
  }
  return found;
}

function Form({ model, schema, shown, onClose }) {
  const defs = schema.$defs || {};
  const before = flat(schema, defs, shown.config);
  const [values, setValues] = useState(before);
  const [restart, setRestart] = useState(false);
  const [fault, setFault] = useState(null);
  const [busy, setBusy] = useState(false);
  const save = async (event) => {
    event.preventDefault();
    setBusy(true);
    setFault(null);
    try {
      const changes = patch(schema, defs, before, values);
      if (Object.keys(changes).length || restart) {
        await post("engines/_configure", { model, ...changes, ...(restart ? { apply: "restart" } : {}) });
        act(() => `${shortName(model)} is configured`);
      }
      onClose(true);
    } catch (error) {
      setFault(error);
      setBusy(false);
    }
  };
  return html`<form class="form" onSubmit=${save}>
    ${shown.problem && html`<p class="notice bad">${shown.problem}</p>`}
    ${Object.keys(shown.file).length > 0 && html`<p class="notice">config.toml sets ${Object.keys(shown.file).join(", ")}; what is set here goes before it.</p>`}
    <div class="form two"><${Fields} schema=${schema} defs=${defs} path=${[]} values=${values} effective=${shown.effective} set=${(id, text) => setValues((old) => ({ ...old, [id]: text }))} /></div>
    <label class="check"><input type="checkbox" checked=${restart} onChange=${(event) => setRestart(event.target.checked)} />Apply at once, with a new runner before the old one ends</label>
    ${fault && html`<${Fault} error=${fault} />`}
    <div class="row end"><button type="button" onClick=${() => onClose(false)}>Cancel</button><button type="submit" class="primary" disabled=${busy}>Save</button></div>
  </form>`;
}

export function Settings({ model, onClose }) {
  const loaded = useLoaded(async (signal) => {
    const [schema, [shown]] = await Promise.all([get("engines/_configure/schema", signal), get(`engines/_configure?model=${ref(model)}`, signal)]);
    const own = (shown.effective?.backend || "").replaceAll(".", "");
    const tables = Object.entries(schema.properties).filter(([name, each]) => each.type !== "object" || name === own || name in shown.config);
    return { schema: { ...schema, properties: Object.fromEntries(tables.filter(([, each]) => each.type !== "object" || Object.keys(each.properties || {}).length)) }, shown };
  }, [model]);
  return html`<${Dialog} wide title=${`Settings of ${shortName(model)}`} onClose=${() => onClose(false)}>
    <${Loaded} of=${loaded} lines=${5}>${(found) => html`<${Form} model=${model} ...${found} onClose=${onClose} />`}<//>
  <//>`;
}
