// Text files that go with the next message, each as a block of code under its name.

import {make} from "./tree.js";

const MOST = 1 << 20; // bytes; more than most models can read
const list = document.getElementById("attached");
let files = []; // {name, text}

export class AttachError extends Error {}

function show() {
  list.replaceChildren(
    ...files.map((file) => {
      const button = make("button", "quiet", "×");
      button.type = "button";
      button.setAttribute("aria-label", `Remove ${file.name}`);
      button.addEventListener("click", () => {
        files = files.filter((each) => each !== file);
        show();
      });
      const item = make("li", "", `${file.name} · ${file.text.length.toLocaleString("en")} characters`);
      item.append(button);
      return item;
    }),
  );
  list.hidden = !files.length;
}

async function read(file) {
  if (file.size > MOST) throw new AttachError(`${file.name} has ${file.size.toLocaleString("en")} bytes: at most ${MOST.toLocaleString("en")} can be attached.`);
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return {name: file.name, text};
  } catch {
    // no text in UTF-8
  }
  throw new AttachError(`${file.name} is not a text in UTF-8: only such files can be attached.`);
}

export async function attach(chosen) {
  const added = await Promise.all([...chosen].map(read));
  files.push(...added);
  show();
}

// The fence is longer than any in the text, so that no line of a file ends its block.
function block({name, text}) {
  const runs = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(Math.max(2, ...runs.map((run) => run.length)) + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export const hasFiles = () => files.length > 0;
export const withFiles = (text) => [...files.map(block), text].filter(Boolean).join("\n\n");

export function detach() {
  files = [];
  show();
}
