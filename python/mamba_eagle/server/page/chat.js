// Messages to and fro, by /v1/chat/completions.

import {Stream} from "./api.js";
import {detach, hasFiles, withFiles} from "./attach.js";
import {exportFile, keep, leave} from "./history.js";
import {bubble, userMessage} from "./message.js";
import {Reply} from "./reply.js";
import {chatOnly, sampling, systemMessage, wantsAlternatives, wantsFormat, wantsTrees} from "./settings.js";

const $ = (id) => document.getElementById(id);
let turns = []; // {message, element, results, reasoning, facts}: results are the boxes of its calls
let before = null; // {at, turns} while a turn is asked anew: what a refusal gives back

const open = () => turns.at(-1)?.results?.length > 0;
const unanswered = () => turns.length > 0 && turns.at(-1).message.role !== "assistant";
export const isEmpty = () => turns.length === 0;
export const canSend = () => Boolean($("message").value.trim()) || hasFiles() || open() || unanswered();

function add(turn) {
  turns.push(turn);
  $("messages").append(turn.element);
  turn.element.scrollIntoView({block: "nearest"});
  return turn;
}

function addMessage(message) {
  const turn = {message, results: []};
  turn.element =
    message.role === "user"
      ? userMessage(message.content, (text) => again(turn, text))
      : bubble(message.role, message.content || "(empty)");
  return add(turn);
}

// Asks anew from a turn on, or from a user's turn with another text.
function again(turn, text = null) {
  const at = turns.indexOf(turn);
  if (at < 0) return;
  before = {at, turns: turns.slice(at)};
  cut(at);
  if (text !== null) addMessage({role: "user", content: text});
  document.dispatchEvent(new Event("ask-again"));
}

function cut(at) {
  for (const {element} of turns.splice(at)) element.remove();
}

export function start() {
  const system = systemMessage();
  const results = turns.at(-1)?.results ?? [];
  const said = results.map((box) => ({role: "tool", tool_call_id: box.dataset.call, name: box.dataset.name, content: box.value}));
  const text = before ? "" : withFiles($("message").value.trim());
  if (text) said.push({role: "user", content: text});
  const messages = [...(system ? [{role: "system", content: system}] : []), ...turns.map((turn) => turn.message), ...said];
  const stream = new Stream("v1/chat/completions", {
    messages,
    ...sampling(),
    ...chatOnly(),
    return_spec_trace: wantsTrees(),
    ...(wantsAlternatives() && {logprobs: true, top_logprobs: 5}),
    stream_options: {include_usage: true},
  });
  for (const message of said) addMessage(message);
  for (const box of results) box.disabled = true;
  if (text) {
    $("message").value = "";
    detach();
  }
  return stream;
}

export async function run(stream, clock) {
  const reply = new Reply({traced: stream.body.return_spec_trace, formatted: wantsFormat(), again: () => again(reply)});
  add(reply);
  let failed = true;
  try {
    for await (const chunk of stream) reply.take(chunk, clock);
    failed = false;
  } finally {
    reply.finish(clock, stream.stopped);
    const refused = failed && !stream.stopped && reply.isEmpty;
    if (!refused) save();
    else if (before) giveBack();
    else undo();
    before = null;
  }
}

// A refused request leaves the conversation as it was.
export function giveBack() {
  if (!before) return;
  cut(before.at);
  for (const turn of before.turns) add(turn);
  before = null;
}

function save() {
  keep(turns.map(({message, reasoning, facts}) => ({message, reasoning, facts})));
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
  cut(0);
  leave();
}

export function show(kept) {
  cut(0);
  for (const turn of kept) {
    if (turn.message.role === "assistant") {
      const reply = Reply.kept(turn, () => again(reply));
      add(reply);
    } else addMessage(turn.message);
  }
  for (const turn of turns.slice(0, -1)) for (const box of turn.results) box.disabled = true;
}

export const download = () => exportFile(turns.map((turn) => turn.message));
