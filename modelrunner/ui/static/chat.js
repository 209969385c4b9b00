// Chat: conversations with any model, streamed.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./preact-htm.js";
import { get } from "./api.js";
import { ask, begin, body, growing, runCalls, stop, stopAllOf } from "./answers.js";
import { Markdown } from "./markdown.js";
import { Options } from "./options.js";
import { Action, Bar, Dialog, Empty, Fault, Field, Icon, IconButton, act, number, seconds, shortName, useLoaded } from "./parts.js";
import { Settings } from "./settings.js";
import { canRecord, hush, reading, record, speak } from "./sound.js";
import { blank, branch, chat, commit, draft, exported, forget, newId, now, search, show, siblings, take, tip } from "./talks.js";
import { useStore } from "./live.js";

const LARGEST_IMAGE = 8 << 20;
const LARGEST_TEXT = 1 << 20;
const FIRST = 10; // messages that are made at once; the earlier ones follow while nothing else is to do

const readImage = (file) => new Promise((resolve, reject) => {
  if (file.size > LARGEST_IMAGE) return reject(new Error(`${file.name} is larger than 8 MiB.`));
  const reader = new FileReader();
  reader.onload = () => resolve({ name: file.name, url: reader.result });
  reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
  reader.readAsDataURL(file);
});

async function readText(file) {
  if (file.size > LARGEST_TEXT) throw new Error(`${file.name} is larger than 1 MiB.`);
  try {
    return { name: file.name, text: new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()) };
  } catch {
    throw new Error(`${file.name} is no text in UTF-8.`);
  }
}

function Waiting({ waiting }) {
  const { stage, position, expected_seconds: left, waited, step, steps } = waiting;
  if (steps) return html`<div class="waiting-line" role="status"><${Bar} part=${step / steps} label="Drawing" /><p class="figure">Step ${step} of ${steps}</p></div>`;
  const parts = [stage ? `Its model: ${stage}` : "Waiting for the answer", position > 1 && `place ${position} in line`, left > 0 && `about ${seconds(left)} left`].filter(Boolean);
  return html`<div class="waiting-line" role="status"><${Bar} part=${left != null && left + waited > 0 ? waited / (waited + left) : null} label="Waiting for the model" /><p class="figure">${parts.join(" · ")}</p></div>`;
}

const Lost = ({ message }) => message.lost > 0 && html`<p class="hint">${message.lost === 1 ? "A picture that was here is" : `${message.lost} pictures that were here are`} gone: this browser has room for newer ones only.</p>`;

