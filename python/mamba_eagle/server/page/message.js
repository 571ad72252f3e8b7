// What stands for one message: its text, and what can be done with it.

import {copyButton} from "./clipboard.js";
import {make} from "./tree.js";

const SPEAKERS = {user: "You", assistant: "The model", tool: "Result of a call"};

export function bubble(role, text = "") {
  const element = make("article", `message ${role}`);
  element.setAttribute("aria-label", SPEAKERS[role]);
  if (text) element.append(make("div", "text", text));
  return element;
}

export function tool(text, label, act) {
  const button = make("button", "tool", text);
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

export function toolbar(element, ...buttons) {
  const bar = make("div", "tools");
  bar.append(...buttons);
  element.append(bar);
}

// change(text): called with the new text.
export function userMessage(text, change) {
  const element = bubble("user", text || "(empty)");
  const edit = tool("Edit", "Edit this message and send it again", () => editor(element, text, change));
  edit.dataset.act = "edit";
  toolbar(element, copyButton(() => text, "Copy this message"), edit);
  return element;
}

function editor(element, text, change) {
  const before = [...element.childNodes];
  const box = make("textarea");
  box.value = text;
  box.rows = Math.min(12, text.split("\n").length + 1);
  box.setAttribute("aria-label", "Message");
  const cancel = () => element.replaceChildren(...before);
  const send = make("button", "primary", "Send again");
  send.dataset.act = "again";
  send.addEventListener("click", () => box.value.trim() && change(box.value.trim()));
  const leave = make("button", "", "Cancel");
  leave.addEventListener("click", cancel);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (sends(event)) {
      event.preventDefault();
      event.stopPropagation();
      send.click();
    }
  });
  const actions = make("div", "actions");
  actions.append(send, leave);
  element.replaceChildren(box, actions);
  box.focus();
}

// Enter sends, Shift+Enter breaks the line; where there are no keys but on the screen, Enter
// breaks it, too. While a word is being composed (Chinese, Japanese), Enter ends the word.
export function sends(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return false;
  return event.ctrlKey || event.metaKey || !matchMedia("(pointer: coarse)").matches;
}

export function fold(className, title, content) {
  const details = make("details", className);
  details.append(make("summary", "", title), content);
  return details;
}

// A call, with a box for what the function returns.
export function callBox({id, function: called}) {
  const box = make("div", "call");
  const head = make("p", "call-name", "calls ");
  head.append(make("code", "", called.name));
  const result = make("input");
  result.placeholder = "what the function returns";
  Object.assign(result.dataset, {call: id, name: called.name});
  const label = make("label", "", "result ");
  label.append(result);
  const given = make("pre", "arguments", pretty(called.arguments));
  box.append(head, given, label);
  return {box, result, given};
}

export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
