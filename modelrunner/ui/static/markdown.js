// Markdown as components. Whatever a model writes becomes text, links to the web and plain formatting: raw HTML is shown
// as it stands, and pictures become links, since this page asks no other host.
import { html, useMemo, useState } from "./preact-htm.js";
import { Marked } from "./marked.js";
import "./purify.js";
import { Icon, act } from "./parts.js";

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    heading({ tokens }) {
      return `<h3>${this.parser.parseInline(tokens)}</h3>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
const purify = globalThis.DOMPurify;
const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h3", "hr", "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "title", "align", "start", "target", "rel"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

export const clean = (token) => purify.sanitize(marked.parser([token]), ALLOWED);

function Code({ text, lang }) {
  const [copied, setCopied] = useState(false);
  const copy = () => act(async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  });
  return html`<div class="code">
    <header><span>${lang || "text"}</span><button type="button" class="small quiet" aria-label="Copy the code" onClick=${copy}><${Icon} name="copy" />${copied ? "Copied" : "Copy"}</button></header>
    <pre tabindex="0" aria-label=${`Code, ${lang || "text"}`}><code>${text}</code></pre>
  </div>`;
}

// A block is made again only when its own text changes: a long answer that grows costs its last block.
function Block({ token }) {
  const made = useMemo(() => ({ __html: clean(token) }), [token.raw]);
  return html`<div dangerouslySetInnerHTML=${made}></div>`;
}

export function Markdown({ text }) {
  const tokens = marked.lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
  return html`<div class="prose">${tokens.map((token, i) => (token.type === "code" ? html`<${Code} key=${i} text=${token.text} lang=${token.lang} />` : html`<${Block} key=${i} token=${token} />`))}</div>`;
}
