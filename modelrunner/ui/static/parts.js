// What the views are made of: figures as text, and small components.
import { html, useEffect, useRef, useState } from "./preact-htm.js";
import { Store, live, useStore } from "./live.js";

export const NONE = "–";

export function bytes(count) {
  if (count == null) return NONE;
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < 4) {
    count /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || Math.abs(count) >= 100 ? 0 : Math.abs(count) >= 10 ? 1 : 2;
  return `${count.toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function seconds(count) {
  if (count == null) return NONE;
  if (count < 0.9995) return `${Math.round(count * 1000)} ms`;
  if (count < 60) return `${count.toFixed(count < 10 ? 2 : 1)} s`;
  const whole = Math.round(count);
  if (whole < 3600) return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} min`;
  if (whole < 172800) return `${Math.floor(whole / 3600)}:${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} h`;
  return `${Math.round(whole / 86400)} days`;
}

export const number = (value) => (value == null ? NONE : value.toLocaleString("en-US", { maximumFractionDigits: Math.abs(value) < 1 ? 2 : 1 }));
export const clock = (time) => new Date(time).toLocaleTimeString([], { hour12: false });
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
export const shortName = (name) => name.replace(/^docker\.io\/(ai|library)\//, "").replace(/:latest$/, "");
export function ago(unix) {
  const passed = Date.now() / 1000 - unix;
  return unix ? `${passed < 60 ? "a moment" : seconds(passed)} ago` : NONE;
}

// The time of day, told again each second while the component is there.
export function useClock() {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}

// {value, error, loading, reload} of what `load(signal)` returns, loaded again when the daemon comes back.
export function useLoaded(load, inputs) {
  const [state, setState] = useState({ loading: true });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    load(stop.signal).then(
      (value) => stop.signal.aborted || setState({ value, loading: false }),
      (error) => stop.signal.aborted || setState((old) => ({ value: old.value, error, loading: false })),
    );
    return () => stop.abort();
  }, [...inputs, turn]);
  useEffect(() => {
    let { joined } = live.value;
    const again = (news) => news.joined !== joined && ((joined = news.joined), setTurn((old) => old + 1));
    live.listeners.add(again);
    return () => live.listeners.delete(again);
  }, []);
  return { ...state, reload: () => setTurn((old) => old + 1) };
}

const ICONS = {
  now: "M4 6h11M4 12h16M4 18h7",
  models: "M12 3 4 7.5v9L12 21l8-4.5v-9zM4 7.5 12 12l8-4.5M12 12v9",
  chat: "M5 5h14a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1h-7l-5 4v-4H5a1 1 0 0 1-1-1V6a1 1 0 0 1 1-1z",
  requests: "M4 20V4M4 20h16M8 15h3M10 11h6M14 7h5",
  usage: "M5 20v-6M12 20V5M19 20v-9",
  pin: "M9 4h6l-1 6 3 3v2H7v-2l3-3zM12 15v6",
  close: "M6 6l12 12M18 6 6 18",
  send: "M12 20V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  plus: "M12 5v14M5 12h14",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  retry: "M5 12a7 7 0 1 0 2-5M5 4v4h4",
  copy: "M9 9h10v10H9zM5 15V5h10",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  sliders: "M4 8h8M16 8h4M4 16h4M12 16h8M14 6a2 2 0 1 0 0 4 2 2 0 0 0 0-4M10 14a2 2 0 1 0 0 4 2 2 0 0 0 0-4",
  down: "M12 4v11M7 10l5 5 5-5M5 20h14",
  up: "M12 15V4M7 9l5-5 5 5M5 20h14",
  machine: "M7 7h10v10H7zM10 10h4v4h-4zM9 7V4M15 7V4M9 20v-3M15 20v-3M7 9H4M7 15H4M20 9h-3M20 15h-3",
  verify: "M5 12l5 5 9-10",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  list: "M4 6h16M4 12h16M4 18h16",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  open: "M7 10l5 5 5-5",
  speaker: "M5 10v4h3l4 4V6l-4 4zM15 9a4 4 0 0 1 0 6M17.5 6.5a8 8 0 0 1 0 11",
  microphone: "M12 4a3 3 0 0 0-3 3v4a3 3 0 0 0 6 0V7a3 3 0 0 0-3-3M6 11a6 6 0 0 0 12 0M12 17v4",
  clip: "M19 11l-7.5 7.5a4.5 4.5 0 0 1-6.4-6.4L13 4.3a3 3 0 0 1 4.2 4.2l-7.7 7.8a1.5 1.5 0 0 1-2.1-2.1L14.5 7",
};

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

