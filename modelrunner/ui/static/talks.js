// Conversations: kept in this browser (IndexedDB), asked of the daemon, exported and imported as JSON.
import { events } from "./api.js";
import { Store } from "./live.js";

const DRAWN_EVERY = 60; // ms, while an answer grows

function request(wanted) {
  return new Promise((resolve, reject) => {
    wanted.onsuccess = () => resolve(wanted.result);
    wanted.onerror = () => reject(wanted.error);
  });
}

async function table(mode) {
  const opening = indexedDB.open("modelrunner", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("talks", { keyPath: "id" });
  const database = await request(opening);
  return database.transaction("talks", mode).objectStore("talks");
}

export const chat = new Store({ talks: null, answering: null, fault: "" });
const newest = (talks) => talks.toSorted((a, b) => b.changed - a.changed);

export async function open() {
  try {
    chat.set({ talks: newest(await request((await table("readonly")).getAll())) });
  } catch {
    chat.set({ talks: [], fault: "This browser keeps no conversations here: they are lost when the page closes." });
  }
}

export const blank = (model) => ({ id: crypto.randomUUID?.() || String(Math.random()).slice(2), title: "", model, system: "", sampling: {}, messages: [], changed: Date.now() });

function show(talk) {
  chat.set({ talks: newest([talk, ...chat.value.talks.filter((each) => each.id !== talk.id)]) });
}

export async function save(talk) {
  show(talk);
  if (!chat.value.fault) await request((await table("readwrite")).put(talk)).catch((error) => chat.set({ fault: `The conversation is not kept: ${error.message}` }));
}

export async function forget(id) {
  if (chat.value.answering?.id === id) stop();
  chat.set({ talks: chat.value.talks.filter((each) => each.id !== id) });
  if (!chat.value.fault) await request((await table("readwrite")).delete(id));
}

export const exported = () => JSON.stringify({ format: "modelrunner-conversations", version: 1, conversations: chat.value.talks }, null, 1);

// Takes conversations of an exported file; those with the ID of one that is here replace it. Returns how many.
export async function take(text) {
  let found;
  try {
    found = JSON.parse(text).conversations;
  } catch { /* said below */ }
  const good = (found || []).filter?.((talk) => typeof talk?.id === "string" && Array.isArray(talk.messages) && talk.messages.every((message) => typeof message?.content === "string"));
  if (!good?.length) throw new Error("This file holds no conversations that were exported here.");
  for (const { id, title, model, system, sampling, messages, changed } of good) {
    await save({ id, title: String(title || ""), model: String(model || ""), system: String(system || ""), sampling: sampling || {}, messages, changed: Number(changed) || Date.now() });
  }
  return good.length;
}

export function stop() {
  chat.value.answering?.abort.abort();
}

function asked(talk, plain) {
  const { tools, ...sampling } = talk.sampling;
  const common = { model: talk.model, stream: true, stream_options: { include_usage: true }, ...sampling };
  const told = talk.messages.filter((message) => !message.error || message.content);
  if (plain) return { ...common, prompt: [talk.system, ...told.map((message) => message.content)].filter(Boolean).join("\n\n") };
  const messages = told.map(({ role, content, images }) => ({
    role,
    content: images?.length ? [{ type: "text", text: content }, ...images.map((url) => ({ type: "image_url", image_url: { url } }))] : content,
  }));
  if (talk.system) messages.unshift({ role: "system", content: talk.system });
  return { ...common, messages, ...(tools?.length ? { tools } : {}) };
}

function grow(answer, choice) {
  const delta = choice.delta || { content: choice.text };
  answer.content += delta.content || "";
  answer.reasoning += delta.reasoning_content || delta.reasoning || "";
  for (const call of delta.tool_calls || []) {
    const mine = (answer.calls[call.index ?? 0] ??= { name: "", text: "" });
    mine.name += call.function?.name || "";
    mine.text += call.function?.arguments || "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  return Boolean(delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls);
}

// Asks the model for the next message of `talk`. `plain` is for a model without a chat template.
export async function answer(talk, plain) {
  const abort = new AbortController();
  const made = { role: "assistant", model: talk.model, content: "", reasoning: "", calls: [] };
  const began = performance.now();
  let first = 0, drawn = 0, tokens = 0, speed = 0;
  chat.set({ answering: { id: talk.id, abort, waiting: { stage: "", waited: 0 }, message: made } });
  const draw = (change) => chat.set({ answering: { ...chat.value.answering, message: { ...made }, ...change } });
  await save(talk);
  try {
    const path = plain ? "v1/completions" : "v1/chat/completions";
    const stream = events(path, { method: "POST", body: asked(talk, plain), signal: abort.signal, headers: { "X-Progress": "events" } });
    for await (const { event, data } of stream) {
      if (event === "modelrunner.progress") {
        draw({ waiting: JSON.parse(data) });
        continue;
      }
      if (data === "[DONE]") continue;
      const part = JSON.parse(data);
      if (event === "error" || part.error) throw new Error(part.error?.message || part.message || "The answer broke off.");
      if (part.usage) tokens = part.usage.completion_tokens;
      if (part.timings) speed = part.timings.predicted_per_second;
      const came = part.choices?.length ? grow(made, part.choices[0]) : false;
      if (came && !first) first = performance.now();
      if (performance.now() - drawn > DRAWN_EVERY) {
        drawn = performance.now();
        draw(came ? { waiting: null } : {});
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || abort.signal.aborted) made.stopped = true;
    else made.error = error.message;
  }
  if (first) {
    const writing = (performance.now() - first) / 1000;
    made.stats = { first: (first - began) / 1000, tokens, speed: speed || (tokens > 1 && writing > 0 ? (tokens - 1) / writing : 0) };
  }
  chat.set({ answering: null });
  const still = chat.value.talks.find((each) => each.id === talk.id);
  if (still) await save({ ...still, messages: [...talk.messages, made], changed: Date.now() });
}
