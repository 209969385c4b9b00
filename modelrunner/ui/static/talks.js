// Conversations, kept in this browser (IndexedDB) and the same in all of its tabs. A conversation is a tree of messages:
// each names its `parent`, and `head` is the last one of the branch that is shown. So nothing replaces what was said.
import { Store } from "./live.js";

const DRAFT = "modelrunner-draft/";
const channel = new BroadcastChannel("modelrunner-talks");
// The most characters of pictures in all conversations: beyond them, the oldest pictures go.
export const bounds = { pictures: 512 << 20 };

export function request(wanted) {
  return new Promise((resolve, reject) => {
    wanted.onsuccess = () => resolve(wanted.result);
    wanted.onerror = () => reject(wanted.error);
  });
}

let connecting = null;
function connected() {
  return (connecting ??= (async () => {
    const opening = indexedDB.open("modelrunner", 3);
    opening.onupgradeneeded = ({ oldVersion }) => {
      const made = opening.result;
      if (oldVersion < 2) {
        for (const name of [...made.objectStoreNames]) made.deleteObjectStore(name);
        made.createObjectStore("talks", { keyPath: "id" });
        const messages = made.createObjectStore("messages", { keyPath: "id" });
        messages.createIndex("talk", "talk");
        messages.createIndex("growing", "growing"); // of those without an end
        made.createObjectStore("files");
      }
      opening.transaction.objectStore("messages").createIndex("pictures", "pictures"); // [time, characters] of those with any
    };
    opening.onblocked = () => chat.set({ fault: "Another tab shows an older version of this page: load it again or close it, and the conversations come here." });
    const opened = await request(opening);
    chat.set({ fault: "" });
    opened.onversionchange = () => {
      opened.close(); // a newer page waits for it
      chat.set({ fault: "A newer version of this page was opened: load this one again. What comes here now is lost when the page closes." });
    };
    return opened;
  })());
}

async function table(name) {
  return (await connected()).transaction(name).objectStore(name);
}

// `messages` are those of the conversation `shown`, by ID.
export const chat = new Store({ talks: null, shown: "", messages: {}, fault: "", full: "" });
export const newId = () => crypto.randomUUID?.() || Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("");
// The time of a message, later than that of any before it: those of one conversation are in the order of their times.
let last = 0;
export const now = () => (last = Math.max(Date.now(), last + 1));
export const blank = (model) => ({ id: newId(), title: "", model, system: "", sampling: {}, head: "", created: Date.now(), changed: Date.now() });

// The messages that are in this tab and, as far as it knows, in no store: by ID, of all conversations.
const loose = new Map();
let none = false; // there is no store at all
const hold = (messages) => messages.forEach((message) => loose.set(message.id, message));

function apply({ talks = [], messages = [], gone = [] }) {
  if (!chat.value.talks) return;
  for (const { id, talk } of [...loose.values()]) if (gone.includes(talk)) loose.delete(id);
  if (chat.value.fault) hold(messages);
  const all = new Map(chat.value.talks.map((talk) => [talk.id, talk]));
  for (const id of gone) all.delete(id);
  for (const talk of talks) if (all.has(talk.id) || talk.created) all.set(talk.id, { ...all.get(talk.id), ...talk });
  const mine = messages.filter((message) => message.talk === chat.value.shown);
  chat.set({
    talks: [...all.values()].sort((a, b) => b.changed - a.changed),
    ...(mine.length ? { messages: { ...chat.value.messages, ...Object.fromEntries(mine.map((message) => [message.id, message])) } } : {}),
  });
}

const length = (message) => (message.images || []).reduce((sum, url) => sum + url.length, 0);
const sized = ({ pictures, ...message }) => (message.images?.length ? { ...message, pictures: [message.at, length(message)] } : message);

// Does `work` with the three tables. Ends when all of it is kept, or nothing.
async function together(work) {
  const names = ["talks", "messages", "files"];
  const under = (await connected()).transaction(names, "readwrite");
  const done = new Promise((resolve, reject) => {
    under.oncomplete = resolve;
    under.onabort = () => reject(under.error || new Error("the browser gave up"));
  });
  done.catch(() => {}); // told below, if `work` did not fail before
  try {
    const result = await work(...names.map((name) => under.objectStore(name)));
    await done;
    return result;
  } catch (error) {
    const cause = under.error || error; // what ended it, before what this did to its requests
    try {
      under.abort();
    } catch { /* it has ended */ }
    throw cause;
  }
}

