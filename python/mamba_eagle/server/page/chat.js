// Messages to and fro, by /v1/chat/completions.

import {Stream} from "./api.js";
import {Output, facts} from "./output.js";
import {chatOnly, sampling, systemMessage, wantsTrees} from "./settings.js";
import {make} from "./tree.js";

const $ = (id) => document.getElementById(id);
const ENDS = {stop: "ended by the model", length: "ended by max tokens", tool_calls: "waits for the calls’ results"};
let turns = []; // {message, element, results}: results are the boxes of a message's calls

const open = () => turns.at(-1)?.results?.length > 0;
export const isEmpty = () => turns.length === 0;
export const canSend = () => Boolean($("message").value.trim()) || open();

function add(message, element) {
  const turn = {message, element, results: []};
  turns.push(turn);
  $("messages").append(element);
  element.scrollIntoView({block: "nearest"});
  return turn;
}

function bubble(role, text = "") {
  const element = make("article", `message ${role}`);
  element.setAttribute("aria-label", {user: "You", assistant: "The model", tool: "Result of a call"}[role]);
  if (text) element.append(make("div", "text", text));
  return element;
}

export function start() {
  const system = systemMessage();
  const results = turns.at(-1)?.results ?? [];
  const said = results.map((box) => ({role: "tool", tool_call_id: box.dataset.call, name: box.dataset.name, content: box.value}));
  const text = $("message").value.trim();
  if (text) said.push({role: "user", content: text});
  const messages = [...(system ? [{role: "system", content: system}] : []), ...turns.map((turn) => turn.message), ...said];
  const stream = new Stream("v1/chat/completions", {
    messages,
    ...sampling(),
    ...chatOnly(),
    return_spec_trace: wantsTrees(),
    stream_options: {include_usage: true},
  });
  for (const message of said) add(message, bubble(message.role, message.content || "(empty)"));
  for (const box of results) box.disabled = true;
  $("message").value = "";
  return stream;
}

export async function run(stream, clock) {
  const turn = add({role: "assistant", content: ""}, bubble("assistant"));
  const reply = new Reply(turn, stream.body.return_spec_trace);
  let failed = true;
  try {
    for await (const chunk of stream) reply.take(chunk, clock);
    failed = false;
  } finally {
    reply.finish(clock, stream.stopped);
    if (failed && !stream.stopped && reply.isEmpty) undo();
  }
}

// Takes the last exchange back; what was written is in the box again.
export function undo() {
  while (turns.length) {
    const {message, element} = turns.pop();
    element.remove();
    if (message.role === "user") {
      $("message").value ||= message.content;
      break;
    }
  }
  for (const box of turns.at(-1)?.results ?? []) box.disabled = false;
}

export function clear() {
  for (const {element} of turns) element.remove();
  turns = [];
}

// The message that is being written.
class Reply {
  #counts = {completion: 0};
  #ended = "";
  #places = {}; // by field of the delta

  constructor(turn, traced) {
    this.turn = turn;
    this.output = new Output(turn.element, traced);
    this.note = make("p", "facts");
    turn.element.append(this.note);
  }

  get isEmpty() {
    return !this.turn.element.querySelector(".text, .call, .reasoning");
  }

  take(chunk, clock) {
    if (chunk.usage) {
      const {completion_tokens, prompt_tokens, prompt_tokens_details} = chunk.usage;
      this.#counts = {completion: completion_tokens, prompt: prompt_tokens, cached: prompt_tokens_details.cached_tokens};
    }
    const [choice] = chunk.choices;
    if (!choice) return;
    this.output.addSteps(choice.spec_trace ?? []);
    for (const field of ["reasoning_content", "content"]) {
      if (choice.delta[field]) this.output.addText(this.#place(field), choice.delta[field]);
    }
    this.turn.message.content += choice.delta.content ?? "";
    for (const call of choice.delta.tool_calls ?? []) this.#call(call);
    if (choice.finish_reason) this.#ended = ENDS[choice.finish_reason] ?? choice.finish_reason;
    if (typeof choice.matched_stop === "string") this.#ended = "ended by a stop string";
    const steps = this.output.steps;
    if (steps.length) clock.take(1 + steps.reduce((sum, step) => sum + step.accepted.length, 0));
  }

  finish(clock, stopped) {
    this.output.finish(this.#last ?? this.turn.element);
    if (this.#counts.completion) clock.take(this.#counts.completion);
    else this.#counts.completion = clock.tokens;
    this.note.textContent = facts(this.output, this.#counts, clock.speed, stopped ? "stopped by you" : this.#ended || "cut off");
    this.turn.element.append(this.note);
  }

  get #last() {
    return this.#places.written ?? this.#places.content ?? this.#places.reasoning_content;
  }

  #place(field) {
    if (this.#places[field]) return this.#places[field];
    const text = make("div", "text output");
    if (field === "content") this.note.before(text);
    else this.note.before(fold("reasoning", "Reasoning", text));
    return (this.#places[field] = text);
  }

  // A call comes whole; the tokens that wait for their text are those that it was made of.
  #call({id, function: called}) {
    (this.turn.message.tool_calls ??= []).push({id, type: "function", function: called});
    const box = make("div", "call");
    const head = make("p", "call-name", "calls ");
    head.append(make("code", "", called.name));
    const result = make("input");
    result.placeholder = "what the function returns";
    Object.assign(result.dataset, {call: id, name: called.name});
    const label = make("label", "", "result ");
    label.append(result);
    box.append(head, make("pre", "arguments", pretty(called.arguments)), label);
    this.note.before(box);
    this.turn.results.push(result);
    if (!this.output.traced) return;
    if (!this.#places.written) {
      this.#places.written = make("div", "text output");
      this.note.before(fold("written", "As the model wrote it", this.#places.written));
    }
    this.output.aligner.takeTokens(this.#places.written);
  }
}

function fold(className, title, content) {
  const details = make("details", className);
  details.append(make("summary", "", title), content);
  return details;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
