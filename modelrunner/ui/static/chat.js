// Chat: conversations with any model, streamed.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { get } from "./api.js";
import { Markdown } from "./markdown.js";
import { Bar, Dialog, Empty, Fault, Field, Icon, IconButton, act, number, seconds, shortName, useLoaded } from "./parts.js";
import { answer, blank, chat, exported, forget, open, save, stop, take } from "./talks.js";
import { useStore } from "./live.js";

const LARGEST_IMAGE = 8 << 20;
const titleOf = (talk) => talk.title || talk.messages.find((message) => message.role === "user")?.content.slice(0, 60) || "New conversation";

const readImage = (file) => new Promise((resolve, reject) => {
  if (!file.type.startsWith("image/")) return reject(new Error(`${file.name} is no image.`));
  if (file.size > LARGEST_IMAGE) return reject(new Error(`${file.name} is larger than 8 MiB.`));
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
  reader.readAsDataURL(file);
});

function Waiting({ waiting }) {
  const { stage, position, expected_seconds: left, waited } = waiting;
  const parts = [stage ? `Its model: ${stage}` : "Waiting for the answer", position > 1 && `place ${position} in line`, left > 0 && `about ${seconds(left)} left`].filter(Boolean);
  return html`<div class="waiting-line" role="status"><${Bar} part=${left != null && left + waited > 0 ? waited / (waited + left) : null} label="Waiting for the model" /><p class="figure">${parts.join(" · ")}</p></div>`;
}

function Answer({ message, waiting, growing, tools }) {
  const { content, reasoning, calls, stats, error } = message;
  return html`<article class="message assistant" aria-busy=${growing ? "true" : "false"}>
    <h2 class="who">${shortName(message.model || "Answer")}</h2>
    ${waiting && !content && !reasoning && html`<${Waiting} waiting=${waiting} />`}
    ${reasoning && html`<details class="thought"><summary>${growing && !content ? "Thinking…" : "Thought"}</summary><${Markdown} text=${reasoning} /></details>`}
    ${content && html`<${Markdown} text=${content} />`}
    ${calls?.map((call) => html`<details class="call" open><summary>Calls the tool <code>${call.name}</code></summary><pre class="plain mono">${call.text}</pre></details>`)}
    ${error && html`<div class="notice bad" role="alert"><p>${error}</p></div>`}
    ${!growing && html`<div class="tools">${tools}
      ${message.stopped && html`<span class="speed">stopped</span>`}${message.finish === "length" && html`<span class="speed">cut off at the limit of tokens</span>`}
      ${stats && html`<span class="speed figure">first token ${seconds(stats.first)}${stats.speed ? ` · ${number(stats.speed)} tokens/s` : ""}${stats.tokens ? ` · ${number(stats.tokens)} tokens` : ""}</span>`}</div>`}
  </article>`;
}

const Asked = ({ message, tools }) => html`<article class="message user">
  <h2 class="hidden">You</h2>
  ${message.images?.length > 0 && html`<div class="images">${message.images.map((url, i) => html`<img src=${url} alt=${`Image ${i + 1} of the message`} />`)}</div>`}
  <div class="body">${message.content}</div><div class="tools">${tools}</div>
</article>`;

function Options({ talk, onClose }) {
  const [system, setSystem] = useState(talk.system);
  const [values, setValues] = useState({ ...talk.sampling, tools: talk.sampling.tools ? JSON.stringify(talk.sampling.tools, null, 1) : "" });
  const [fault, setFault] = useState("");
  const numbers = [["temperature", "0 is the same answer each time; the model's own if empty", 0, 5, "any"], ["top_p", "only tokens of the likeliest part", 0, 1, "any"], ["max_tokens", "where an answer is cut off", 1, undefined, "1"], ["seed", "for an answer that can be repeated", undefined, undefined, "1"]];
  const submit = (event) => {
    event.preventDefault();
    const sampling = Object.fromEntries(numbers.map(([name]) => [name, values[name]]).filter(([, value]) => value !== undefined && value !== "").map(([name, value]) => [name, Number(value)]));
    try {
      if (values.tools.trim()) sampling.tools = JSON.parse(values.tools);
    } catch {
      return setFault("The tools are not valid JSON.");
    }
    save({ ...talk, system, sampling });
    onClose();
  };
  const set = (name) => (event) => setValues({ ...values, [name]: event.target.value });
  return html`<${Dialog} title="Options of this conversation" onClose=${onClose}>
    <form class="form" onSubmit=${submit}>
      <${Field} label="System prompt">${(given) => html`<textarea ...${given} rows="4" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea>`}<//>
      <div class="form two">${numbers.map(([name, hint, min, max, step]) => html`<${Field} key=${name} label=${name} hint=${hint}>${(given) => html`<input ...${given} type="number" min=${min} max=${max} step=${step} value=${values[name] ?? ""} onInput=${set(name)} />`}<//>`)}</div>
      <${Field} label="Tools" hint="A JSON list, as OpenAI's API has it. Calls are shown, and nothing is run.">${(given) => html`<textarea ...${given} rows="3" class="mono" value=${values.tools} onInput=${set("tools")}></textarea>`}<//>
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}
      <div class="row end"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary">Save</button></div>
    </form>
  <//>`;
}

