// A plot of the last hour: lines over time, drawn as SVG in the width that there is.
import { html, useEffect, useRef, useState } from "./preact-htm.js";
import { clock } from "./parts.js";

const HEIGHT = 150, LEFT = 44, BOTTOM = 20, TOP = 6;

function useWidth() {
  const box = useRef(null);
  const [width, setWidth] = useState(480);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(160, entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return [box, width];
}

function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return ([1, 2, 5, 10].find((step) => step * power >= value) || 10) * power;
}

// Lines through the points that have a value; a point alone is a dash.
function pieces(points, x, y) {
  let path = "", run = [];
  const end = () => {
    path += run.length === 1 ? `M${run[0]}m-1.5 0h3` : run.length ? `M${run.join("L")}` : "";
    run = [];
  };
  for (const [time, value] of points) {
    if (value == null) end();
    else run.push(`${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
  }
  end();
  return path;
}

// `lines` are {name, hue, points: [[Unix seconds, value or null]]}, all at the same times; `show` makes text of a value,
// `most` is the end of the scale where there is one.
export function Plot({ title, lines, from, to, show, most }) {
  const [box, width] = useWidth();
  const [at, setAt] = useState(null);
  const top = most || ceiling(Math.max(...lines.flatMap((line) => line.points.map(([, value]) => value || 0)), 0));
  const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - 4);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const points = lines[0].points;
  const index = at == null ? points.length - 1 : Math.round(((at - LEFT) / (width - LEFT - 4)) * (points.length - 1));
  const point = points[Math.min(points.length - 1, Math.max(0, index))];
  const values = lines.map((line) => line.points[points.indexOf(point)]?.[1]);
  const told = lines.map((line, i) => `${line.name} ${values[i] == null ? "none" : show(values[i])}`).join(", ");
  return html`<figure class="plot" ref=${box} style=${{ margin: 0 }}>
    <figcaption><h3>${title}</h3><span class="legend figure">${lines.map((line, i) => html`<span key=${line.name}><span class=${`swatch hue${line.hue}`} style=${{ display: "inline-block" }}></span> ${line.name} <strong>${values[i] == null ? "–" : show(values[i])}</strong></span>`)}</span></figcaption>
    <svg viewBox=${`0 0 ${width} ${HEIGHT}`} role="img" aria-label=${`${title} of the last hour. At ${clock(point[0] * 1000)}: ${told}. The scale ends at ${show(top)}.`}
      onPointerMove=${(event) => setAt(event.clientX - event.currentTarget.getBoundingClientRect().left)} onPointerLeave=${() => setAt(null)}>
      ${[0, top / 2, top].map((value) => html`<g key=${value}><line class="grid" x1=${LEFT} x2=${width - 4} y1=${y(value)} y2=${y(value)} /><text class="axis" x=${LEFT - 8} y=${y(value) + 4} text-anchor="end">${show(value)}</text></g>`)}
      ${[0, 1 / 3, 2 / 3, 1].map((part) => html`<text key=${part} class="axis" x=${LEFT + part * (width - LEFT - 4)} y=${HEIGHT - 3} text-anchor=${part === 0 ? "start" : part === 1 ? "end" : "middle"}>${part === 1 ? "now" : clock((from + part * (to - from)) * 1000).slice(0, 5)}</text>`)}
      ${lines.map((line) => html`<path key=${line.name} class=${`line hue${line.hue}`} d=${pieces(line.points, x, y)} />`)}
      ${at != null && html`<line class="cursor" x1=${x(point[0])} x2=${x(point[0])} y1=${TOP} y2=${HEIGHT - BOTTOM} />`}
    </svg>
  </figure>`;
}
