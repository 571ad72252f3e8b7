// The panel beside the text: the step of the token that is pointed at.

import {server} from "./live.js";
import {alternatives, drawTree, make, percent, visible} from "./tree.js";

const $ = (id) => document.getElementById(id);
const walk = document.querySelector("#steps .walk");
const legend = document.querySelector("#steps .legend");
const empty = $("step").firstElementChild;
let shown = null; // {output, step, node}

function sentence(step, number, count) {
  const drafted = step.tokens.length - 1, accepted = step.accepted.length - 1;
  const made = accepted + 1;
  const what = drafted ? `${drafted} drafted, ${accepted} accepted` : "nothing drafted";
  return `Step ${number} of ${count}: ${what}, so ${made} token${made > 1 ? "s" : ""} in one pass.`;
}

// Why a step has no tree.
function plainly() {
  if (server?.speculative_algorithm === "NONE") return "This server drafts nothing (--speculative-algorithm NONE).";
  if (!server?.speculation?.adaptive) return "";
  return "The server measures which tree is the fastest; here it was none. With --no-speculative-adaptive it drafts one in each step.";
}

let latest = null; // the last step with drafts that was shown

// Beside a step without drafts: the one before it that has them, of this text or of the last one.
function lastDrafted(output, number) {
  const own = output.steps.slice(0, number).findLast((step) => step.tokens.length > 1);
  const step = own ?? latest;
  if (!step) return [];
  const where = own ? `step ${output.steps.indexOf(own) + 1}` : "a step of an earlier text";
  return [make("p", "also earlier", `The last tree that was drafted, in ${where}:`), drawTree(step, null)];
}

// What the model itself found likeliest at a token.
function best(output, token) {
  const rows = output.bestAt(token);
  if (!rows.length) return "";
  const list = make("ul", "best");
  list.append(make("li", "caption", "What the model found likeliest here"));
  for (const {text, logprob} of rows) {
    const chance = Math.exp(logprob ?? -Infinity);
    const row = make("li", text === token.text ? "taken" : "");
    const bar = make("span", "bar");
    bar.style.width = `${Math.round(100 * chance)}%`;
    row.append(make("span", "text", visible(text)), make("span", "track"), make("span", "chance", percent(chance)));
    row.children[1].append(bar);
    list.append(row);
  }
  return list;
}

// held: the token was chosen, and is not only the newest.
export function showToken(output, token, held) {
  $("steps").classList.toggle("held", held);
  if (!token.step) {
    shown = {output, step: null};
    $("step").replaceChildren(make("p", "", "This token was made with the prompt, before the first step."), best(output, token));
    walk.hidden = !output.steps.length;
    legend.hidden = true;
    return;
  }
  const {step, node} = token;
  const number = output.steps.indexOf(step) + 1;
  shown = {output, step};
  const said = make("p", "said", sentence(step, number, output.steps.length));
  const drafted = step.tokens.length > 1;
  const tree = drawTree(step, node);
  $("step").replaceChildren(said, tree);
  const chosen = tree.querySelector(".selected"); // in view, without moving the page
  tree.scrollTop = chosen.offsetTop - tree.clientHeight / 2;
  tree.scrollLeft = chosen.offsetLeft - tree.clientWidth / 2;
  const also = drafted ? alternatives(step, node) : plainly();
  if (also) $("step").append(make("p", "also", also));
  if (drafted) latest = step;
  else $("step").append(...lastDrafted(output, number));
  $("step").append(best(output, token));
  $("step").dataset.step = number;
  walk.hidden = legend.hidden = false;
  legend.querySelector(".refused").hidden = !step.refused?.length;
}

export function clearSteps() {
  shown = null;
  $("steps").classList.remove("held");
  $("step").replaceChildren(empty);
  delete $("step").dataset.step;
  walk.hidden = legend.hidden = true;
}

$("close-steps").addEventListener("click", () => {
  shown?.output.unpin();
  clearSteps();
});

walk.addEventListener("click", (event) => {
  const by = Number(event.target.dataset.walk);
  if (!by || !shown) return;
  const {output, step} = shown;
  const at = Math.max(0, Math.min(output.steps.length - 1, (step ? output.steps.indexOf(step) : -1) + by));
  output.pin(output.firstOf(output.steps[at]));
});
