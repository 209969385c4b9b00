// Answers: asked of the daemon as streams that go on in another connection, and kept while they grow. One tab reads each
// stream, and holds a lock meanwhile: when it is closed or loaded again, a tab that waits for the lock goes on.
import { call, events, post, ref } from "./api.js";
import { Store } from "./live.js";
import { commit, kept, listen, newId, now, open, tell } from "./talks.js";

const DRAWN_EVERY = 60; // ms
const KEPT_EVERY = 400;
const PATIENCE = 60000; // without an answer of the daemon
const locks = navigator.locks || { request: (name, work) => work() }; // only pages of this machine, or with TLS, have locks

// Those that this tab reads, by ID: {message, waiting, abort}.
export const growing = new Store({});
const followed = new Set();

function draw(id, news) {
  growing.set({ [id]: news && { ...growing.value[id], ...news } });
}

const words = (message) => [message.content, ...(message.files || []).map((file) => `${file.name}:\n\`\`\`\n${file.text}\n\`\`\``)].filter(Boolean).join("\n\n");

const callId = (message, i) => `${message.id}-${i}`;

// Lets the daemon run the calls of an answer, and returns a message with the result of each, or with what went wrong.
export async function runCalls(answer) {
  const ran = await Promise.all(answer.calls.map(async ({ name, text }) => {
    try {
      return await post("v1/tools/execute", { name, arguments: JSON.parse(text || "{}") });
    } catch (error) {
      return { name, text: `The call failed: ${error.message}` };
    }
  }));
  let parent = answer.id;
  return ran.map(({ name, text }, i) => {
    const result = { id: newId(), talk: answer.talk, parent, role: "tool", call: callId(answer, i), name, content: text, at: now() };
    parent = result.id;
    return result;
  });
}

// The body of a request for an answer to the messages. `plain` is for a model without a chat template.
export function body(talk, messages, plain) {
  const { tools, schema, ...sampling } = talk.sampling;
  const common = { model: talk.model, stream: true, stream_options: { include_usage: true }, ...sampling };
  if (schema) common.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const called = (message) => messages[messages.indexOf(message) + 1]?.role === "tool"; // its calls were run
  const told = messages.filter((message) => message.role !== "assistant" || message.content || called(message));
  if (plain) return { ...common, prompt: [talk.system, ...told.map(words)].filter(Boolean).join("\n\n") };
  const said = told.map((message) => (message.role === "tool" ? { role: "tool", tool_call_id: message.call, content: message.content } : {
    role: message.role,
    ...(message.role === "assistant" && called(message) ? { tool_calls: message.calls.map((each, i) => ({ id: callId(message, i), type: "function", function: { name: each.name, arguments: each.text } })) } : {}),
    content: message.images?.length ? [{ type: "text", text: words(message) }, ...message.images.map((url) => ({ type: "image_url", image_url: { url } }))] : words(message),
  }));
  if (talk.system) said.unshift({ role: "system", content: talk.system });
  return { ...common, messages: said, ...(tools?.length ? { tools } : {}) };
}

// The body of a request for a picture of what the last message says.
const picture = (talk, messages) => ({ model: talk.model, prompt: words(messages.at(-1)), stream: true, partial_images: 2 });

// Takes an event of a picture: what is there of it, or how many of its steps are done.
function paint(message, { b64_json: data, output_format: form = "png", step, steps }) {
  if (data) message.images = [`data:image/${form};base64,${data}`];
  if (steps) draw(message.id, { waiting: { step, steps } });
}

function grow(message, choice) {
  const delta = choice.delta || { content: choice.text };
  message.content += delta.content || "";
  message.reasoning += delta.reasoning_content || delta.reasoning || "";
  for (const each of delta.tool_calls || []) {
    const mine = (message.calls[each.index ?? 0] ??= { name: "", text: "" });
    mine.name += each.function?.name || "";
    mine.text += each.function?.arguments || "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  return Boolean(delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls);
}

// Calls `work` at once, and after that at most once in `time` ms, the last time after the last call of `call`.
function spaced(time, work) {
  let timer = null, again = false;
  const run = () => {
    again = false;
    timer = setTimeout(() => {
      timer = null;
      if (again) run();
    }, time);
    work();
  };
  return { call: () => void (timer === null ? run() : (again = true)), end: () => clearTimeout(timer) };
}

class Failed extends Error {} // the stream's own word

// Reads one connection of the stream, from the place on to which the message has it.
async function read(message, stream, signal, changed) {
  const from = message.place;
  for await (const { event, data, place } of stream) {
    if (signal.aborted) return;
    message.place = from + place;
    if (event === "modelrunner.progress") {
      draw(message.id, { waiting: JSON.parse(data) });
      continue;
    }
    if (data === "[DONE]") continue;
    const part = JSON.parse(data);
    if (event === "error" || part.error) throw new Failed(part.error?.message || part.message || "The answer broke off.");
    if (part.type?.startsWith("image_")) paint(message, part);
    if (part.usage) message.usage = { prompt: part.usage.prompt_tokens, answer: part.usage.completion_tokens };
    if (part.timings) message.speed = part.timings.predicted_per_second;
    if (part.choices?.length && grow(message, part.choices[0])) message.first ||= Date.now();
    changed();
  }
}

const pause = (time, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, time);
  signal.addEventListener("abort", () => (clearTimeout(timer), resolve()));
});

