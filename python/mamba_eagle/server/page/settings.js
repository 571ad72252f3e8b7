// The settings as fields of a request's body. What is not a number goes as it is: the server says
// what is wrong with it.

import {drop, load, save} from "./kept.js";

const panel = document.getElementById("settings");
const field = (name) => panel.querySelector(`[name=${name}]`);
const FORMS = {
  json_schema: ["the schema", '{\n  "type": "object",\n  "properties": {"answer": {"type": "integer"}},\n  "required": ["answer"],\n  "additionalProperties": false\n}'],
  regex: ["the pattern", "The answer is [0-9]{1,4}\\."],
  choice: ["the lines", "yes\nno"],
  ebnf: ["the grammar", 'root ::= "yes" | "no"'],
};

export class SettingError extends Error {}

const number = (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

export function sampling() {
  const values = {};
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"]) {
    const text = field(name).value.trim();
    if (text) values[name] = number(text);
  }
  const stop = field("stop").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) values.stop = stop;
  if (field("ignore_eos").checked) values.ignore_eos = true;
  const form = field("form").value, constraint = field("constraint").value;
  if (form) values[form] = form === "choice" ? constraint.split("\n").filter(Boolean) : constraint;
  return values;
}

export const wantsTrees = () => field("trees").checked;
export const wantsAlternatives = () => wantsTrees() && field("alternatives").checked;
// As it is meant, if it is prose: output of a form is shown as it is.
export const wantsFormat = () => field("formatted").checked && !field("form").value;
export const systemMessage = () => field("system").value.trim();

export function chatOnly() {
  const values = {};
  if (field("thinking").value) values.enable_thinking = field("thinking").value === "true";
  const budget = field("thinking_budget").value.trim();
  if (budget) values.thinking_budget = number(budget);
  const text = field("tools").value.trim();
  if (!text) return values;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new SettingError(`tools is not JSON: ${error.message}`);
  }
  const list = Array.isArray(tools) ? tools : [tools];
  values.tools = list.map((tool) => (tool?.name !== undefined && !tool.function ? {type: "function", function: tool} : tool));
  values.tool_choice = field("tool_choice").value;
  return values;
}

export function showChatOnly(yes) {
  panel.querySelector(".chat-only").hidden = !yes;
}

function showForm() {
  const [label, example] = FORMS[field("form").value] ?? [];
  const box = field("constraint");
  box.closest("label").hidden = !label;
  if (!label) return;
  document.getElementById("form-label").textContent = label;
  const examples = Object.values(FORMS).map((form) => form[1]);
  if (!box.value.trim() || examples.includes(box.value)) box.value = example;
}

const showSpecials = () => document.body.classList.toggle("specials", field("specials").checked);

// ── kept in this browser ──

const fields = [...panel.querySelectorAll("[name]")];
const value = (each) => (each.type === "checkbox" ? each.checked : each.value);
const defaults = Object.fromEntries(fields.map((each) => [each.name, value(each)]));

function put(values) {
  for (const each of fields) {
    if (!(each.name in values)) continue;
    if (each.type === "checkbox") each.checked = values[each.name];
    else each.value = values[each.name];
  }
  showForm();
  showSpecials();
}

panel.addEventListener("change", () => {
  showForm();
  showSpecials();
  const changed = fields.filter((each) => value(each) !== defaults[each.name]);
  if (changed.length) save("settings", Object.fromEntries(changed.map((each) => [each.name, value(each)])));
  else drop("settings");
});
panel.querySelector("[data-act=reset]").addEventListener("click", () => {
  put(defaults);
  drop("settings");
});
put(load("settings", {}));
