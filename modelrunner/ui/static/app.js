// The page: navigation, login, and the state of the connection. Each view is a module, fetched when it is first shown.
import { html, render, useEffect, useRef, useState } from "./preact-htm.js";
import { get, key } from "./api.js";
import { connect, live, useStore } from "./live.js";
import { Icon, IconButton, Skeleton, Toasts, useClock } from "./parts.js";
import { Now } from "./now.js";

const VIEWS = [
  ["now", "Now", () => Now],
  ["models", "Models", () => import("./models.js").then((module) => module.Models)],
  ["chat", "Chat", () => import("./chat.js").then((module) => module.Chat)],
  ["requests", "Requests", () => import("./requests.js").then((module) => module.Requests)],
  ["machine", "Machine", () => import("./machine.js").then((module) => module.Machine)],
  ["usage", "Usage", () => import("./usage.js").then((module) => module.Usage)],
];
const THEMES = ["auto", "light", "dark"];

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch { // an address that somebody has cut
    return part;
  }
}

function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    changed(); // an effect runs after the paint, and the address may have changed meanwhile
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  const [view, ...rest] = hash.replace(/^#\/?/, "").split("/");
  return { view: VIEWS.some(([name]) => name === view) ? view : "now", rest: rest.map(decoded) };
}

function useTheme() {
  const [theme, setTheme] = useState(localStorage.getItem("modelrunner-theme") || "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("modelrunner-theme", theme);
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])];
}

function Connection({ state }) {
  const time = useClock();
  const wait = Math.max(0, Math.ceil((state.retryAt - time) / 1000));
  const texts = {
    connecting: "Connecting", live: "Live", reconnecting: "Reconnecting", disconnected: "Disconnected", denied: "No live figures", locked: "Locked",
  };
  return html`<p class=${`connection ${state.phase}`} role="status">
    <span class="dot"></span>${texts[state.phase]}
    ${(state.phase === "reconnecting" || state.phase === "disconnected") && wait > 0 && html`<span class="figure" aria-hidden="true"> in ${wait} s</span>`}
  </p>`;
}

function Lost({ state }) {
  if (state.phase !== "reconnecting" && state.phase !== "disconnected") return null;
  return html`<div class="notice warn" role="alert">
    <p>${state.phase === "reconnecting" ? "The connection to the daemon is lost. The figures are the last ones seen; the page goes on by itself." : state.error}</p>
    <button type="button" class="small" onClick=${connect}>Try now</button>
  </div>`;
}

function Login({ trouble }) {
  const [text, setText] = useState("");
  const [fault, setFault] = useState(trouble);
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    key.set(text.trim());
    try {
      await get("version");
      connect();
    } catch (error) {
      setFault(error.status === 401 ? "The daemon does not know this key, or it has expired." : error.message);
      key.set("");
      setBusy(false);
    }
  };
  return html`<main class="login">
    <form class="card" onSubmit=${submit}>
      <span class="brand"><img src="ui/icon.svg" alt="" width="28" height="28" />modelrunner</span>
      <h1>Log in</h1>
      <p class="muted">This daemon wants an API key. This tab keeps it until it is closed, and nothing else does.</p>
      <div class="field">
        <label for="key">API key</label>
        <input id="key" ref=${field} type="password" autocomplete="off" spellcheck="false" required value=${text} onInput=${(event) => setText(event.target.value)} aria-invalid=${fault ? "true" : undefined} aria-describedby=${fault ? "key-fault" : undefined} />
        ${fault && html`<p class="fault" id="key-fault" role="alert">${fault}</p>`}
      </div>
      <button type="submit" class="primary" disabled=${busy || !text.trim()}>Log in</button>
    </form>
  </main>`;
}

function View({ name, load, rest }) {
  const [shown, setShown] = useState({});
  const { joined } = useStore(live);
  useEffect(() => {
    if (shown.fault) location.reload(); // a module that could not be fetched is not asked for again
  }, [joined]);
  useEffect(() => {
    let gone = false;
    Promise.resolve(load()).then(
      (component) => gone || setShown({ name, component }),
      () => gone || setShown({ name, fault: true }),
    );
    return () => (gone = true);
  }, [name]);
  if (shown.name !== name) return html`<${Skeleton} lines=${5} />`;
  if (shown.fault) return html`<div class="notice bad" role="alert"><p>This view cannot be fetched: the daemon does not answer. Load the page again once it runs.</p></div>`;
  return html`<${shown.component} rest=${rest} />`;
}

function App() {
  const state = useStore(live);
  const route = useRoute();
  const [theme, nextTheme] = useTheme();
  const [trouble, setTrouble] = useState("");
  const main = useRef(null);
  useEffect(() => {
    const refused = (event) => {
      setTrouble(event.detail);
      key.set("");
      live.set({ phase: "locked" });
    };
    window.addEventListener("unauthorized", refused);
    connect();
    return () => window.removeEventListener("unauthorized", refused);
  }, []);
  const [, label, load] = VIEWS.find(([name]) => name === route.view);
  useEffect(() => {
    document.title = `${label} · modelrunner`;
  }, [label]);
  if (state.phase === "locked") return html`<${Login} trouble=${trouble} />`;
  const logout = () => {
    key.set("");
    location.reload();
  };
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), main.current.focus())}>Skip to the content</a>
    <header class="side">
      <span class="brand"><img src="ui/icon.svg" alt="" width="24" height="24" />modelrunner</span>
      <nav aria-label="Views">
        ${VIEWS.map(([name, title]) => html`<a key=${name} href=${`#/${name}`} aria-current=${name === route.view ? "page" : undefined}><${Icon} name=${name} />${title}</a>`)}
      </nav>
      <div class="side-end">
        <${Connection} state=${state} />
        <div class="row start">
          <${IconButton} icon="theme" label=${`Colours: ${theme}`} onClick=${nextTheme} />
          ${key.get() && html`<button type="button" class="small quiet" onClick=${logout}>Log out</button>`}
        </div>
      </div>
    </header>
    <main class=${`main ${route.view}`} id="main" ref=${main} tabindex="-1">
      <${Lost} state=${state} />
      <${View} name=${route.view} load=${load} rest=${route.rest} />
    </main>
    <${Toasts} />`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