function Composer({ busy, sees, draft, setDraft, send, editing, cancel, ready }) {
  const field = useRef(null);
  const files = useRef(null);
  useEffect(() => field.current?.focus(), [editing]);
  const add = (list) => act(async () => {
    const images = await Promise.all([...list].filter((file) => file.type.startsWith("image/")).map(readImage));
    setDraft((old) => ({ ...old, images: [...old.images, ...images] }));
  });
  const submit = (event) => {
    event.preventDefault();
    if (!busy && ready && (draft.text.trim() || draft.images.length)) send();
  };
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && editing != null) cancel();
  };
  return html`<div class="composer"><form onSubmit=${submit}>
    ${editing != null && html`<div class="row"><p class="hint">Editing a message: what followed it is asked anew.</p><button type="button" class="small quiet" onClick=${cancel}>Cancel</button></div>`}
    ${draft.images.length > 0 && html`<div class="images">${draft.images.map((url, i) => html`<figure key=${i}><img src=${url} alt=${`Image ${i + 1} to send`} /><${IconButton} icon="close" label=${`Remove image ${i + 1}`} onClick=${() => setDraft((old) => ({ ...old, images: old.images.filter((_, j) => j !== i) }))} /></figure>`)}</div>`}
    <textarea ref=${field} rows="1" aria-label="Message" placeholder="Write a message" value=${draft.text} onKeyDown=${typed} onInput=${(event) => setDraft((old) => ({ ...old, text: event.target.value }))} onPaste=${(event) => sees && event.clipboardData.files.length && add(event.clipboardData.files)}></textarea>
    <div class="row"><div class="row start">
      ${sees && html`<input ref=${files} type="file" accept="image/*" multiple hidden onChange=${(event) => (add(event.target.files), (event.target.value = ""))} /><${IconButton} icon="image" label="Add images" onClick=${() => files.current.click()} />`}
      <span class="hint hide-small">Enter sends, Shift and Enter makes a new line</span></div>
      ${busy ? html`<button type="button" class="primary" aria-label="Stop the answer" title="Stop" onClick=${stop}><${Icon} name="stop" /></button>` : html`<button type="submit" class="primary" aria-label="Send" title="Send" disabled=${!ready || (!draft.text.trim() && !draft.images.length)}><${Icon} name="send" /></button>`}
    </div>
  </form></div>`;
}

