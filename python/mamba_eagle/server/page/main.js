// Tabs, buttons and keys; one request at a time.

import {get, saveKey} from "./api.js";
import * as chat from "./chat.js";
import * as completion from "./completion.js";
import {watchServer} from "./live.js";
import {showChatOnly} from "./settings.js";
import {clearSteps} from "./steps.js";

const $ = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];
const buttons = (act) => document.querySelectorAll(`[data-act=${act}]`);
let stream = null; // the request that runs

// Tokens per second of what comes after the first event, which has waited for the prompt.
class Clock {
  #first = null;
  tokens = 0;
  speed = 0;

  take(tokens) {
    const now = performance.now();
    this.#first ??= {now, tokens};
    if (tokens === this.tokens) return;
    this.tokens = tokens;
    if (now > this.#first.now) this.speed = (1000 * (tokens - this.#first.tokens)) / (now - this.#first.now);
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
  for (const act of ["undo", "clear"])
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
for (const button of buttons("undo")) {
  button.addEventListener("click", () => {
    chat.undo();
    clearSteps();
    showState();
    $("message").focus();
  });
}
for (const button of buttons("clear")) {
  button.addEventListener("click", () => {
    chat.clear();
    clearSteps();
    showState();
    $("message").focus();
  });
}

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

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape") {
    if (stream) stream.stop();
    else clearSteps();
  }
});

// Wide windows have room for both; narrow ones begin with the conversation.
$("settings").open = matchMedia("(min-width: 62rem)").matches;
showState();
greet();
