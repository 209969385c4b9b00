// The colours of code: comments, texts, numbers and the words that most languages share. One look over the code, in
// which each match ends at the latest with its line or with the code, so its time grows with the length alone.
import { html } from "./preact-htm.js";

const LONGEST = 50000; // characters
const PARTS = ["comment", "text", "figure", "word"];
const HASHES = new Set(["py", "python", "sh", "bash", "shell", "zsh", "console", "yaml", "yml", "toml", "ini", "rb", "ruby", "r", "perl", "dockerfile", "makefile"]);
const DASHES = new Set(["sql", "lua", "haskell", "hs"]);
const TAGS = new Set(["html", "xml", "svg", "vue"]);
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "output", "diff", "md", "markdown"]);
const WORDS = `abstract and as assert async await begin bool boolean break case catch char class const continue def default del do done
  double elif else end enum esac except export extends extern false False fi final finally float fn for foreach from func function go if impl
  implements import in int interface is lambda let local long loop match module mut namespace new nil none None not null nullptr or package
  pass private protected pub public raise ref return select self static string struct super switch then this throw trait true True try type
  typeof undefined union unsigned until use using var virtual void when where while with yield`;
const QUERY = `all alter and as asc between by case create cross delete desc distinct drop else end exists from full group having in index inner
  insert into is join key left like limit not null offset on or order outer primary right select set table then union unique update values view when where with`;

const comments = (language) => (HASHES.has(language) ? "#.*" : DASHES.has(language) ? "--.*" : TAGS.has(language) ? "<!--[^]*?(?:-->|$)" : "//.*|/\\*[^]*?(?:\\*/|$)");
const texts = '"""[^]*?(?:"""|$)|"(?:\\\\.|[^"\\\\\\n])*(?:"|(?=\\n)|$)|\'(?:\\\\.|[^\'\\\\\\n])*(?:\'|(?=\\n)|$)|`(?:\\\\.|[^`\\\\])*(?:`|$)';
const known = new Map();

function pattern(language) {
  if (!known.has(language)) {
    const words = (language === "sql" ? QUERY : WORDS).split(/\s+/).join("|");
    known.set(language, new RegExp(`(${comments(language)})|(${texts})|\\b(\\d[\\w.]*)|\\b(${words})\\b`, language === "sql" ? "gi" : "g"));
  }
  return known.get(language);
}

// The code as texts and coloured parts. What names no language stays as it is.
export function coloured(code, lang) {
  const language = (lang || "").trim().split(/\s/)[0].toLowerCase();
  if (PLAIN.has(language) || code.length > LONGEST) return code;
  const parts = [];
  let end = 0;
  for (const found of code.matchAll(pattern(language))) {
    if (!found[0]) continue;
    parts.push(code.slice(end, found.index), html`<span class=${`code-${PARTS[found.slice(1).findIndex((each) => each !== undefined)]}`}>${found[0]}</span>`);
    end = found.index + found[0].length;
  }
  return [...parts, code.slice(end)];
}
