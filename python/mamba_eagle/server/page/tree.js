// The tree of one step, as `mamba-eagle explain` draws it: what was drafted, how sure the drafter
// was, what was accepted. A step is an entry of the reply's spec_trace.

const COLUMN = 116, ROW = 40; // pixels from chip to chip
const CHIP = {width: 108, height: 26, edge: 3};
const SVG = "http://www.w3.org/2000/svg";
const SAID = {
  root: "the last token before this step",
  accepted: "drafted and accepted",
  bonus: "the model’s own next token",
  rejected: "drafted, not accepted",
  refused: "drafted, refused by the grammar",
};
const MARKS = {root: "", accepted: "✓ ", bonus: "★ ", rejected: "", refused: "✗ "};

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text; // what a model writes is never anything but text
  return element;
}

const nodeText = (step, node) => (step.token_texts ? step.token_texts[node] : `#${step.tokens[node]}`);
const bonusText = (step) => step.bonus_text ?? `#${step.bonus}`;

// White space must be seen, and a long token must not be.
export function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
  return shown || "∅";
}

export function percent(chance) {
  if (chance < 0.005) return "<1%";
  return chance >= 0.995 && chance < 1 ? ">99%" : `${Math.round(chance * 100)}%`;
}

// How sure the drafter was of a node after its parent. Scores are sums of logarithms along a path;
// JSON has null for minus infinity.
function chance(step, node) {
  const own = step.scores[node], above = step.scores[step.parents[node]];
  return own === null || above === null ? 0 : Math.exp(Math.min(own - above, 0));
}

// The nodes, each {index, parent, text, chance, kind}; -1 is a bonus that was not drafted.
export function nodes(step) {
  const end = step.accepted.at(-1);
  let bonus = -1;
  const found = step.tokens.map((token, index) => {
    const parent = index ? step.parents[index] : null;
    let kind = "rejected";
    if (!index) kind = "root";
    else if (step.accepted.includes(index)) kind = "accepted";
    else if (parent === end && token === step.bonus) kind = "bonus";
    else if (step.refused?.includes(index)) kind = "refused";
    if (kind === "bonus") bonus = index;
    return {index, parent, text: nodeText(step, index), chance: index ? chance(step, index) : null, kind};
  });
  if (bonus < 0) found.push({index: -1, parent: end, text: bonusText(step), chance: null, kind: "bonus"});
  return found;
}

// The tokens that a step added to the text, each {text, step, node, kind}.
export function tokensOf(step) {
  const made = step.accepted.slice(1).map((node) => ({text: nodeText(step, node), step, node, kind: "accepted"}));
  const bonus = nodes(step).find((node) => node.kind === "bonus");
  return [...made, {text: bonusText(step), step, node: bonus.index, kind: "bonus"}];
}

export const rootOf = (step) => ({text: nodeText(step, 0), step: null, node: 0, kind: "first"});

// The children of each node, in the order of its branches: what was accepted, then the likelier.
function branches(found) {
  const order = {accepted: 2, bonus: 1};
  const sorted = [...found].sort((a, b) => (order[b.kind] ?? 0) - (order[a.kind] ?? 0) || b.chance - a.chance);
  return (node) => sorted.filter((child) => child.parent === node.index);
}

// Downwards goes the text. The accepted path is the first column; every other branch stands in the
// first column to the right of its parent that is free for it. Gives the number of columns.
function place(found) {
  const children = branches(found);
  const filled = []; // rows, by column
  const put = (start, row, from) => {
    const chain = [start];
    for (let next; (next = children(chain.at(-1))[0]); ) chain.push(next);
    const rows = chain.map((_, i) => row + i);
    const near = [row - 1, ...rows, row + chain.length]; // branches on end would look like one
    let column = from;
    while (near.some((each) => filled[column]?.has(each))) column += 1;
    filled[column] ??= new Set();
    chain.forEach((node, i) => {
      Object.assign(node, {row: rows[i], column});
      filled[column].add(rows[i]);
    });
    for (const node of chain.reverse()) // from below, so that no line crosses a branch
      for (const child of children(node).slice(1)) put(child, node.row + 1, column + 1);
  };
  put(found[0], 0, 0);
  return filled.length;
}

