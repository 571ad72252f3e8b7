// A message of the model: as it is being written, or as it was kept.

import {copyButton} from "./clipboard.js";
import {colour, render} from "./markdown.js";
import {bubble, callBox, fold, pretty, tool, toolbar} from "./message.js";
import {Output, facts} from "./output.js";
import {make} from "./tree.js";

const ENDS = {stop: "ended by the model", length: "ended by max tokens", tool_calls: "waits for the calls’ results"};
const PAUSE = 5; // times as long as the last rendering took: the rest is for the tokens

export class Reply {
  message = {role: "assistant", content: ""};
  reasoning = "";
  results = []; // boxes of its calls
  #counts = {completion: 0};
  #ended = "";
  #places = {}; // by field of the delta
  #given = null; // where the arguments of the latest call are shown
  #rich = null;
  #timer = 0;
  #pause = 0; // milliseconds

  // formatted: whether Markdown is shown as what it means, or as tokens.
  constructor({traced, formatted, again}) {
    this.element = bubble("assistant");
    this.element.classList.toggle("formatted", formatted);
    this.output = new Output(this.element, traced);
    this.note = make("p", "facts");
    this.element.append(this.note);
    const view = tool("Tokens", "Show the tokens of this answer", () => {
      const now = this.element.classList.toggle("formatted");
      view.setAttribute("aria-pressed", !now);
    });
    view.dataset.act = "view";
    view.setAttribute("aria-pressed", !formatted);
    const repeat = tool("Regenerate", "Regenerate this answer", again);
    repeat.dataset.act = "again";
    toolbar(this.element, copyButton(() => this.message.content, "Copy this answer"), repeat, view);
  }

  static kept({message, reasoning, facts}, again) {
    const reply = new Reply({traced: false, formatted: true, again});
    reply.element.querySelector("[data-act=view]").remove(); // tokens are not kept
    reply.message = message;
    if (reasoning) reply.#add("reasoning_content", reasoning);
    if (message.content) reply.#add("content", message.content);
    for (const call of message.tool_calls ?? []) reply.#showCall(call);
    reply.#draw();
    reply.note.textContent = facts;
    if (reply.#rich) colour(reply.#rich);
    return reply;
  }

  get facts() {
    return this.note.textContent;
  }

  get isEmpty() {
    return !this.element.querySelector(".text, .call, .reasoning");
  }

  take(chunk, clock) {
    if (chunk.usage) {
      const {completion_tokens, prompt_tokens, prompt_tokens_details} = chunk.usage;
      this.#counts = {completion: completion_tokens, prompt: prompt_tokens, cached: prompt_tokens_details.cached_tokens};
    }
    const [choice] = chunk.choices;
    if (!choice) return;
    this.output.addSteps(choice.spec_trace ?? []);
    this.output.addBest((choice.logprobs?.content ?? []).map((at) => at.top_logprobs.map(({token, logprob}) => ({text: token, logprob}))));
    for (const field of ["reasoning_content", "content"]) {
      if (choice.delta[field]) this.#add(field, choice.delta[field]);
    }
    this.message.content += choice.delta.content ?? "";
    for (const call of choice.delta.tool_calls ?? []) this.#call(call);
    if (choice.delta.content) this.#drawSoon();
    if (choice.finish_reason) this.#ended = ENDS[choice.finish_reason] ?? choice.finish_reason;
    if (typeof choice.matched_stop === "string") this.#ended = "ended by a stop string";
    const steps = this.output.steps;
    if (steps.length) clock.take(1 + steps.reduce((sum, step) => sum + step.accepted.length, 0));
  }

  finish(clock, stopped) {
    this.output.finish(this.#last ?? this.element);
    this.#draw();
    if (this.#counts.completion) clock.take(this.#counts.completion);
    else this.#counts.completion = clock.tokens;
    this.note.textContent = facts(this.output, this.#counts, clock.speed, stopped ? "stopped by you" : this.#ended || "cut off");
    if (this.#rich) colour(this.#rich);
  }

  get #last() {
    return this.#places.written ?? this.#places.content ?? this.#places.reasoning_content;
  }

  #drawSoon() {
    this.#timer ||= setTimeout(() => this.#draw(), this.#pause);
  }

  #draw() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (!this.message.content || !this.#rich) return;
    const begun = performance.now();
    this.#rich.replaceChildren(render(this.message.content));
    this.#pause = PAUSE * (performance.now() - begun);
  }

  #add(field, text) {
    if (field === "reasoning_content") this.reasoning += text;
    this.output.addText(this.#place(field), text);
  }

  #place(field) {
    if (this.#places[field]) return this.#places[field];
    const text = make("div", "text output");
    if (field === "content") {
      this.#rich = make("div", "rich");
      this.note.before(this.#rich, text);
    } else this.note.before(fold("reasoning", "Reasoning", text));
    return (this.#places[field] = text);
  }

  // A call comes in pieces; the tokens that wait for their text are those that it was made of.
  #call(call) {
    const calls = (this.message.tool_calls ??= []);
    if (call.id) {
      calls.push({id: call.id, type: "function", function: call.function});
      this.#showCall(call);
    } else {
      const called = calls.at(-1).function;
      called.arguments += call.function.arguments;
      this.#given.textContent = pretty(called.arguments);
    }
    if (!this.output.traced) return;
    if (!this.#places.written) {
      this.#places.written = make("div", "text output");
      this.note.before(fold("written", "As the model wrote it", this.#places.written));
    }
    this.output.aligner.takeTokens(this.#places.written);
  }

  #showCall(call) {
    const {box, result, given} = callBox(call);
    this.#given = given;
    this.note.before(box);
    this.results.push(result);
  }
}
