// Markdown as elements of the page. No text of a model ever becomes HTML: each token becomes an element of its kind or
// text, links lead to the web alone, and pictures become links, since this page asks no other host.
import { html, useLayoutEffect, useMemo, useRef, useState } from "./preact-htm.js";
import { coloured } from "./code.js";
import { Marked } from "./marked.js";
import { Icon, act } from "./parts.js";

// TeX between $, $$, \( \) or \[ \]. A sum of money is none: a formula has no space inside its $, and no digit after it.
const FORMULA = /^(?:\$\$((?:\\[^]|[^\\$]){1,5000}?)\$\$|\\\[([^]{1,5000}?)\\\]|\\\(([^]{1,2000}?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n]){1,2000}?)(?<!\s)\$(?!\d))/;
const formula = (level, start) => ({
  name: `${level}Formula`, level, start: (text) => text.match(start)?.index,
  tokenizer(text) {
    const found = FORMULA.exec(text);
    if (!found || (level === "block" && !(found[1] ?? found[2]))) return undefined;
    const raw = level === "block" ? found[0] + text.slice(found[0].length).match(/^[ \t]*\n*/)[0] : found[0];
    return { type: "formula", raw, text: (found[1] ?? found[2] ?? found[3] ?? found[4]).trim(), display: Boolean(found[1] ?? found[2]) };
  },
});
const marked = new Marked({ gfm: true, breaks: true, extensions: [formula("block", /\n(?:\$\$|\\\[)/), formula("inline", /\$|\\[[(]/)] });
const OPEN = 2; // blocks at the end of a text that more text may still change
const PLAIN = new Set(["strong", "em", "del"]);

const decoder = document.createElement("textarea"); // its content is text, whatever it says
function decoded(text) {
  if (!text.includes("&")) return text;
  decoder.innerHTML = text.replaceAll("<", "&lt;");
  return decoder.value;
}

const isWeb = (href) => /^(?:https?:|mailto:)/i.test(href);
const link = (href, title, children) => (isWeb(href) ? html`<a href=${href} title=${title} target="_blank" rel="noopener noreferrer">${children}</a>` : html`<a title=${title}>${children}</a>`);

const inline = (tokens = []) => tokens.map((token) => {
  if (PLAIN.has(token.type)) return html`<${token.type}>${inline(token.tokens)}<//>`;
  switch (token.type) {
    case "codespan": return html`<code>${token.text}</code>`;
    case "br": return html`<br />`;
    case "link": return link(token.href, token.title, inline(token.tokens));
    case "image": return link(token.href, token.title, token.text || token.href);
    case "formula": return html`<${Formula} ...${token} />`;
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "text": return token.tokens ? inline(token.tokens) : decoded(token.text);
    default: return token.text ?? token.raw;
  }
});

const item = ({ tokens, loose }) => html`<li dir="auto">${tokens.map((token) => (token.type === "text" || (token.type === "paragraph" && !loose) ? inline(token.tokens || [token]) : token.type === "checkbox" ? inline([token]) : block(token)))}</li>`;
const cell = (kind, { tokens, align }) => html`<${kind} dir="auto" align=${align}>${inline(tokens)}<//>`;

function block(token) {
  switch (token.type) {
    case "space": case "def": return null;
    case "formula": return html`<${Formula} ...${token} />`;
    case "code": return html`<${Code} text=${token.text} lang=${token.lang} />`;
    case "heading": return html`<h3 dir="auto">${inline(token.tokens)}</h3>`;
    case "hr": return html`<hr />`;
    case "blockquote": return html`<blockquote dir="auto">${token.tokens.map(block)}</blockquote>`;
    case "list": return token.ordered ? html`<ol dir="auto" start=${token.start}>${token.items.map(item)}</ol>` : html`<ul dir="auto">${token.items.map(item)}</ul>`;
    case "table": return html`<div class="scroll" tabindex="0" role="region" aria-label="Table"><table dir="auto"><thead><tr>${token.header.map((each) => cell("th", each))}</tr></thead><tbody>${token.rows.map((row) => html`<tr>${row.map((each) => cell("td", each))}</tr>`)}</tbody></table></div>`;
    case "html": return html`<p dir="auto" class="raw">${token.text}</p>`;
    default: return html`<p dir="auto">${inline(token.tokens || [{ type: "text", text: token.raw }])}</p>`;
  }
}

function Code({ text, lang }) {
  const [copied, setCopied] = useState(false);
  const copy = () => act(async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  });
  return html`<div class="code">
    <header><span>${lang || "text"}</span><button type="button" class="small quiet" aria-label="Copy the code" onClick=${copy}><${Icon} name="copy" />${copied ? "Copied" : "Copy"}</button></header>
    <pre tabindex="0" aria-label=${`Code, ${lang || "text"}`}><code>${coloured(text, lang)}</code></pre>
  </div>`;
}

let renderer; // a promise of KaTeX, which is fetched with the first formula

// A formula as MathML, which the browser shows; what was written until then, and where it is no formula.
function Formula({ raw, text, display }) {
  const place = useRef(null);
  useLayoutEffect(() => {
    const element = place.current;
    element.textContent = raw;
    renderer ??= import("./katex.js").then(() => self.katex);
    renderer.then((katex) => {
      try {
        if (element.textContent === raw) katex.render(text, element, { displayMode: display, output: "mathml", maxExpand: 100, maxSize: 20, strict: "ignore" });
      } catch {
        element.textContent = raw;
      }
    }, () => (renderer = undefined));
  }, [raw]);
  return html`<span class=${display ? "formula display" : "formula"} ref=${place}></span>`;
}

// A block is made again only when its own text changes.
const Block = ({ token }) => useMemo(() => block(token), [token.raw]);

// The tokens of a text that grows: only its last blocks are read again. A text that does not go on is read anew.
function useTokens(text) {
  const known = useRef({ text: "", tokens: [] });
  return useMemo(() => {
    const { text: before, tokens } = known.current;
    const closed = text.startsWith(before) ? tokens.slice(0, -OPEN) : [];
    const length = closed.reduce((sum, token) => sum + token.raw.length, 0);
    const whole = closed.every((token) => token.type !== "def") && closed.map((token) => token.raw).join("") === text.slice(0, length);
    const found = whole ? [...closed, ...marked.lexer(text.slice(length))] : marked.lexer(text);
    known.current = { text, tokens: found };
    return found;
  }, [text]);
}

export function Markdown({ text }) {
  return html`<div class="prose">${useTokens(text).map((token, i) => token.type !== "space" && html`<${Block} key=${i} token=${token} />`)}</div>`;
}
