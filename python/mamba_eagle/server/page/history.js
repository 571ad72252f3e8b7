// Conversations that are kept in this browser, and the list of them.

import {drop, load, save} from "./kept.js";
import {make} from "./tree.js";

const MOST = 200; // conversations
const NAME = "chats";
const TITLE = 60; // characters
const list = document.getElementById("chat-list");
let current = null; // id of the one that is open

const all = () => load(NAME, []);

function title(turns) {
  const first = turns.find(({message}) => message.role === "user")?.message.content ?? "";
  const line = first.trim().split("\n").find(Boolean) ?? "Conversation";
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

// The newest first; if the browser has no room, the oldest go.
function write(chats) {
  let kept = chats.slice(0, MOST);
  while (kept.length && !save(NAME, kept)) kept = kept.slice(0, -1);
  if (!kept.length) drop(NAME);
  show();
}

// turns: [{message, reasoning, facts}].
export function keep(turns) {
  if (!turns.length) return;
  current ??= `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
  const others = all().filter(({id}) => id !== current);
  write([{id: current, title: title(turns), turns}, ...others]);
}

export function leave() {
  current = null;
  show();
}

function open(chat) {
  current = chat.id;
  show();
  document.dispatchEvent(new CustomEvent("chat-opened", {detail: chat.turns}));
}

function forget(chat) {
  if (!confirm(`Delete “${chat.title}”?`)) return;
  const wasOpen = chat.id === current;
  if (wasOpen) current = null;
  write(all().filter(({id}) => id !== chat.id));
  if (wasOpen) document.dispatchEvent(new CustomEvent("chat-opened", {detail: []}));
}

function row(chat) {
  const item = make("li");
  const button = make("button", "quiet name", chat.title);
  button.title = chat.title;
  if (chat.id === current) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => open(chat));
  const remove = make("button", "quiet", "×");
  remove.setAttribute("aria-label", `Delete “${chat.title}”`);
  remove.addEventListener("click", () => forget(chat));
  item.append(button, remove);
  return item;
}

export function show() {
  const chats = all();
  list.replaceChildren(...chats.map(row));
  document.getElementById("no-chats").hidden = chats.length > 0;
}

// A file of the messages, as the API takes them.
export function exportFile(messages) {
  const name = title(messages.map((message) => ({message}))).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  const link = make("a");
  link.download = `${name || "conversation"}.json`;
  link.href = URL.createObjectURL(new Blob([JSON.stringify({messages}, null, 2)], {type: "application/json"}));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

addEventListener("storage", show); // another tab wrote
