// A text that a model writes, token by token: each is a place to point at, or to move to with the
// arrow keys, and shows the step that it came from.

import {Aligner} from "./align.js";
import {showToken} from "./steps.js";
import {make, rootOf, tokensOf, visible} from "./tree.js";

export class Output {
  steps = [];
  #best = []; // by token, in the order of the output: its likeliest alternatives, itself included
  #count = 0; // tokens so far
  #spans = [];
  #tokens = new Map(); // by span
  #last = null; // id of the last token
  #pinned = null; // a span
  #growing = true; // while it does, the newest step is shown, unless one is pointed at
  #pointed = false;
  #drawing = false;

  constructor(root, traced) {
    this.traced = traced; // whether steps come with the text
    this.aligner = new Aligner((place, text, token) => this.#show(place ?? root, text, token));
    root.addEventListener("mouseover", (event) => this.#point(event.target));
    root.addEventListener("mouseleave", () => this.#leave());
    root.addEventListener("focusin", (event) => this.pin(event.target));
    root.addEventListener("click", (event) => this.#tokens.has(event.target) && event.target.focus());
    root.addEventListener("keydown", (event) => this.#move(event));
  }

  // Steps come before or with the text that they made.
  addSteps(steps) {
    for (const step of steps) {
      // Before the first step, and where a request was sent back to the queue, the prompt's own
      // pass makes a token.
      if (this.#last !== step.tokens[0]) this.#add([rootOf(step)]);
      this.#last = step.bonus;
      this.steps.push(step);
      const number = this.steps.length;
      this.#add(tokensOf(step).map((token) => ({...token, number})));
    }
  }

  #add(tokens) {
    this.aligner.addTokens(tokens.map((token) => ({...token, index: this.#count++})));
  }

  // What the model found likeliest at each of the next tokens: lists of {text, logprob}.
  addBest(lists) {
    this.#best.push(...lists);
  }

  bestAt(token) {
    return this.#best[token.index] ?? [];
  }

  addText(place, text) {
    if (this.traced) this.aligner.addText(place, text);
    else this.#show(place, text, null);
  }

  finish(place) {
    this.aligner.finish(place);
    this.#growing = false;
  }

  // Shows a token's step until another is chosen.
  pin(span) {
    if (!this.#tokens.has(span)) return;
    this.#pinned?.classList.remove("chosen");
    for (const each of this.#spans) each.tabIndex = -1;
    span.tabIndex = 0; // one token is in the order of the Tab key, the others by arrows
    span.classList.add("chosen");
    this.#pinned = span;
    this.#showStep(span);
    span.scrollIntoView({block: "nearest"});
  }

  unpin() {
    this.#pinned?.classList.remove("chosen");
    this.#pinned?.blur();
    this.#pinned = null;
    this.#mark(null);
  }

  firstOf(step) {
    return this.#spans.find((span) => this.#tokens.get(span).step === step);
  }

  #show(place, text, token) {
    if (!token) {
      place.append(document.createTextNode(text));
      return;
    }
    const span = make("span", `token ${token.kind}`, text);
    if (!text) span.dataset.shown = visible(token.text); // as an end of text: by CSS, it is no text
    span.dataset.step = token.number ?? 0;
    span.tabIndex = this.#spans.length ? -1 : 0;
    place.append(span);
    this.#spans.push(span);
    this.#tokens.set(span, token);
    this.#follow();
  }

  #follow() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      if (!this.#pointed && !this.#pinned) showToken(this, this.#tokens.get(this.#spans.at(-1)), false);
    });
  }

  #point(span) {
    if (!this.#tokens.has(span)) return;
    this.#pointed = true;
    this.#showStep(span);
  }

  #leave() {
    this.#pointed = false;
    if (this.#pinned) this.#showStep(this.#pinned);
    else if (this.#growing) this.#mark(null);
  }

  #showStep(span) {
    const token = this.#tokens.get(span);
    this.#mark(token.step);
    showToken(this, token, this.#pinned !== null);
  }

  // The tokens of one step belong together.
  #mark(step) {
    for (const span of this.#spans) span.classList.toggle("same", step !== null && this.#tokens.get(span).step === step);
  }

  #move(event) {
    const spans = this.#spans.filter((span) => span.checkVisibility());
    const at = spans.indexOf(event.target);
    if (at < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    const last = spans.length - 1;
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last}[event.key] ?? this.#otherStep(spans, at, event.key);
    if (to === undefined) return;
    event.preventDefault();
    spans[Math.max(0, Math.min(last, to))].focus();
  }

  // Up and down go by steps.
  #otherStep(spans, at, key) {
    if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
    const by = key === "ArrowDown" ? 1 : -1;
    const step = (index) => this.#tokens.get(spans[index])?.step;
    let to = at;
    while (spans[to] && step(to) === step(at)) to += by;
    while (by < 0 && to > 0 && step(to - 1) === step(to)) to -= 1;
    return to;
  }
}

// What a request cost, under its text.
export function facts(output, counts, speed, ended) {
  const parts = [`${counts.completion} token${counts.completion === 1 ? "" : "s"}`];
  const drafted = output.steps.some((step) => step.tokens.length > 1);
  if (drafted) {
    const made = output.steps.reduce((sum, step) => sum + step.accepted.length, 0);
    parts.push(`${output.steps.length} steps`, `${(made / output.steps.length).toFixed(2)} tokens per step`);
  }
  if (speed) parts.push(`${speed.toFixed(0)} tokens/s`);
  if (counts.prompt !== undefined) parts.push(`${counts.cached} of ${counts.prompt} prompt tokens cached`);
  parts.push(ended);
  return parts.join(" · ");
}
