"""The reply of GET /cache as a drawing: what the prefix cache holds, and what it was good for."""

from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

LEGEND = (
    "tokens of a prompt or output   ● a state after them, and why it was saved   ○ spare, not hit"
)


def age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def label(node: dict[str, Any]) -> Text:
    text = Text(f"{node['start']} … {node['start'] + node['tokens']}", "bold")
    if node["kind"]:
        spare = node["evicted_first"]
        text.append(f"  {'○' if spare else '●'} {node['kind']}", "dim" if spare else "green")
    text.append(f"  {age(node['age'])} ago", "dim")
    if node["locks"]:
        text.append(f"  read by {node['locks']}", "cyan")
    return text


def tree(nodes: list[dict[str, Any]]) -> Tree:
    """Parents come before their children; a parent of -1 is the root."""
    root = Tree(Text("0"), guide_style="dim")
    drawn: list[Tree] = []
    shown = [0] * len(nodes)
    for node in nodes:
        parent = node["parent"]
        drawn.append((drawn[parent] if parent >= 0 else root).add(label(node)))
        if parent >= 0:
            shown[parent] += 1
    for node, branch, count in zip(nodes, drawn, shown):
        if node["children"] > count:
            branch.add(Text(f"… {node['children'] - count} more", "dim"))
    return root


def summary(reply: dict[str, Any]) -> list[str]:
    kv, states, journals = reply["kv_slots"], reply["states"], reply["journals"]
    held = kv["total"] - kv["free"] - kv["cached"]
    share = reply["cached_tokens"] / max(reply["prompt_tokens"], 1)
    hits = [
        f"  {kind:<7} {count:>6}  {reply['saved_tokens'][kind]:>9} tokens"
        for kind, count in reply["hits"].items()
    ]
    return [
        f"KV slots: {kv['total']} = {kv['cached']} cached ({kv['locked']} of them being read) + "
        f"{held} held by requests + {kv['free']} free; {kv['pinned']} pinned",
        f"states: {states['total']} = {states['cached']} cached + "
        f"{states['used']} held by requests + {states['free']} free; {states['pinned']} pinned",
        f"journals: {journals['total']} = {journals['cached']} cached + "
        f"{journals['total'] - journals['cached'] - journals['free']} held by requests + "
        f"{journals['free']} free",
        f"prompts: {reply['cached_tokens']} of {reply['prompt_tokens']} tokens were cached "
        f"({share:.0%})",
        f"evicted: {reply['evicted_states']} states, {reply['evicted_tokens']} tokens",
        "hits by the kind of state:",
        *hits,
    ]


def show(reply: dict[str, Any], console: Console) -> None:
    """The summary, then the most recently used part of the tree."""
    console.print(Text("\n".join(summary(reply))), soft_wrap=True)
    if reply["nodes"]:
        console.print(Text(f"\n{LEGEND}", "dim"))
        console.print(tree(reply["nodes"]))
