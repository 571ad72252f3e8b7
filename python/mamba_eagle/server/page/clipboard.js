// Copying, on plain http too, where navigator.clipboard does not exist.

import {make} from "./tree.js";

const SHOWN = 1500; // milliseconds that "Copied" stays

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = make("textarea", "unseen");
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

// getText: called when it is pressed.
export function copyButton(getText, label) {
  const button = make("button", "tool", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    const done = await copy(getText()).then(() => "Copied", () => "Not allowed");
    button.textContent = done;
    setTimeout(() => (button.textContent = "Copy"), SHOWN);
  });
  return button;
}
