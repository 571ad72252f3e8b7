// Tabs, buttons and keys; one request at a time.

import {get, saveKey} from "./api.js";
import {attach} from "./attach.js";
import * as chat from "./chat.js";
import * as completion from "./completion.js";
import {show as showHistory} from "./history.js";
import {watchServer} from "./live.js";
import {sends} from "./message.js";
import {showChatOnly} from "./settings.js";
import {clearSteps} from "./steps.js";

const $ = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];
const buttons = (act) => document.querySelectorAll(`[data-act=${act}]`);
let stream = null; // the request that runs

// Tokens per second of what comes after the first event, which has waited for the prompt.
class Clock {
  static LEAST = 20; // milliseconds: events that come at once tell no speed

  #first = null;
  tokens = 0;
  speed = 0;

  take(tokens) {
    const now = performance.now();
    this.#first ??= {now, tokens};
    if (tokens === this.tokens) return;
    this.tokens = tokens;
    if (now > this.#first.now + Clock.LEAST) this.speed = (1000 * (tokens - this.#first.tokens)) / (now - this.#first.now);
  }
}

const active = () => ($("tab-chat").getAttribute("aria-selected") === "true" ? chat : completion);

function showError(message = "") {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function showState() {
  for (const button of buttons("send")) button.disabled = stream !== null;
  for (const button of buttons("stop")) button.disabled = stream === null;
  document.body.classList.toggle("busy", stream !== null);
  for (const act of ["undo", "clear", "export"])
    for (const button of buttons(act)) button.disabled = stream !== null || chat.isEmpty();
}

async function send() {
  const room = active();
  if (stream || (room === chat && !chat.canSend())) return;
  showError();
  try {
    stream = room.start();
    showState();
    $("status").textContent = "The model is writing.";
    await room.run(stream, new Clock());
    $("status").textContent = "The answer is complete.";
  } catch (error) {
    if (!stream) chat.giveBack(); // it could not even be sent
    if (stream?.stopped) $("status").textContent = "Stopped.";
    else {
      clearSteps();
      if (error.status !== 401) showError(error.message);
    }
  } finally {
    stream = null;
    showState();
    watchServer();
  }
}

function choose(tab) {
  for (const each of tabs) {
    each.setAttribute("aria-selected", each === tab);
    each.tabIndex = each === tab ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
  $("chats").hidden = tab !== $("tab-chat");
  showChatOnly(tab === $("tab-chat"));
  showError();
  clearSteps();
}

async function greet() {
  try {
    const info = await get("model_info");
    $("model").textContent = `${info.served_model_name.split("/").pop()} · context ${info.max_model_len.toLocaleString("en")} tokens`;
    $("model").title = info.served_model_name;
    $("key").hidden = true;
    showError();
    watchServer();
    const {chat_template} = await get("tokenizer_info");
    if (!chat_template && active() === chat && chat.isEmpty()) choose($("tab-completion"));
  } catch (error) {
    if (error.status !== 401) showError(error.message);
  }
}

document.addEventListener("key-needed", () => {
  if (!$("key").hidden) {
    $("key-note").textContent = "The server did not take this key.";
    return;
  }
  $("key").hidden = false;
  $("key-value").focus();
});

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey($("key-value").value.trim());
  greet();
});

for (const button of buttons("send")) button.addEventListener("click", send);
for (const button of buttons("stop")) button.addEventListener("click", () => stream?.stop());

function whenPressed(act, change) {
  for (const button of buttons(act)) {
    button.addEventListener("click", () => {
      change();
      clearSteps();
      showState();
      $("message").focus();
    });
  }
}

whenPressed("undo", chat.undo);
whenPressed("clear", chat.clear);
whenPressed("export", chat.download);
document.addEventListener("ask-again", send);
document.addEventListener("chat-opened", (event) => {
  chat.show(event.detail);
  clearSteps();
  showError();
  showState();
});

// While an answer comes, nothing else changes the conversation.
document.addEventListener("click", (event) => {
  if (stream && event.target.closest("[data-act=again], [data-act=edit], #chats button")) event.stopPropagation();
}, true);

async function take(files) {
  showError();
  try {
    await attach(files);
  } catch (error) {
    showError(error.message);
  }
  $("message").focus();
}

for (const button of buttons("attach")) button.addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await take($("file").files);
  $("file").value = ""; // the same file may be chosen again
});
$("panel-chat").addEventListener("dragover", (event) => event.preventDefault());
$("panel-chat").addEventListener("drop", (event) => {
  event.preventDefault();
  take(event.dataTransfer.files);
});

for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const at = tabs.indexOf(document.activeElement);
  const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1}[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  const tab = tabs.at(to % tabs.length);
  tab.focus();
  choose(tab);
});

const inChat = (element) => element.id === "message" || element.matches(".call input");

document.addEventListener("keydown", (event) => {
  const plain = inChat(event.target) && sends(event);
  if (plain || (event.key === "Enter" && (event.ctrlKey || event.metaKey))) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape") {
    if (stream) stream.stop();
    else clearSteps();
  }
});

// The newest text stays in view as long as the reader has not gone elsewhere.
let atEnd = true;
const end = () => document.documentElement.scrollHeight - innerHeight;
addEventListener("scroll", () => (atEnd = scrollY >= end() - 80), {passive: true});
new ResizeObserver(() => {
  if (stream && atEnd && active() === chat) scrollTo(0, end());
}).observe($("messages"));

// Wide windows have room for all; narrow ones begin with the conversation.
$("settings").open = matchMedia("(min-width: 62rem)").matches;
$("chats").open = matchMedia("(min-width: 75rem)").matches;
showHistory();
showState();
greet();
