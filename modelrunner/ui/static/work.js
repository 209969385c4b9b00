// What this page lets the daemon do with lines of progress: loads, checks of files, installations. It goes on while
// another view is shown.
import { html } from "./preact-htm.js";
import { progress } from "./api.js";
import { Store, useStore } from "./live.js";
import { Bar, Fault, bytes, seconds, toast } from "./parts.js";

export const work = new Store({ list: [], done: 0 });
let begun = 0;

export function failed(title, fault) {
  work.set({ list: [...work.value.list, { id: ++begun, title, layers: {}, fault }] });
}

export async function start(title, path, body) {
  const stop = new AbortController();
  const id = ++begun;
  const change = (news) => work.set({ list: work.value.list.map((each) => (each.id === id ? { ...each, ...news } : each)) });
  work.set({ list: [...work.value.list, { id, title, stop, layers: {}, message: "waiting", fault: null }] });
  try {
    for await (const step of progress(path, body, stop.signal)) {
      const mine = work.value.list.find((each) => each.id === id);
      const layers = step.layer ? { ...mine.layers, [step.layer.id]: step.layer } : mine.layers;
      change({ layers, message: step.message, rate: step.rate, total: step.total, current: step.current });
      if (step.type === "warning" || step.type === "success") toast(step.message);
    }
    work.set({ list: work.value.list.filter((each) => each.id !== id), done: work.value.done + 1 });
  } catch (error) {
    if (error.name === "AbortError") work.set({ list: work.value.list.filter((each) => each.id !== id), done: work.value.done + 1 });
    else change({ fault: error });
  }
}

function amount(step) {
  const layers = Object.values(step.layers);
  if (layers.length) return [layers.reduce((sum, each) => sum + each.current, 0), layers.reduce((sum, each) => sum + each.size, 0)];
  return [step.current, step.total];
}

export function Work() {
  const { list } = useStore(work);
  const drop = (id) => work.set({ list: work.value.list.filter((each) => each.id !== id) });
  return list.map((step) => {
    const [current, total] = amount(step);
    const left = step.rate && total ? (total - current) / step.rate : null;
    return html`<div class="work" key=${step.id} role="group" aria-label=${step.title}>
      <div class="row"><strong class="grow">${step.title}</strong>
        ${step.fault ? html`<button type="button" class="small" onClick=${() => drop(step.id)}>Dismiss</button>` : html`<button type="button" class="small" onClick=${() => step.stop.abort()} aria-label=${`Cancel: ${step.title}`}>Cancel</button>`}</div>
      ${step.fault ? html`<${Fault} error=${step.fault} />` : html`<${Bar} part=${total ? current / total : null} label=${step.title} />
        <p class="muted figure">${step.message}${total ? ` · ${bytes(current)} of ${bytes(total)}` : ""}${step.rate ? ` · ${bytes(step.rate)}/s` : ""}${left ? ` · ${seconds(Math.round(left))} left` : ""}</p>`}
    </div>`;
  });
}
