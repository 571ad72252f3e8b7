// Markdown that a model writes, as elements. HTML in it is text; of what Markdown makes, only the
// tags and addresses below are let through.

import DOMPurify from "./vendor/purify.es.mjs";
import {Marked} from "./vendor/marked.esm.js";
import {copyButton} from "./clipboard.js";
import {make} from "./tree.js";

const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"};
const escaped = (text) => text.replace(/[&<>"]/g, (character) => ENTITIES[character]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({text}) => escaped(text),
    image: ({href, text}) => escaped(`${text || "image"} (${href})`), // nothing is loaded from elsewhere
    checkbox: ({checked}) => (checked ? "☑ " : "☐ "),
  },
  tokenizer: {
    // 3*4 and 5*6 is arithmetic: undefined is "no emphasis here", false would be "as usual".
    emStrong: (source, masked, before) => (/\d/.test(before) && /^\*\d/.test(source) ? undefined : false),
  },
});

export function render(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
  for (const table of fragment.querySelectorAll("table")) wrap(table, "scroll");
  for (const code of fragment.querySelectorAll("pre > code")) {
    const pre = code.parentElement;
    pre.tabIndex = 0; // scrolled with the arrow keys
    wrap(pre, "code").append(copyButton(() => code.textContent, "Copy this code"));
  }
  return fragment;
}

function wrap(element, className) {
  const box = make("div", className);
  element.replaceWith(box);
  box.append(element);
  return box;
}

// Colours, once the text is complete.
export async function colour(root) {
  const blocks = root.querySelectorAll("pre > code[class^=language-]");
  if (!blocks.length) return;
  const {default: highlight} = await import("./vendor/highlight.min.js");
  for (const block of blocks) {
    const language = block.className.replace("language-", "");
    if (highlight.getLanguage(language)) highlight.highlightElement(block);
  }
}