// Takes the oldest pictures away until `share` of their characters are left, and no more than `bounds` allows. Returns the
// messages that had them.
async function trim(messages, share) {
  const index = messages.index("pictures"), changed = [];
  const keys = [];
  await new Promise((resolve, reject) => {
    const walk = index.openKeyCursor();
    walk.onerror = () => reject(walk.error);
    walk.onsuccess = () => (walk.result ? (keys.push([walk.result.primaryKey, walk.result.key[1]]), walk.result.continue()) : resolve());
  });
  let sum = keys.reduce((all, [, size]) => all + size, 0);
  const most = Math.min(share * sum, bounds.pictures);
  for (const [key, size] of keys) {
    if (sum <= most) break;
    sum -= size;
    const { images, pictures, ...rest } = await request(messages.get(key));
    changed.push({ ...rest, lost: images.length });
    messages.put(changed.at(-1));
  }
  return changed;
}

// Shows which messages have lost their pictures, and returns how many.
function tellLost(lost) {
  if (lost.length) {
    apply({ messages: lost });
    channel.postMessage({ messages: lost });
  }
  return lost.length;
}

async function keep(change) {
  const put = [];
  const lost = await together(async (talks, messages, files) => {
    for (const id of change.gone || []) {
      talks.delete(id);
      files.delete(id);
      for (const key of await request(messages.index("talk").getAllKeys(id))) messages.delete(key);
    }
    for (const talk of change.talks || []) {
      const before = await request(talks.get(talk.id));
      if (before || talk.created) talks.put({ ...before, ...talk });
    }
    for (const message of change.messages || []) {
      if (!(await request(talks.getKey(message.talk)))) continue;
      messages.put(sized(message));
      put.push(message);
    }
    for (const [id, each] of Object.entries(change.files || {})) files.put(each, id);
    return change.messages?.some(length) ? trim(messages, 1) : [];
  });
  if (!change.files) channel.postMessage(change); // those of a draft are shown in one tab
  tellLost(lost);
  for (const message of put) if (loose.get(message.id) === message) loose.delete(message.id);
}

// Keeps a change, tells the other tabs of it, and returns whether it is kept. Where the browser has no more room, the older
// half of the pictures goes, and again, until there is room. That is a transaction of its own: browsers count what one
// writes, and not what it removes.
async function written(change) {
  if (chat.value.fault) return false;
  const shares = [1 / 2, 1 / 2, 1 / 2, 0];
  try {
    for (;;) {
      try {
        await keep(change);
        break;
      } catch (error) {
        if (error.name !== "QuotaExceededError" || !shares.length) throw error;
        const share = shares.shift();
        if (!tellLost(await together((talks, messages) => trim(messages, share)))) throw error;
      }
    }
    if (chat.value.full && change.talks?.some((talk) => talk.created)) chat.set({ full: "" }); // a whole one was kept
    return true;
  } catch (error) {
    unkept(error);
    return false;
  }
}

// Writes one change after another, so that each finds the room that the one before has made.
let writing = Promise.resolve();
const write = (change) => (writing = writing.catch(() => {}).then(() => written(change)));

// Shows and keeps a change, here and, once it is kept, in the other tabs: `talks` are fields of conversations, `messages`
// whole ones, `gone` the IDs of conversations to remove before. What belongs to a conversation that is not here is left
// out. Ends when it is kept, and returns whether it is.
export async function commit(change) {
  apply(change);
  hold(change.messages || []);
  return write(change);
}

function unkept(error) {
  if (error.name === "QuotaExceededError") chat.set({ full: "This browser has no more room for conversations: what comes now is lost when the page closes. Export and remove some." });
  else chat.set({ fault: chat.value.fault || `The conversations are not kept: ${error.message}` });
}

// Reads the list, and returns the answers that have no end.
export async function open() {
  try {
    chat.set({ talks: (await request((await table("talks")).getAll())).sort((a, b) => b.changed - a.changed) });
    return await request((await table("messages")).index("growing").getAll());
  } catch {
    none = true;
    chat.set({ talks: [], fault: "This browser keeps no conversations here: they are lost when the page closes." });
    return [];
  }
}

// Reads the messages of a conversation, to show it.
export async function show(id) {
  if (chat.value.shown === id) return;
  if (chat.value.fault) hold(Object.values(chat.value.messages)); // they may not be read again
  chat.set({ shown: id, messages: {} });
  const found = await readable(id);
  if (chat.value.shown === id) chat.set({ messages: { ...Object.fromEntries(found.map((message) => [message.id, message])), ...chat.value.messages } });
}

const looseOf = (id) => [...loose.values()].filter((message) => message.talk === id);