export const IconButton = ({ icon, label, ...rest }) =>
  html`<button type="button" class="icon-button" aria-label=${label} title=${label} ...${rest}><${Icon} name=${icon} /></button>`;

export const Badge = ({ kind = "", children }) => html`<span class=${`badge ${kind}`}>${children}</span>`;

export const Empty = ({ icon, title, children }) =>
  html`<div class="empty"><${Icon} name=${icon} /><p class="empty-title">${title}</p><div class="muted">${children}</div></div>`;

export const Skeleton = ({ lines = 3 }) =>
  html`<div class="skeleton" role="status" aria-label="Loading">${Array.from({ length: lines }, () => html`<div></div>`)}</div>`;

// A message whose commands stand in backticks.
const Message = ({ text }) => text.split("`").map((part, i) => (i % 2 ? html`<code key=${i}>${part}</code>` : part));

export const Fault = ({ error, retry }) =>
  html`<div class="notice bad" role="alert">
    <p><${Message} text=${error.status === 403 ? `${error.message}. Log in with a key that has this scope.` : error.message} /></p>
    ${retry && html`<button type="button" class="small" onClick=${retry}>Try again</button>`}
  </div>`;

export const Loaded = ({ of, lines, children }) =>
  of.error && !of.value ? html`<${Fault} error=${of.error} retry=${of.reload} />` : of.value === undefined ? html`<${Skeleton} lines=${lines} />` : children(of.value);

export const Bar = ({ part, label }) =>
  html`<div class=${`progress${part == null ? " unknown" : ""}`} role="progressbar" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${part == null ? undefined : Math.round(part * 100)}>
    <div style=${{ width: part == null ? undefined : `${Math.min(100, part * 100)}%` }}></div>
  </div>`;

let fields = 0;
export function Field({ label, hint, children }) {
  const [id] = useState(() => `field-${++fields}`);
  return html`<div class="field">
    <label for=${id}>${label}</label>
    ${children({ id, "aria-describedby": hint ? `${id}-hint` : undefined })}
    ${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}
  </div>`;
}

// A modal dialog: the browser keeps the focus inside, Escape closes it, and the focus goes back to where it was.
export function Dialog({ title, onClose, children, wide }) {
  const dialog = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${dialog} class=${wide ? "wide" : ""} aria-label=${title} onClose=${onClose} onClick=${(event) => event.target === dialog.current && onClose()}>
    <div class="dialog-body">
      <header class="row"><h2>${title}</h2><${IconButton} icon="close" label="Close" onClick=${onClose} /></header>
      ${children}
    </div>
  </dialog>`;
}

const toasts = new Store({ list: [] });
let toasted = 0;
export function toast(text, kind = "") {
  const id = ++toasted;
  toasts.set({ list: [...toasts.value.list, { id, text, kind }].slice(-3) });
  setTimeout(() => toasts.set({ list: toasts.value.list.filter((each) => each.id !== id) }), kind === "bad" ? 8000 : 4000);
}

export function Toasts() {
  const { list } = useStore(toasts);
  return html`<div class="toasts" role="status">${list.map((each) => html`<p key=${each.id} class=${each.kind}>${each.text}</p>`)}</div>`;
}

// Runs `work`, and tells its fault, or the text that it returns.
export async function act(work) {
  try {
    const told = await work();
    if (told) toast(told);
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message, "bad");
  }
}

export function Action({ run, label, kind = "", children, ...rest }) {
  const [busy, setBusy] = useState(false);
  const click = async () => {
    setBusy(true);
    await act(run);
    setBusy(false);
  };
  return html`<button type="button" class=${kind} aria-label=${label} disabled=${busy} onClick=${click} ...${rest}>${children}</button>`;
}