function Answer({ message, waiting, tools, run }) {
  const { content, reasoning, calls, stats, error } = message;
  return html`<article class="message assistant" aria-busy=${message.growing ? "true" : "false"}>
    <h2 class="who">${shortName(message.model || "Answer")}</h2>
    ${reasoning && html`<details class="thought"><summary>${message.growing && !content ? "Thinking…" : "Thought"}</summary><${Markdown} text=${reasoning} /></details>`}
    ${content && html`<${Markdown} text=${content} />`}
    ${message.images?.map((url) => html`<a class="drawn" href=${url} download="picture"><img src=${url} alt=${message.growing ? "The picture so far" : "The picture"} /></a>`)}
    <${Lost} message=${message} />
    ${calls?.map((call) => html`<details class="call" open><summary>Calls the tool <code>${call.name}</code></summary><pre class="plain mono">${call.text}</pre></details>`)}
    ${run && html`<div><${Action} kind="small" run=${run}>Run ${calls.length > 1 ? "them" : "it"} on the daemon<//></div>`}
    ${waiting && html`<${Waiting} waiting=${waiting} />`}
    ${error && html`<div class="notice bad" role="alert"><p>${error}</p></div>`}
    ${!message.growing && html`<div class="tools">${tools}
      ${message.stopped && html`<span class="speed">stopped</span>`}${message.finish === "length" && html`<span class="speed">cut off at the limit of tokens</span>`}
      ${stats && html`<span class="speed figure">first token ${seconds(stats.first)}${stats.speed ? ` · ${number(stats.speed)} tokens/s` : ""}${stats.tokens ? ` · ${number(stats.tokens)} tokens` : ""}</span>`}
      ${message.ignored && html`<span class="speed">not read by the engine: ${message.ignored}</span>`}</div>`}
  </article>`;
}

const Asked = ({ message, tools }) => html`<article class="message user">
  <h2 class="hidden">You</h2>
  ${message.images?.length > 0 && html`<div class="images">${message.images.map((url, i) => html`<img src=${url} alt=${`Image ${i + 1} of the message`} />`)}</div>`}
  <${Lost} message=${message} />
  ${message.files?.map((file) => html`<details class="file"><summary>${file.name}</summary><pre class="plain mono" dir="auto">${file.text}</pre></details>`)}
  ${message.content && html`<div class="body" dir="auto">${message.content}</div>`}<div class="tools">${tools}</div>
</article>`;

const Result = ({ message }) => html`<details class="call"><summary>Result of <code>${message.name}</code></summary><pre class="plain mono" dir="auto">${message.content}</pre></details>`;

const ofDaemon = (calls) => calls?.length > 0 && calls.every((call) => call.name.includes("__")); // SERVER__TOOL

function Aloud({ message, model }) {
  const mine = useStore(reading).id === message.id;
  return mine ? html`<${IconButton} icon="stop" label="Stop reading" onClick=${hush} />` : html`<${IconButton} icon="speaker" label="Read the answer aloud" onClick=${() => act(() => speak(message.id, message.content, model))} />`;
}

// A message, which is made again only when it changes. `place` is its number among `count` versions. `voice` is the model
// that speaks.
function Line({ message, waiting, place, count, isLast, busy, voice, acts }) {
  return useMemo(() => {
    if (message.role === "tool") return html`<${Result} message=${message} />`;
    const isAnswer = message.role === "assistant";
    const tools = html`${count > 1 && html`<span class="versions"><${IconButton} icon="left" label="Earlier version" disabled=${place === 0} onClick=${() => acts.turn(message, -1)} />
      <span class="figure">${place + 1} of ${count}</span><${IconButton} icon="right" label="Later version" disabled=${place === count - 1} onClick=${() => acts.turn(message, 1)} /></span>`}
      ${message.content && html`<${IconButton} icon="copy" label=${isAnswer ? "Copy the answer" : "Copy the message"} onClick=${() => act(async () => (await navigator.clipboard.writeText(message.content), "Copied"))} />`}
      ${isAnswer && voice && message.content && html`<${Aloud} message=${message} model=${voice} />`}
      ${!busy && !isAnswer && html`<${IconButton} icon="edit" label="Edit the message" onClick=${() => acts.edit(message)} />`}
      ${!busy && isAnswer && isLast && html`<${IconButton} icon="retry" label="Ask again" onClick=${() => acts.again(message)} />`}`;
    return isAnswer ? html`<${Answer} message=${message} waiting=${waiting} tools=${tools} run=${!busy && isLast && ofDaemon(message.calls) && (() => acts.run(message))} />` : html`<${Asked} message=${message} tools=${tools} />`;
  }, [message, waiting, place, count, isLast, busy, voice]);
}

// Reads an answer aloud to those who listen: each paragraph once it is complete.
function Spoken({ message }) {
  const [text, setText] = useState("");
  const said = useRef({ id: "", place: 0 });
  useEffect(() => {
    if (message?.role !== "assistant") return;
    const { growing: grows, content, id } = message;
    if (grows && said.current.id !== id) said.current = { id, place: 0 };
    if (said.current.id !== id) return;
    const end = grows ? content.lastIndexOf("\n\n") : content.length;
    if (end > said.current.place) {
      setText(content.slice(said.current.place, end));
      said.current.place = end;
    }
  }, [message]);
  return html`<p class="hidden" role="log" aria-label="The answer">${text}</p>`;
}

// Writes down what is said: one press begins, the next one ends.
function Microphone({ model, write }) {
  const [phase, setPhase] = useState("");
  const recording = useRef(null);
  useEffect(() => () => recording.current?.end(), []);
  const press = () => act(async () => {
    try {
      if (!recording.current) {
        setPhase("starts");
        recording.current = await record(model);
        return setPhase("listens");
      }
      setPhase("writes");
      write(await recording.current.text());
    } catch (error) {
      throw error.name === "NotAllowedError" ? new Error("The browser does not let this page use the microphone.") : error;
    } finally {
      if (phase === "listens" || !recording.current) (recording.current = null), setPhase("");
    }
  });
  const listens = phase === "listens";
  return html`<${IconButton} icon=${listens ? "stop" : "microphone"} label=${listens ? "End the dictation" : "Dictate"} aria-pressed=${listens ? "true" : "false"} disabled=${phase !== "" && !listens} onClick=${press} />
    ${phase === "writes" && html`<span class="hint" role="status">Writing it down…</span>`}`;
}

// What is written. The text is no part of the conversation's frame: a key makes this alone again.
function Composer({ id, message, busy, sees, hears, ready, used, space, send, cancel }) {
  const [text, setText] = useState(() => draft.get(id) || message?.content || "");
  const [files, setFiles] = useState([]);
  const field = useRef(null);
  const chooser = useRef(null);
  useEffect(() => {
    field.current.focus();
    draft.files(id).then((kept) => {
      const own = [...(message?.images || []).map((url) => ({ url })), ...(message?.files || [])];
      setFiles((now) => (now.length ? now : kept.length ? kept : own));
    }, () => {});
  }, []);
  const write = (news) => (setText(news), draft.set(id, news));
  const attach = (news) => (setFiles(news), draft.setFiles(id, news));
  const add = (list) => act(async () => {
    const pictures = [...list].filter((file) => file.type.startsWith("image/"));
    if (pictures.length && !sees) throw new Error("This model sees no images.");
    attach([...files, ...(await Promise.all([...list].map((file) => (pictures.includes(file) ? readImage(file) : readText(file)))))]);
  });
  const submit = (event) => {
    event.preventDefault();
    if (busy || !ready || !(text.trim() || files.length)) return;
    send({ content: text.trim(), images: files.filter((file) => file.url).map((file) => file.url), files: files.filter((file) => file.text != null) });
    write("");
    attach([]);
  };
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && message) cancel();
  };
  const more = Math.ceil((text.length + files.reduce((sum, file) => sum + (file.text?.length || 0), 0)) / 4); // English has four characters in a token
  const full = space > 0 && used + more > space;
  return html`<div class="composer"><form onSubmit=${submit}>
    ${message && html`<div class="row"><p class="hint">Editing a message: the earlier version and its answers are kept.</p><button type="button" class="small quiet" onClick=${cancel}>Cancel</button></div>`}
    ${files.length > 0 && html`<div class="images">${files.map((file, i) => html`<figure key=${i}>${file.url ? html`<img src=${file.url} alt=${`Image ${i + 1} to send`} />` : html`<figcaption>${file.name}<span class="hint"> about ${number(Math.ceil(file.text.length / 4))} tokens</span></figcaption>`}
      <${IconButton} icon="close" label=${file.url ? `Remove image ${i + 1}` : `Remove ${file.name}`} onClick=${() => attach(files.filter((_, j) => j !== i))} /></figure>`)}</div>`}
    <textarea ref=${field} rows="1" dir="auto" aria-label="Message" placeholder="Write a message" value=${text} onKeyDown=${typed} onInput=${(event) => write(event.target.value)} onPaste=${(event) => event.clipboardData.files.length && (event.preventDefault(), add(event.clipboardData.files))}></textarea>
    <div class="row"><div class="row start">
      <input ref=${chooser} type="file" multiple hidden onChange=${(event) => (add(event.target.files), (event.target.value = ""))} /><${IconButton} icon="clip" label=${sees ? "Add text files or images" : "Add text files"} onClick=${() => chooser.current.click()} />
      ${hears && canRecord && html`<${Microphone} model=${hears} write=${(said) => write([field.current.value.trimEnd(), said].filter(Boolean).join(" "))} />`}
      <span class=${`hint${full ? " fault" : ""}`} role=${full ? "alert" : undefined}>${space > 0 && (used || files.length || full) ? `${more > 20 ? "about " : ""}${number(used + more)} of ${number(space)} tokens${full ? ": more than the window has" : ""}` : html`<span class="hide-small">Enter sends, Shift and Enter makes a new line</span>`}</span></div>
      ${busy ? html`<button type="button" class="primary" aria-label="Stop the answer" title="Stop" onClick=${() => stop(busy)}><${Icon} name="stop" /></button>` : html`<button type="submit" class="primary" aria-label="Send" title="Send" disabled=${!ready || (!text.trim() && !files.length)}><${Icon} name="send" /></button>`}
    </div>
  </form></div>`;
}

function Rename({ talk, onClose }) {
  const [title, setTitle] = useState(talk.title);
  const submit = async (event) => {
    event.preventDefault();
    await commit({ talks: [{ id: talk.id, title: title.trim() || talk.title }] });
    onClose();
  };
  return html`<${Dialog} title="Rename the conversation" onClose=${onClose}><form class="form" onSubmit=${submit}>
    <${Field} label="Title">${(given) => html`<input ...${given} value=${title} onInput=${(event) => setTitle(event.target.value)} />`}<//>
    <div class="row end"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary">Save</button></div></form><//>`;
}