// Reads the stream of the answer to its end, over as many connections as it takes. `asked` is the first request, without
// which an earlier page made it.
async function follow(message, asked) {
  const abort = new AbortController();
  const { signal } = abort;
  const drawing = spaced(DRAWN_EVERY, () => draw(message.id, { message: { ...message }, ...(message.first ? { waiting: null } : {}) }));
  const keeping = spaced(KEPT_EVERY, () => commit({ messages: [{ ...message }] }));
  const changed = () => (drawing.call(), keeping.call());
  const place = `v1/streams/${ref(message.id)}`;
  draw(message.id, { message: { ...message }, waiting: message.first ? null : { stage: "", waited: 0 }, abort });
  let lost = 0;
  while (!signal.aborted) {
    const first = asked;
    asked = null;
    try {
      const headers = { "X-Progress": "events", "X-Resumable": "true", "X-Request-ID": message.id };
      const opened = (response) => {
        lost = 0;
        message.ignored = response.headers.get("X-Modelrunner-Ignored") || "";
      };
      const stream = first ? events(first.path, { method: "POST", body: first.body, signal, headers, opened }) : events(`${place}?from=${message.place}`, { signal, opened });
      await read(message, stream, signal, changed);
      break;
    } catch (error) {
      if (signal.aborted) break;
      lost ||= Date.now();
      if (error instanceof Failed || (first && error.status !== undefined) || Date.now() - lost > PATIENCE) message.error = error.message;
      else if (error.status) message.error = "The answer broke off here, and the daemon has no more of it. Ask again for a whole one.";
      else {
        draw(message.id, { waiting: { stage: "the connection is lost", waited: 0 } });
        await pause(500, signal);
        continue;
      }
      break;
    }
  }
  drawing.end();
  keeping.end();
  if (signal.aborted) {
    message.stopped = true;
    call("DELETE", place).catch(() => {}); // it may have ended by itself
  }
  if (message.first) {
    const writing = (Date.now() - message.first) / 1000, tokens = message.usage?.answer || 0;
    message.stats = { first: (message.first - message.at) / 1000, tokens, speed: message.speed || (tokens > 1 && writing > 0 ? (tokens - 1) / writing : 0) };
  }
  delete message.growing;
  await commit({ messages: [{ ...message }] });
  draw(message.id, undefined);
}

// Goes on with an answer once no other tab reads it.
function goOn({ id }) {
  if (followed.has(id)) return;
  followed.add(id);
  locks.request(`answer ${id}`, async () => {
    const message = await kept(id);
    if (message?.growing) await follow(message);
  }).finally(() => followed.delete(id));
}

// Asks the model of `talk` to answer the messages, of which `news` are not kept yet, in this `way`: "chat", "plain" or
// "draws".
export async function ask(talk, messages, news, way) {
  const message = { id: newId(), talk: talk.id, parent: messages.at(-1).id, role: "assistant", model: talk.model, content: "", reasoning: "", calls: [], at: now(), place: 0, growing: 1 };
  const title = talk.title || messages[0].content.slice(0, 60) || messages[0].files?.[0]?.name || "An image";
  followed.add(message.id);
  await locks.request(`answer ${message.id}`, async () => { // before other tabs hear of it
    await commit({ talks: [{ ...talk, title, head: message.id, changed: Date.now() }], messages: [...news, message] });
    await follow(message, way === "draws" ? { path: "v1/images/generations", body: picture(talk, messages) } : { path: way === "plain" ? "v1/completions" : "v1/chat/completions", body: body(talk, messages, way === "plain") });
  });
  followed.delete(message.id);
}

export function stop(id) {
  if (growing.value[id]) growing.value[id].abort.abort();
  else tell({ stop: id });
}

let begun = false;

// Reads the conversations, once, and goes on with their answers.
export async function begin() {
  if (begun) return;
  begun = true;
  listen(({ stop: id, messages = [], gone = [] }) => {
    if (id) growing.value[id]?.abort.abort();
    for (const message of messages) if (message.growing && navigator.locks) goOn(message);
    stopAllOf(gone);
  });
  for (const message of await open()) goOn(message);
}

export function stopAllOf(talks) {
  for (const each of Object.values(growing.value)) if (each && talks.includes(each.message.talk)) each.abort.abort();
}