const left = (node) => node.column * COLUMN + CHIP.edge;
const top = (node) => node.row * ROW + CHIP.edge;

function line(parent, child) {
  const path = document.createElementNS(SVG, "path");
  const x = left(parent) + CHIP.width / 2, toX = left(child) + CHIP.width / 2;
  const y = top(parent) + CHIP.height, toY = top(child);
  const bend = (y + toY) / 2;
  path.setAttribute("d", x === toX ? `M${x} ${y}V${toY}` : `M${x} ${y}V${bend}H${toX - 5}Q${toX} ${bend} ${toX} ${toY}`);
  path.setAttribute("class", child.kind);
  return path;
}

function chip(node) {
  const element = make("li", `chip ${node.kind}`);
  element.style.left = `${left(node)}px`;
  element.style.top = `${top(node)}px`;
  element.dataset.kind = node.kind;
  element.dataset.text = node.text;
  const said = node.chance === null ? "" : `, the drafter was ${percent(node.chance)} sure`;
  element.setAttribute("aria-label", `${JSON.stringify(node.text)}: ${SAID[node.kind]}${said}`);
  element.title = `${JSON.stringify(node.text)}: ${SAID[node.kind]}${said}`;
  element.append(make("span", "mark", MARKS[node.kind]), make("span", "text", visible(node.text)));
  if (node.chance !== null) element.append(make("span", "chance", percent(node.chance)));
  return element;
}

export function drawTree(step, selected) {
  const found = nodes(step);
  const width = place(found) * COLUMN - (COLUMN - CHIP.width) + 2 * CHIP.edge;
  const height = Math.max(...found.map(top)) + CHIP.height + CHIP.edge;
  const box = make("div", "tree");
  box.tabIndex = 0; // a wide tree is scrolled with the arrow keys
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Tree of this step");
  const lines = document.createElementNS(SVG, "svg");
  lines.setAttribute("width", width);
  lines.setAttribute("height", height);
  lines.setAttribute("aria-hidden", "true");
  const list = make("ul");
  list.style.width = `${width}px`;
  list.style.height = `${height}px`;
  const byIndex = new Map(found.map((node) => [node.index, node]));
  const taken = (node) => node.kind === "accepted" || node.kind === "bonus";
  for (const node of [...found].sort((a, b) => taken(a) - taken(b))) // those on top
    if (node.parent !== null) lines.append(line(byIndex.get(node.parent), node));
  for (const node of found) {
    const element = chip(node);
    if (node.index === selected) element.classList.add("selected");
    list.append(element);
  }
  box.append(lines, list);
  return box;
}

// What else stood where this token stands, in a sentence.
export function alternatives(step, selected) {
  const found = nodes(step);
  const own = found.find((node) => node.index === selected);
  if (!own || own.kind === "root") return "";
  const quoted = (node) => `“${visible(node.text)}” ${percent(node.chance)}`;
  const others = found.filter((node) => node.parent === own.parent && node !== own && node.chance !== null);
  others.sort((a, b) => b.chance - a.chance);
  const parts = [];
  if (own.chance !== null) parts.push(`The drafter was ${percent(own.chance)} sure of “${visible(own.text)}”.`);
  else if (others.length) parts.push(`The drafter did not think of “${visible(own.text)}”.`);
  else parts.push(`Nothing was drafted here: “${visible(own.text)}” is what the model adds to every step.`);
  if (others.length) parts.push(`It drafted ${own.chance === null ? "" : "also "}${others.map(quoted).join(", ")}.`);
  return parts.join(" ");
}