function Talks({ talks, current, shown, close, anew }) {
  const answering = useStore(growing);
  const [doomed, setDoomed] = useState(null);
  const [named, setNamed] = useState(null);
  const [words, setWords] = useState("");
  const [found, setFound] = useState(null);
  const file = useRef(null);
  useEffect(() => {
    let gone = false;
    if (!words.trim()) return setFound(null);
    const timer = setTimeout(() => search(words.trim()).then((ids) => gone || setFound(ids), () => {}), 150);
    return () => ((gone = true), clearTimeout(timer));
  }, [words, talks]);
  const download = () => act(async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await exported());
    link.download = "conversations.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  const upload = (event) => act(async () => {
    const [chosen] = event.target.files;
    event.target.value = "";
    const { taken, all } = await take(await chosen.text());
    return `Conversations imported: ${taken} of ${all}`;
  });
  const remove = () => {
    setDoomed(null);
    stopAllOf([doomed.id]);
    act(() => forget(doomed.id));
    if (doomed.id === current) location.hash = "#/chat/new";
  };
  const busy = new Set(Object.values(answering).filter(Boolean).map((each) => each.message.talk));
  const listed = found ? talks.filter((talk) => found.has(talk.id)) : talks;
  return html`<aside class=${`talks${shown ? " open" : ""}`} aria-label="Conversations" onKeyDown=${(event) => event.key === "Escape" && close()}>
    <div class="row"><a class="button small" href="#/chat/new" onClick=${() => (anew(), close())}><${Icon} name="plus" />New</a>
      <span class="row"><${IconButton} icon="down" label="Export the conversations" onClick=${download} disabled=${!talks.length} /><${IconButton} icon="up" label="Import conversations" onClick=${() => file.current.click()} /><span class="only-small"><${IconButton} icon="close" label="Close the list" onClick=${close} /></span></span></div>
    <input ref=${file} type="file" accept="application/json" aria-label="File of conversations" hidden onChange=${upload} />
    ${talks.length > 1 && html`<input type="search" aria-label="Search the conversations" placeholder="Search" value=${words} onInput=${(event) => setWords(event.target.value)} />`}
    ${!talks.length && html`<p class="hint">Conversations are kept in this browser alone.</p>`}
    ${found && !listed.length && html`<p class="hint">No conversation has these words.</p>`}
    <ul>${listed.map((talk) => html`<li key=${talk.id} class=${talk.id === current ? "current" : ""}>
      <a href=${`#/chat/${talk.id}`} title=${talk.title} dir="auto" aria-current=${talk.id === current ? "true" : undefined} onClick=${close}>${talk.title}</a>
      ${busy.has(talk.id) && html`<span class="dot answering" role="img" aria-label="answers"></span>`}
      <${IconButton} icon="edit" label=${`Rename: ${talk.title}`} onClick=${() => setNamed(talk)} /><${IconButton} icon="trash" label=${`Delete: ${talk.title}`} onClick=${() => setDoomed(talk)} /></li>`)}</ul>
    ${named && html`<${Rename} talk=${named} onClose=${() => setNamed(null)} />`}
    ${doomed && html`<${Dialog} title="Delete this conversation?" onClose=${() => setDoomed(null)}>
      <p>“${doomed.title}” is kept nowhere else.</p>
      <div class="row end"><button type="button" onClick=${() => setDoomed(null)}>Keep it</button><button type="button" class="danger" onClick=${remove}>Delete</button></div><//>`}
  </aside>`;
}

function Choose({ models, current, choose, onClose }) {
  const [words, setWords] = useState("");
  const found = models.filter((model) => model.id.toLowerCase().includes(words.toLowerCase()));
  return html`<${Dialog} title="Model" onClose=${onClose}>
    ${models.length > 5 && html`<input type="search" aria-label="Search the models" placeholder="Search" value=${words} onInput=${(event) => setWords(event.target.value)} />`}
    <ul class="choices">${found.map((model) => html`<li key=${model.id}><button type="button" class="quiet" aria-current=${model.id === current ? "true" : undefined} onClick=${() => (choose(model.id), onClose())}>
      <span class="grow">${shortName(model.id)}</span><span class="hint">${[model.context_window && `${number(model.context_window)} tokens`, model.capabilities.includes("vision") && "sees", model.capabilities.includes("tools") && "tools"].filter(Boolean).join(" · ")}</span></button></li>`)}</ul>
    ${!found.length && html`<p class="hint">No model has this in its name.</p>`}<//>`;
}