// All messages of a conversation. Fails where they cannot be read.
async function messagesOf(id) {
  const stored = none ? [] : await request((await table("messages")).index("talk").getAll(id));
  return [...new Map([...stored, ...looseOf(id)].map((message) => [message.id, message])).values()];
}

// Those messages of a conversation that this tab has, where it cannot read all.
const readable = (id) => messagesOf(id).catch((error) => {
  if (!chat.value.fault) throw error;
  return [...looseOf(id), ...Object.values(chat.value.messages).filter((message) => message.talk === id)];
});

export const kept = async (id) => (chat.value.fault ? undefined : request((await table("messages")).get(id)));

// The messages from the first one to `head`.
export function branch(messages, head) {
  const path = [];
  for (let each = messages[head]; each; each = messages[each.parent]) path.push(each);
  return path.reverse();
}

// The answers or questions at the place of `message`, the oldest first.
export const siblings = (messages, message) => Object.values(messages).filter((each) => each.parent === message.parent).sort((a, b) => a.at - b.at);

// The end of the newest branch that goes through the message.
export function tip(messages, id) {
  for (;;) {
    const next = siblings(messages, { parent: id }).at(-1);
    if (!next) return id;
    id = next.id;
  }
}

// The IDs of the conversations in which a message or a title has the words.
export async function search(words) {
  const wanted = words.toLowerCase();
  const found = new Set(chat.value.talks.filter((talk) => talk.title.toLowerCase().includes(wanted)).map((talk) => talk.id));
  for (const talk of chat.value.talks) {
    if (!found.has(talk.id) && (await readable(talk.id)).some((message) => message.content.toLowerCase().includes(wanted))) found.add(talk.id);
  }
  return found;
}

// What is written and not sent yet. The text is kept with each key, so it lies where writing is done at once.
export const draft = {
  get: (id) => localStorage.getItem(DRAFT + id) || "",
  set: (id, text) => {
    try {
      if (text) localStorage.setItem(DRAFT + id, text);
      else localStorage.removeItem(DRAFT + id);
    } catch { /* it is too long to be kept */ }
  },
  files: async (id) => (chat.value.fault ? [] : (await request((await table("files")).get(id))) || []),
  setFiles: (id, files) => write({ files: { [id]: files } }),
};

export function forget(id) {
  draft.set(id, "");
  return commit({ gone: [id] });
}

// Calls `take` with what other tabs change, and with the IDs of answers that they stop.
export function listen(take) {
  channel.onmessage = ({ data }) => {
    if (!data.stop) apply(data);
    take(data);
  };
}
export const tell = (data) => channel.postMessage(data);

// The conversations as a file: all of them whole, or none. Each is a piece of its own, which the browser may put on disk:
// pictures are long.
export async function exported() {
  const pieces = [];
  for (const talk of chat.value.talks) {
    const messages = await messagesOf(talk.id).catch(() => {
      throw new Error("The conversations cannot be read here any more: load this page again, and export them there.");
    });
    messages.sort((a, b) => a.at - b.at);
    pieces.push(pieces.length ? ",\n" : "", new Blob([JSON.stringify({ ...talk, messages }, null, 1)]));
  }
  return new Blob(['{"format": "modelrunner-conversations", "version": 2, "conversations": [', ...pieces, "]}"], { type: "application/json" });
}

const isMessage = (message) => ["id", "parent", "role", "content"].every((name) => typeof message?.[name] === "string");

// Takes conversations of an exported file; those with the ID of one that is here replace it, but one without messages
// replaces none that has any. Returns how many are kept, and how many the file holds.
export async function take(text) {
  let found;
  try {
    found = JSON.parse(text).conversations;
  } catch { /* said below */ }
  const good = (found || []).filter?.((talk) => typeof talk?.id === "string" && Array.isArray(talk.messages) && talk.messages.every(isMessage));
  if (!good?.length) throw new Error("This file holds no conversations that were exported here.");
  let taken = 0;
  for (const { id, title, model, system, sampling, head, changed, messages } of good) {
    if (!messages.length && (await messagesOf(id).then((found) => found.length, () => true))) continue;
    taken += await commit({
      gone: [id],
      talks: [{ ...blank(String(model || "")), id, title: String(title || ""), system: String(system || ""), sampling: sampling || {}, head: String(head || ""), changed: Number(changed) || Date.now() }],
      messages: messages.map(({ growing, ...message }, i) => ({ ...message, talk: id, at: Number(message.at) || i })),
    });
  }
  return { taken, all: good.length };
}