function Talks({ talks, current, shown, close, anew }) {
  const [doomed, setDoomed] = useState(null);
  const file = useRef(null);
  const download = () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([exported()], { type: "application/json" }));
    link.download = "conversations.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const upload = (event) => act(async () => {
    const [chosen] = event.target.files;
    event.target.value = "";
    return `${await take(await chosen.text())} conversations are imported`;
  });
  return html`<aside class=${`talks${shown ? " open" : ""}`} aria-label="Conversations" onKeyDown=${(event) => event.key === "Escape" && close()}>
    <div class="row"><a class="button small" href="#/chat/new" onClick=${() => (anew(), close())}><${Icon} name="plus" />New</a>
      <span class="row"><${IconButton} icon="down" label="Export the conversations" onClick=${download} disabled=${!talks.length} /><${IconButton} icon="up" label="Import conversations" onClick=${() => file.current.click()} /><span class="only-small"><${IconButton} icon="close" label="Close the list" onClick=${close} /></span></span></div>
    <input ref=${file} type="file" accept="application/json" aria-label="File of conversations" hidden onChange=${upload} />
    ${!talks.length && html`<p class="hint">Conversations are kept in this browser alone.</p>`}
    <ul>${talks.map((talk) => html`<li key=${talk.id} class=${talk.id === current ? "current" : ""}>
      <a href=${`#/chat/${talk.id}`} aria-current=${talk.id === current ? "true" : undefined} onClick=${close}>${titleOf(talk)}</a>
      <${IconButton} icon="trash" label=${`Delete: ${titleOf(talk)}`} onClick=${() => setDoomed(talk)} /></li>`)}</ul>
    ${doomed && html`<${Dialog} title="Delete this conversation?" onClose=${() => setDoomed(null)}>
      <p>“${titleOf(doomed)}” is kept nowhere else.</p>
      <div class="row end"><button type="button" onClick=${() => setDoomed(null)}>Keep it</button>
      <button type="button" class="danger" onClick=${() => (setDoomed(null), act(() => forget(doomed.id)), doomed.id === current && (location.hash = "#/chat"))}>Delete</button></div><//>`}
  </aside>`;
}

export function Chat({ rest }) {
  const { talks, answering, fault } = useStore(chat);
  const models = useLoaded(async (signal) => (await get("v1/models", signal)).data, []);
  useEffect(() => {
    if (!talks) open();
  }, []);
  if (!talks) return null;
  return html`<${Frame} key=${rest[0] === "new" ? `new/${rest[1] || ""}` : rest[0] || "last"} rest=${rest} talks=${talks} answering=${answering} fault=${fault} models=${models} />`;
}

function Frame({ rest, talks, answering, fault, models }) {
  const speaking = (models.value || []).filter((model) => model.capabilities.includes("chat") || model.capabilities.includes("completion"));
  const [fresh, setFresh] = useState(() => blank(rest[1] || ""));
  const known = talks.find((talk) => talk.id === (rest[0] === "new" ? fresh.id : rest[0] || talks[0]?.id));
  const talk = known || fresh;
  const [draft, setDraft] = useState({ text: "", images: [] });
  const [editing, setEditing] = useState(null);
  const [options, setOptions] = useState(false);
  const [listed, setListed] = useState(false);
  const name = talk.model || talks.find((each) => speaking.some((model) => model.id === each.model))?.model || speaking[0]?.id || "";
  const model = speaking.find((each) => each.id === name);
  const plain = model && !model.capabilities.includes("chat");
  const mine = answering?.id === talk.id ? answering : null;
  const change = (news) => (known ? save({ ...known, ...news }) : setFresh({ ...fresh, ...news }));
  const ask = (messages) => {
    setEditing(null);
    if (!known) history.replaceState(null, "", `#/chat/${talk.id}`);
    answer({ ...talk, model: name, messages, changed: Date.now() }, plain);
  };
  const send = () => {
    const before = editing == null ? talk.messages : talk.messages.slice(0, editing);
    ask([...before, { role: "user", content: draft.text.trim(), images: draft.images }]);
    setDraft({ text: "", images: [] });
  };
  const edit = (i) => {
    setEditing(i);
    setDraft({ text: talk.messages[i].content, images: talk.messages[i].images || [] });
  };
  const copy = (text) => act(async () => (await navigator.clipboard.writeText(text), "Copied"));
  const end = useRef(null);
  const near = useRef(true);
  useLayoutEffect(() => {
    if (near.current && end.current) end.current.scrollTop = end.current.scrollHeight;
  });
  return html`<div class="chat-frame"><h1 class="hidden">Chat</h1>
    <${Talks} talks=${talks} current=${talk.id} shown=${listed} close=${() => setListed(false)} anew=${() => setFresh(blank(name))} />
    <section class="talk" aria-label="Conversation">
      <div class="talk-head"><span class="only-small"><${IconButton} icon="list" label="Conversations" onClick=${() => setListed(true)} /></span>
        <select aria-label="Model" value=${name} disabled=${!speaking.length} onChange=${(event) => change({ model: event.target.value })}>
          ${!speaking.length && html`<option value="">${models.loading ? "Loading the models…" : "No model"}</option>`}
          ${name && !model && speaking.length > 0 && html`<option value=${name}>${shortName(name)} (not here)</option>`}
          ${speaking.map((each) => html`<option key=${each.id} value=${each.id}>${shortName(each.id)}</option>`)}
        </select>
        <${IconButton} icon="sliders" label="Options of this conversation" onClick=${() => setOptions(true)} />
        ${(talk.system || Object.keys(talk.sampling).length > 0) && html`<span class="hint hide-small">${talk.system ? "with a system prompt" : "with own sampling"}</span>`}
      </div>
      <div class="messages" ref=${end} tabindex="0" role="region" aria-label="Messages" onScroll=${({ currentTarget: box }) => (near.current = box.scrollHeight - box.scrollTop - box.clientHeight < 60)}>
        ${fault && html`<p class="notice warn">${fault}</p>`}
        ${models.error && html`<${Fault} error=${models.error} retry=${models.reload} />`}
        ${!talk.messages.length && !models.error && (speaking.length || models.loading
          ? html`<${Empty} icon="chat" title="Ask a model">What you write goes to ${name ? shortName(name) : "the model"} on this daemon and nowhere else. ${plain && "It has no chat template, so it goes on with your text."}<//>`
          : html`<${Empty} icon="models" title="No model that talks is here"><a href="#/models">Pull one</a>, and come back.<//>`)}
        ${talk.messages.map((message, i) => message.role === "user"
          ? html`<${Asked} key=${i} message=${message} tools=${!mine && html`<${IconButton} icon="edit" label="Edit the message" onClick=${() => edit(i)} /><${IconButton} icon="copy" label="Copy the message" onClick=${() => copy(message.content)} />`} />`
          : html`<${Answer} key=${i} message=${message} tools=${html`<${IconButton} icon="copy" label="Copy the answer" onClick=${() => copy(message.content)} />
              ${i === talk.messages.length - 1 && !mine && html`<${IconButton} icon="retry" label="Ask again" onClick=${() => ask(talk.messages.slice(0, i))} />`}`} />`)}
        ${mine && html`<${Answer} message=${mine.message} waiting=${mine.waiting} growing />`}
      </div>
      <${Composer} busy=${Boolean(mine)} ready=${Boolean(model)} sees=${Boolean(model?.capabilities.includes("vision"))} draft=${draft} setDraft=${setDraft} send=${send} editing=${editing} cancel=${() => (setEditing(null), setDraft({ text: "", images: [] }))} />
    </section>
    ${options && html`<${Options} talk=${{ ...talk, model: name }} onClose=${() => setOptions(false)} />`}
  </div>`;
}