export function Chat({ rest }) {
  const { talks, fault, full } = useStore(chat);
  const models = useLoaded(async (signal) => (await get("v1/models", signal)).data, []);
  useEffect(() => void begin(), []);
  if (!talks) return fault && html`<p class="notice warn">${fault}</p>`;
  return html`<${Frame} key=${rest[0] === "new" ? `new/${rest[1] || ""}` : rest[0] || "last"} rest=${rest} talks=${talks} fault=${fault || full} models=${models} />`;
}

function Frame({ rest, talks, fault, models }) {
  const { shown, messages } = useStore(chat);
  const answers = useStore(growing);
  const speaking = (models.value || []).filter((model) => ["chat", "completion", "image-generation"].some((each) => model.capabilities.includes(each)));
  const [fresh, setFresh] = useState(() => blank(rest[1] || ""));
  const [chosen] = useState(() => (rest[0] === "new" ? "" : rest[0] || talks[0]?.id));
  const [editing, setEditing] = useState(null);
  const [opened, setOpened] = useState("");
  const [listed, setListed] = useState(false);
  const known = talks.find((talk) => talk.id === (chosen || fresh.id));
  const talk = known || fresh;
  useEffect(() => void show(talk.id), [talk.id]);
  const path = useMemo(() => (shown === talk.id ? branch(messages, talk.head) : []), [messages, shown, talk.id, talk.head]);
  const name = talk.model || talks.find((each) => speaking.some((model) => model.id === each.model))?.model || speaking[0]?.id || "";
  const model = speaking.find((each) => each.id === name);
  const able = (capability) => models.value?.find((each) => each.capabilities.includes(capability))?.id || "";
  const way = !model || model.capabilities.includes("chat") ? "chat" : model.capabilities.includes("completion") ? "plain" : "draws";
  const plain = way === "plain";
  const last = path.at(-1);
  const busy = last?.growing ? last.id : "";
  const current = answers[last?.id]?.message || last;
  const usage = path.findLast((message) => message.usage)?.usage;
  const change = (news) => (known ? commit({ talks: [{ id: talk.id, ...news }] }) : setFresh({ ...fresh, ...news }));
  const put = (before, news) => {
    setEditing(null);
    place.current.near = true;
    if (!known) history.replaceState(null, "", `#/chat/${talk.id}`);
    ask({ ...talk, model: name }, [...before, ...news], news, way);
  };
  const before = (message) => path.slice(0, path.indexOf(message));
  const send = (written) => {
    const earlier = editing ? before(editing) : path;
    put(earlier, [{ id: newId(), talk: talk.id, parent: earlier.at(-1)?.id || "", role: "user", at: now(), ...written }]);
  };
  const acts = useRef({});
  Object.assign(acts.current, {
    edit: setEditing,
    run: async (message) => {
      const said = [...before(message), message], results = await runCalls(message);
      const current = chat.value.talks.find((each) => each.id === message.talk); // it may have changed, or gone, meanwhile
      if (current) ask({ ...current, model: name }, [...said, ...results], results, way);
    },
    again: (message) => put(before(message), []),
    turn: (message, step) => {
      const all = siblings(messages, message);
      change({ head: tip(messages, all[all.indexOf(message) + step].id) });
    },
  });
  const versions = useMemo(() => {
    const found = new Map();
    for (const each of Object.values(messages).sort((a, b) => a.at - b.at)) found.set(each.parent, [...(found.get(each.parent) || []), each.id]);
    return found;
  }, [messages]);
  const [made, setMade] = useState(FIRST);
  useEffect(() => {
    if (made >= path.length) return;
    const timer = setTimeout(() => setMade(made + FIRST));
    return () => clearTimeout(timer);
  }, [made, path.length]);
  const end = useRef(null);
  const turns = useRef(null);
  const place = useRef({ near: true, top: 0 }); // who scrolled up stays there; all else keeps the end in sight
  useLayoutEffect(() => {
    const follow = () => place.current.near && (end.current.scrollTop = end.current.scrollHeight);
    const observer = new ResizeObserver(follow); // also when a line is drawn that was only estimated, and for a zoom
    observer.observe(end.current);
    observer.observe(turns.current);
    return () => observer.disconnect();
  }, []);
  const scrolled = ({ currentTarget: box }) => {
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 60) place.current.near = true;
    else if (box.scrollTop < place.current.top) place.current.near = false;
    place.current.top = box.scrollTop;
  };
  const close = () => setOpened("");
  return html`<div class="chat-frame"><h1 class="hidden">Chat</h1>
    <${Talks} talks=${talks} current=${talk.id} shown=${listed} close=${() => setListed(false)} anew=${() => setFresh(blank(name))} />
    <section class="talk" aria-label="Conversation">
      <div class="talk-head"><span class="only-small"><${IconButton} icon="list" label="Conversations" onClick=${() => setListed(true)} /></span>
        <button type="button" class="model-name" aria-label=${`Model: ${shortName(name) || "none"}`} aria-haspopup="dialog" disabled=${!speaking.length} onClick=${() => setOpened("models")}>
          <span>${name ? `${shortName(name)}${!model && speaking.length ? " (not here)" : ""}` : models.loading ? "Loading the models…" : "No model"}</span><${Icon} name="open" /></button>
        ${way !== "draws" && html`<${IconButton} icon="sliders" label="Options of this conversation" onClick=${() => setOpened("options")} />`}
        ${model && html`<${IconButton} icon="models" label=${`Settings of ${shortName(name)}`} onClick=${() => setOpened("settings")} />`}
        ${(talk.system || Object.keys(talk.sampling).length > 0) && html`<span class="hint hide-small">${talk.system ? "with a system prompt" : "with own sampling"}</span>`}
      </div>
      <div class="messages" ref=${end} tabindex="0" role="region" aria-label="Messages" onScroll=${scrolled}><div class="turns" ref=${turns}>
        ${fault && html`<p class="notice warn">${fault}</p>`}
        ${models.error && html`<${Fault} error=${models.error} retry=${models.reload} />`}
        ${!talk.head && !models.error && (speaking.length || models.loading
          ? html`<${Empty} icon="chat" title="Ask a model">What you write goes to ${name ? shortName(name) : "the model"} on this daemon and nowhere else. ${plain && "It has no chat template, so it goes on with your text."}<//>`
          : html`<${Empty} icon="models" title="No model that talks is here"><a href="#/models">Pull one</a>, and come back.<//>`)}
        ${path.slice(-made).map((message) => html`<${Line} key=${message.id} message=${answers[message.id]?.message || message} waiting=${answers[message.id]?.waiting} place=${versions.get(message.parent).indexOf(message.id)} count=${versions.get(message.parent).length}
          isLast=${message === last} busy=${Boolean(busy)} voice=${able("speech")} acts=${acts.current} />`)}
      </div></div>
      <${Spoken} message=${current} />
      <${Composer} key=${editing ? `edit/${editing.id}` : known ? talk.id : "new"} id=${editing ? `edit/${editing.id}` : known ? talk.id : "new"} message=${editing} busy=${busy} ready=${Boolean(model)} sees=${Boolean(model?.capabilities.includes("vision"))} hears=${able("transcription")}
        used=${usage ? usage.prompt + usage.answer : 0} space=${model?.context_window || 0} send=${send} cancel=${() => setEditing(null)} />
    </section>
    ${opened === "options" && html`<${Options} talk=${{ ...talk, model: name }} messages=${path} plain=${plain} change=${change} onClose=${close} />`}
    ${opened === "settings" && html`<${Settings} model=${name} onClose=${(again) => (close(), again && models.reload())} />`}
    ${opened === "models" && html`<${Choose} models=${speaking} current=${name} choose=${(id) => change({ model: id })} onClose=${close} />`}
  </div>`;
}
