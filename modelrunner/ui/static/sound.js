// Sound: answers that a model reads aloud, and speech that a model writes down.
import { bytes, call } from "./api.js";
import { Store } from "./live.js";

const RATE = 24000; // samples a second of OpenAI's pcm: 16 bits, one channel
const LONGEST_TEXT = 1000; // characters that are asked for at once
const AHEAD = 20; // seconds of sound that are kept
const LONGEST_RECORDING = 600000; // ms

// The message that is read aloud.
export const reading = new Store({ id: "" });
let playing = null;

const plain = (markdown) => markdown.replace(/```[^]*?(```|$)/g, " ").replace(/!?\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/[*_`#>|~]+/g, " ");

// Yields pieces of the text that have something to say, each to the end of a sentence where there is one.
function* cut(text) {
  for (let rest = text.trim(); rest; ) {
    const first = rest.slice(0, LONGEST_TEXT);
    const end = rest.length <= LONGEST_TEXT ? rest.length : Math.max(...[". ", "? ", "! ", "\n"].map((mark) => first.lastIndexOf(mark) + 1)) || first.lastIndexOf(" ") + 1 || LONGEST_TEXT;
    const piece = rest.slice(0, end).trim();
    if (/[\p{L}\p{N}]/u.test(piece)) yield piece;
    rest = rest.slice(end).trim();
  }
}

const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

export function hush() {
  playing?.abort();
  playing = null;
  reading.set({ id: "" });
}

// Reads a message aloud with this model; the sound is played as it comes.
export async function speak(id, markdown, model) {
  hush();
  const abort = (playing = new AbortController());
  const { signal } = abort;
  const context = new AudioContext({ sampleRate: RATE });
  signal.addEventListener("abort", () => context.close());
  reading.set({ id });
  let at = 0; // the second at which the next samples begin
  try {
    for (const input of cut(plain(markdown))) {
      let rest = [];
      for await (const piece of bytes("v1/audio/speech", { model, input, response_format: "pcm" }, signal)) {
        const whole = new Uint8Array([...rest, ...piece]);
        const samples = new Int16Array(whole.buffer, 0, whole.length >> 1);
        rest = whole.slice(samples.length * 2);
        if (!samples.length || signal.aborted) continue;
        const buffer = context.createBuffer(1, samples.length, RATE);
        buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
        const source = context.createBufferSource();
        source.buffer = buffer;
        source.connect(context.destination);
        at = Math.max(at, context.currentTime + 0.02);
        source.start(at);
        at += buffer.duration;
      }
      while (!signal.aborted && at > context.currentTime + AHEAD) await pause(200);
    }
    while (!signal.aborted && at > context.currentTime) await pause(100);
  } finally {
    if (playing === abort) hush();
  }
}

// Records until `stop`, and then gives what was said, as the model writes it down.
export async function record(model) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.ondataavailable = ({ data }) => parts.push(data);
  const ended = new Promise((resolve) => (recorder.onstop = resolve));
  const end = () => recorder.state === "inactive" || recorder.stop();
  const timer = setTimeout(end, LONGEST_RECORDING);
  ended.then(() => (clearTimeout(timer), stream.getTracks().forEach((track) => track.stop())));
  recorder.start();
  return {
    end,
    async text() {
      end();
      await ended;
      const form = new FormData();
      form.append("model", model);
      form.append("file", new Blob(parts, { type: recorder.mimeType }), "speech");
      return (await call("POST", "v1/audio/transcriptions", form)).text.trim();
    },
  };
}

export const canRecord = Boolean(navigator.mediaDevices && window.MediaRecorder); // only pages of this machine, or with TLS
