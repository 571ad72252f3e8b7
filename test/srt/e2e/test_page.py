"""The page, as a visitor uses it. Pictures of what each test saw are in its tmp_path."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from chat_rig import TEMPLATE, family_file, tool
from page_rig import Browser, browser
from rich.tree import Tree
from running_server import RunningServer, StartServer

from mamba_eagle.explain import step_tree

pytestmark = pytest.mark.e2e

KEY = "let-me-in"
PROMPT = "Question: Tom has 12 apples and buys 7 more. How many apples does Tom have?\nAnswer:"
IMAGE = "<img src=x onerror=document.title=1>"
Shots = Callable[[str], None]


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, page: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """With tools, reasoning, a tree in each step, and a key. ``page`` first: without a browser
    none is needed."""
    family = family_file("nemotron_3", tmp_path_factory.mktemp("family"))
    chat = ("--chat-template", TEMPLATE, "--tool-call-parser", family)
    running = start_server(*chat, "--api-key", KEY, "--no-speculative-adaptive")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.base_url, timeout=120, headers=key) as client:
        yield client


@pytest.fixture
def shots(page: Browser, tmp_path: Path) -> Iterator[Shots]:
    """``shots(name)`` keeps a picture; what was there at the end is kept in any case."""

    def keep(name: str) -> None:
        page.driver.save_screenshot(str(tmp_path / f"{name}.png"))

    yield keep
    keep("end")


def trees(page: Browser, root: str) -> list[list[list[str]]]:
    """Of each step that the tokens below ``root`` came from: [kind, text] of its nodes."""
    return page.js(
        "const found = new Map();"
        "for (const fold of document.querySelectorAll(`${arguments[0]} details`)) fold.open = true;"
        "for (const token of document.querySelectorAll(`${arguments[0]} .token`)) {"
        " token.focus();"
        " const step = document.getElementById('step').dataset.step;"
        " if (token.dataset.step === '0' || found.has(step)) continue;"
        " found.set(step, [...document.querySelectorAll('#step .tree .chip')]"
        "  .map((chip) => [chip.dataset.kind, chip.dataset.text])); }"
        "return [...found.values()]",
        root,
    )


def test_it_asks_for_the_key_and_for_nothing_from_elsewhere(
    page: Browser, server: RunningServer, shots: Shots
) -> None:
    page.open(server.base_url)
    shots("asks")
    assert page.js("return document.activeElement.id") == "key-value"
    page.keys("wrong\n")
    page.wait("document.getElementById('key-note').textContent.includes('did not take')")
    page.js("document.getElementById('key-value').value = ''")
    page.keys(f"{KEY}\n")
    page.wait("document.getElementById('key').hidden")
    assert page.wait("document.getElementById('model').textContent").startswith("mamba2-math-6m")
    assert page.js("return [localStorage.length, document.cookie]") == [0, ""]
    errors, asked = page.logs()
    assert errors and all("401" in error for error in errors)  # those that the key was asked for
    assert {"page.css", "main.js", "tree.js"} <= {url.rpartition("/")[2] for url in asked}
    assert all(url.startswith((server.base_url, "data:image/")) for url in asked), asked


def test_a_completion_streams_and_each_token_has_its_tree(
    page: Browser, server: RunningServer, client: httpx.Client, shots: Shots
) -> None:
    page.open(server.base_url, KEY)
    page.set(max_tokens="60", temperature="0", prompt=PROMPT)
    page.js(
        "window.lengths = new Set(); new MutationObserver(() =>"
        " lengths.add(document.querySelector('#answer .text')?.textContent.length))"
        ".observe(document.getElementById('answer'), {childList: true, subtree: true})"
    )
    page.send("completion")
    assert page.js("return lengths.size") > 3  # it came in pieces
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 60}}
    reply = client.post("/generate", json={**body, "return_spec_trace": True}).json()
    assert page.text("#answer .text") == reply["text"]
    assert f"{reply['meta_info']['completion_tokens']} tokens" in page.text("#answer .facts")

    steps = reply["meta_info"]["spec_trace"]
    seen = trees(page, "#answer")
    text = steps[0]["token_texts"][0]
    for nodes, step in zip(seen, steps, strict=True):
        assert sorted(drawn(nodes)) == sorted(explained(step_tree(step)))
        text += "".join(name for kind, name in nodes if kind in ("accepted", "bonus"))
    assert text == reply["text"] + "</s>"
    assert max(len(nodes) for nodes in seen) > 3 and any(n[0][0] == "root" for n in seen)
    shots("tree")

    page.set(trees=False)
    page.send("completion")
    assert page.text("#answer .text") == reply["text"] and page.texts("#answer .token") == []
    assert page.logs()[0] == []


MARKS = {"accepted": "✓ ", "bonus": "★ ", "refused": "✗ ", "rejected": ""}


def drawn(nodes: list[list[str]]) -> list[str]:
    return [f"{MARKS[kind]}{text!r}" for kind, text in nodes if kind != "root"]


def explained(tree: Tree) -> list[str]:
    """What `mamba-eagle explain` prints of all nodes but the root, without probabilities."""
    found = []
    for child in tree.children:
        label = child.label.plain  # type: ignore[union-attr]
        found.append(label if label.endswith(("'", '"')) else label.rpartition(" ")[0])
        found += explained(child)
    return found


@pytest.mark.parametrize("tab", ["chat", "completion"])
def test_the_models_own_alternatives_stand_beside_the_tree(
    page: Browser, server: RunningServer, shots: Shots, tab: str
) -> None:
    page.open(server.base_url, KEY)
    page.set(alternatives=True, max_tokens="30", temperature="0", thinking="false")
    page.send(tab)
    found = page.js(
        "return [...document.querySelectorAll('.token')].map((token) => { token.focus();"
        " return [...document.querySelectorAll('#step .best li:not(.caption)')].map((row) =>"
        "  [row.className, row.lastChild.textContent]); })"
    )
    assert len(found) > 5
    for rows in found:  # what is written without luck is what the model finds likeliest
        assert len(rows) == 5 and [kind for kind, _ in rows] == ["taken", "", "", "", ""]
        chances = [float(text.strip("<>%")) for _, text in rows]
        assert sum(chances) <= 105  # each is rounded
    shots("alternatives")


def test_the_arrow_keys_go_from_token_to_token(page: Browser, server: RunningServer) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(server.base_url, KEY)
    page.set(max_tokens="40", temperature="0")
    page.send("completion")
    page.tab_to("at.id === 'prompt'")
    page.tab_to("at.classList.contains('token')")
    here = "const at = document.activeElement; return "
    assert page.js(here + "at.previousSibling") is None
    assert "with the prompt" in page.text("#step")
    page.keys(Keys.ARROW_RIGHT)
    assert page.js(here + "at.dataset.step") == "1"
    assert page.text("#step").startswith("Step 1 of ")
    page.keys(Keys.ARROW_DOWN)
    assert page.js(here + "at.dataset.step") == "2"
    chosen = page.js("return document.querySelector('#step .chip.selected').dataset.text")
    assert chosen == page.js(here + "at.textContent")
    assert f"“{chosen.strip()}”" in page.text("#step .also").replace("␣", "")
    same = page.js("return [...document.querySelectorAll('.same')].map((e) => e.dataset.step)")
    assert same and set(same) == {"2"}
    page.keys(Keys.ARROW_UP, Keys.END)
    assert page.js(here + "at.nextSibling") is None
    page.keys(Keys.HOME)
    assert page.js(here + "at.previousSibling") is None


@pytest.mark.parametrize("tab", ["chat", "completion"])
def test_stop_ends_the_request_on_the_server(
    page: Browser, server: RunningServer, client: httpx.Client, shots: Shots, tab: str
) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(server.base_url, KEY)
    page.set(max_tokens="7000", ignore_eos=True)
    page.js("document.getElementById('tab-chat').focus()")
    page.keys(Keys.ARROW_RIGHT if tab == "completion" else Keys.HOME)
    page.control_enter()
    page.wait(f"document.querySelectorAll('#panel-{tab} .token').length > 20")
    assert client.get("/get_load").json()[0]["num_running_reqs"] == 1
    page.wait("document.querySelector('[data-live=running]').textContent === '1'")
    shots("running")
    page.keys(Keys.ESCAPE)
    page.wait("!document.querySelector('[data-act=send]').disabled")
    deadline = time.monotonic() + 20
    while client.get("/get_load").json()[0]["num_reqs"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client.get("/get_load").json()[0]["num_reqs"] == 0
    told = page.text(f"#panel-{tab} .facts")
    assert told.endswith("stopped by you") and int(told.split()[0]) < 7000
    assert page.text("#error") == "" and page.logs()[0] == []


def test_wrong_values_show_what_the_server_says(
    page: Browser, server: RunningServer, shots: Shots
) -> None:
    page.open(server.base_url, KEY)

    def refusal(**values: Any) -> str:
        for tab in ("completion", "chat"):
            page.set(**values)
            page.send(tab)
            assert page.js("return document.getElementById('error').hidden") is False
        return page.text("#error")

    assert "temperature = -1" in refusal(temperature="-1")
    assert 'temperature = "warm"' in refusal(temperature="warm")
    shots("refused")
    page.set(temperature="0")
    assert "json_schema" in refusal(form="json_schema", constraint="{no")
    page.set(form="")
    page.set(message="again", tools="[1")
    page.send("chat")
    assert "tools is not JSON" in page.text("#error")
    # what was refused is in the box again, and in no conversation
    assert page.texts(".message") == [] and page.js("return message.value") == "again"
    page.set(tools="")
    page.send("chat")
    assert page.text("#error") == "" and page.texts(".message.user .text") == ["again"]


def test_what_the_model_writes_is_text(page: Browser, server: RunningServer, shots: Shots) -> None:
    page.open(server.base_url, KEY)
    page.set(form="choice", constraint=IMAGE, message=IMAGE, thinking_budget="0")
    page.send("completion")
    assert page.text("#answer .text") == IMAGE
    page.send("chat")
    assert page.texts(".message .text") == [IMAGE, IMAGE]
    page.set(form="", tools=json.dumps([named(IMAGE)]), tool_choice="required", message="x")
    page.set(max_tokens="300")
    page.send("chat")
    assert IMAGE in page.text(".call .arguments")
    trees(page, "#messages")  # draws all, alternatives too
    assert page.js("return [document.images.length, document.title]") == [0, "mamba-eagle"]
    shots("text")


def named(value: str) -> dict[str, Any]:
    """A tool that must be given this text."""
    schema = {**tool("ping")["function"]["parameters"], "properties": {"text": {"const": value}}}
    return {"name": "say", "parameters": {**schema, "required": ["text"]}}


def test_nodes_that_a_grammar_refuses_are_marked(page: Browser, server: RunningServer) -> None:
    page.open(server.base_url, KEY)
    page.set(form="regex", constraint="( [A-Za-z]{1,9}){9}", temperature="0", prompt=PROMPT)
    page.send("completion")
    nodes = [node for step in trees(page, "#answer") for node in step]
    refused = [text for kind, text in nodes if kind == "refused"]
    assert any(text.isdigit() for text in refused)  # what the model would rather write
    page.js(
        "for (const token of document.querySelectorAll('.token'))"
        " if (!document.querySelector('#step .refused')) token.focus()"
    )
    assert page.js("return document.querySelector('.legend .refused').checkVisibility()")
    kept = "".join(text for kind, text in nodes if kind in ("accepted", "bonus"))
    assert kept.removesuffix("</s>").replace(" ", "").isalpha()


def test_a_chat_with_reasoning_and_calls_goes_by_keyboard(
    page: Browser, server: RunningServer, client: httpx.Client, shots: Shots
) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(server.base_url, KEY)
    given = tool("calculate")
    page.set(tools=json.dumps([given]), tool_choice="required", thinking="true")
    page.set(max_tokens="300", temperature="0.5", seed="2", thinking_budget="12", message="")
    page.tab_to("at.id === 'tab-chat'")
    page.keys(Keys.ARROW_RIGHT)
    assert page.js("return document.getElementById('panel-chat').hidden")
    page.keys(Keys.ARROW_LEFT)
    page.tab_to("at.id === 'message'")
    page.keys("How many are 3 and 4?")
    page.control_enter()
    page.wait("!document.querySelector('[data-act=send]').disabled")
    body = {
        "messages": [{"role": "user", "content": "How many are 3 and 4?"}],
        "tools": [given],
        "tool_choice": "required",
        "enable_thinking": True,
        "thinking_budget": 12,
        "max_tokens": 300,
        "temperature": 0.5,
        "seed": 2,
    }
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert page.text(".reasoning .text") == message["reasoning_content"]
    assert page.js("return document.querySelector('.reasoning').open") is False
    (call, *_) = message["tool_calls"]
    shown = json.loads(page.text(".call .arguments"))
    assert shown == json.loads(call["function"]["arguments"])
    jsonschema.validate(shown, given["function"]["parameters"])
    assert page.text(".call code") == "calculate"
    page.js("document.activeElement.blur()")
    page.tab_to("at.parentElement.matches('.reasoning')")
    page.keys(Keys.ENTER)
    assert page.js("return document.querySelector('.reasoning').open") is True
    # what the model wrote is there token by token: reasoning, then the call with its tags
    assert "<function=calculate>" in page.text(".written .text")
    assert len(trees(page, "#messages")) > 3
    shots("call")
    page.set(tool_choice="none", max_tokens="30")
    page.tab_to("at.matches('.call input')")
    page.keys("7")
    page.control_enter()
    page.wait("document.querySelectorAll('.message').length === 4")
    page.wait("!document.querySelector('[data-act=send]').disabled")
    assert page.texts(".message.tool .text") == ["7"]
    assert page.text("#error") == "" and page.logs()[0] == []
    page.js("document.querySelector('[data-act=undo]').click()")
    assert page.js("return message.value") == "How many are 3 and 4?"
    assert page.texts(".message") == []


def test_a_schema_forms_the_answer_of_a_chat(page: Browser, server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer", "maximum": 99}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    page.open(server.base_url, KEY)
    page.set(form="json_schema", constraint=json.dumps(schema), thinking_budget="0")
    page.send("chat")
    jsonschema.validate(json.loads(page.text(".message.assistant .text")), schema)


def test_a_narrow_window_needs_no_sideways_scroll(
    page: Browser, server: RunningServer, shots: Shots
) -> None:
    page.open(server.base_url, width=360)
    assert page.is_narrow()
    page.open(server.base_url, KEY, width=360)
    long = "a" * 100
    page.js("document.getElementById('settings').open = true")
    page.set(tools=json.dumps([named(long)]), tool_choice="required", max_tokens="250")
    page.set(message=long, thinking_budget="0")
    page.send("chat")
    page.js("for (const each of document.querySelectorAll('details')) each.open = true")
    page.js("[...document.querySelectorAll('.token')].at(-1).focus()")
    assert page.text(".call") and page.text("#step .tree") and page.is_narrow()
    shots("chat")
    page.set(tools="", temperature="hot " + long)
    page.send("completion")
    assert page.text("#error") and page.is_narrow()
    page.set(temperature="1.5", seed="1")
    page.send("completion")
    page.js("document.querySelector('#answer .token:nth-child(6)').focus()")
    assert page.is_narrow()
    # the tree stands beside the token, not over it
    token, panel = page.js(
        "return [document.activeElement, document.getElementById('steps')]"
        ".map((each) => [each.getBoundingClientRect().top, each.getBoundingClientRect().bottom])"
    )
    assert token[0] >= 0 and token[1] <= panel[0] and panel[1] <= 900


CONTRAST = """
const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
const light = (color) => {
  const [r, g, b] = numbers(color).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  const color = getComputedStyle(element).backgroundColor;
  return numbers(color)[3] === 0 ? ground(element.parentElement) : color;
};
return [...document.querySelectorAll(arguments[0])].filter((each) => each.checkVisibility())
  .map((each) => {
    const [a, b] = [light(getComputedStyle(each).color), light(ground(each))];
    return [each.className || each.tagName, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
"""


def test_light_and_dark_differ_and_both_can_be_read(
    page: Browser, server: RunningServer, shots: Shots
) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        page.open(server.base_url, KEY, scheme=scheme)
        page.set(form="regex", constraint="( [A-Za-z]{1,9}){9}")
        page.send("completion")
        page.js("document.querySelector('#answer .token:nth-child(4)').focus()")
        shots(scheme)
        grounds[scheme] = page.js("return getComputedStyle(document.body).backgroundColor")
        found = page.js(CONTRAST, "h1, p, label, summary, legend, dt, dd, .token, .chip, .primary")
        seen = {name.partition(" selected")[0] for name, _ in found}
        assert {"token bonus", "chip bonus", "chip refused", "primary"} <= seen
        assert [pair for pair in found if pair[1] < 4.5] == [], scheme
    assert grounds["light"] != grounds["dark"]


MARKDOWN = """# Sums

3*4 and 5*6 are **products**, `a_b` is code.

```python
print("<b>" + 'x')  # fenced
```

| n | square |
|---|---:|
| 2 | 4 |
"""
HOSTILE = [
    IMAGE,
    "<script>document.title=1</script>",
    "<svg/onload=document.title=1><style>*{display:none}</style>",
    "[a](javascript:document.title=1) [b](data:text/html,x) [c](JaVaScRiPt&#58;alert(1))",
    "![x](http://elsewhere.invalid/x.png) <iframe src=//elsewhere.invalid></iframe>",
    "`<img src=x>` <a href='x' onclick=alert(1)>y</a> <form><input name=message></form>",
    "<div id=messages class=composer>",
    '```"><img src=x onerror=document.title=1>\n</code></pre><img src=x>\n```',
]
RENDER = """
const box = document.createElement("div");
box.className = "message rich";
box.append(it.render(args[0]));
document.getElementById("messages").append(box);
const all = [...box.querySelectorAll("*")];
return {
  tags: [...new Set(all.map((each) => each.localName))].sort(),
  names: [...new Set(all.flatMap((each) => each.getAttributeNames()))].sort(),
  links: [...box.querySelectorAll("a[href]")].map((each) => each.getAttribute("href")),
  text: box.textContent,
};
"""


def test_markdown_is_shown_as_what_it_means(
    page: Browser, server: RunningServer, shots: Shots
) -> None:
    page.open(server.base_url, KEY)
    seen = page.module("markdown.js", RENDER, MARKDOWN)
    assert {"h1", "strong", "code", "pre", "table", "th", "td"} <= set(seen["tags"])
    assert "em" not in seen["tags"] and "3*4 and 5*6" in seen["text"]
    page.module("markdown.js", "return it.colour(document.getElementById('messages'))")
    assert page.text("pre .hljs-string") == '"<b>"'
    assert page.text("pre > code") == "print(\"<b>\" + 'x')  # fenced\n"
    shots("markdown")


@pytest.mark.parametrize("written", HOSTILE)
def test_html_of_a_model_is_text(page: Browser, server: RunningServer, written: str) -> None:
    page.open(server.base_url, KEY)
    seen = page.module("markdown.js", RENDER, written)
    assert set(seen["tags"]) <= {"a", "button", "code", "div", "p", "pre"}
    made = {"aria-label", "class", "href", "rel", "tabindex", "target", "type"}  # by the page
    assert set(seen["names"]) <= made and seen["links"] == []
    assert page.js("return [document.images.length, document.title]") == [0, "mamba-eagle"]
    errors, asked = page.logs()
    assert errors == [] and all(
        url.startswith(server.base_url) for url in asked if "data:" not in url
    )


def test_a_conversation_is_kept_written_anew_and_exported(
    page: Browser, server: RunningServer, shots: Shots
) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(server.base_url, KEY, settings={"max_tokens": "20", "temperature": "0"})
    page.set(message="")
    page.js("message.focus()")
    page.keys("One apple")
    page.chord(Keys.SHIFT, Keys.ENTER)
    page.keys("and two", Keys.ENTER)
    done = "document.querySelectorAll('.message.assistant .facts:not(:empty)').length === {}"
    page.wait(done.format(1))
    page.wait("!document.querySelector('[data-act=send]').disabled")
    assert page.texts(".message.user .text") == ["One apple\nand two"]
    first = page.text(".message.assistant .text")
    assert first and page.js("return document.querySelector('.rich').checkVisibility()")
    page.press(".assistant [data-act=again]")
    page.wait("!document.querySelector('[data-act=send]').disabled")
    assert page.texts(".message.assistant .text") == [first]  # greedy: the same again
    page.set(message="Three pears")
    page.send("chat")
    shots("chat")
    before = page.texts(".message .text")
    assert len(before) == 4

    # an edit that the server refuses changes nothing, and stays open
    page.set(temperature="-1")
    page.press(".user [data-act=edit]")
    page.keys(" more", Keys.ENTER)
    page.wait("!document.querySelector('[data-act=send]').disabled")
    assert "temperature" in page.text("#error")
    assert page.texts(".message .text") == before[1:]
    assert page.js("return document.querySelector('.user textarea').value").endswith("two more")
    page.set(temperature="0")
    page.reload()
    assert page.texts(".message") == [] and page.texts("#chat-list .name") == ["One apple"]
    page.press("#chat-list .name")
    assert page.texts(".message .text") == before
    page.press(".user [data-act=edit]")
    page.keys(" more", Keys.ENTER)
    page.wait("!document.querySelector('[data-act=send]').disabled")
    user, answer = page.texts(".message .text")
    assert user == "One apple\nand two more" and answer
    page.js(
        "window.files = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { files.push(blob.text()); return make(blob); }"
    )
    page.press("[data-act=export]")
    (exported,) = page.driver.execute_async_script("Promise.all(files).then(arguments[0])")
    roles = [(each["role"], each["content"]) for each in json.loads(exported)["messages"]]
    assert roles == [("user", user), ("assistant", answer)]
    page.js("window.confirm = () => true")
    page.press("#chat-list [aria-label^=Delete]")
    assert page.texts(".message") == page.texts("#chat-list li") == []
    page.reload()
    assert page.texts("#chat-list li") == [] and page.logs()[0][1:] == []  # the refusal


def test_settings_are_kept_until_they_are_reset(page: Browser, server: RunningServer) -> None:
    page.open(server.base_url, KEY, settings={})
    assert page.js("return document.querySelector('[name=max_tokens]').value") == "1024"
    page.set(temperature="0.7", trees=False, form="regex", constraint="[a-z]+")
    page.reload()
    values = "const it = (name) => document.querySelector(`[name=${name}]`);"
    values += "return [it('temperature').value, it('trees').checked, it('constraint').value,"
    values += " it('constraint').checkVisibility()]"
    assert page.js(values) == ["0.7", False, "[a-z]+", True]
    page.press("[data-act=reset]")
    assert page.js(values) == ["0", True, "", False]
    page.reload()
    assert page.js(values) == ["0", True, "", False]


ATTACH = "return it.attach(args[0].map(([name, bytes]) => new File([new Uint8Array(bytes)], name)))"


def test_text_files_go_with_a_message(page: Browser, server: RunningServer) -> None:
    page.open(server.base_url, KEY, settings={"max_tokens": "5"})
    notes = "Zwölf Äpfel\n```\ncode\n```\n"
    sent = [["notes.md", list(notes.encode())], ["b.txt", list(b"two")]]
    assert page.module("attach.js", ATTACH, sent) is None
    refused = page.module("attach.js", ATTACH, [["p.png", [137, 80, 0, 255]]])
    assert "p.png is not a text in UTF-8" in refused["error"]
    assert "1,048,576" in page.module("attach.js", ATTACH, [["big", [65] * 1_048_577]])["error"]
    assert len(page.texts("#attached li")) == 2
    page.press("#attached li:nth-child(2) button")
    page.set(message="How many?")
    page.send("chat")
    assert page.text(".user .text") == f"notes.md:\n````\n{notes}````\n\nHow many?"
    assert page.texts("#attached li") == []


def test_beside_a_step_without_drafts_stands_the_last_tree(
    page: Browser, server: RunningServer
) -> None:
    page.open(server.base_url, KEY)
    drafted = {"tokens": [1, 2], "parents": [-1, 0], "scores": [0, -1], "accepted": [0, 1]}
    plain = {"tokens": [3], "parents": [-1], "scores": [0], "accepted": [0], "bonus": 4}
    show = (
        "const steps = args[0], output = {steps, bestAt: () => []};"
        "it.showToken(output, {step: steps.at(-1), node: -1}, false);"
    )
    page.module("steps.js", show, [{**drafted, "bonus": 3}, plain])
    assert page.text("#step .earlier") == "The last tree that was drafted, in step 1:"
    kinds = "return [...document.querySelectorAll('#step .tree')].map((tree) =>"
    kinds += " [...tree.querySelectorAll('.chip')].map((chip) => chip.dataset.kind))"
    assert page.js(kinds) == [["root", "bonus"], ["root", "accepted", "bonus"]]
    page.open(server.base_url, KEY)
    page.module("steps.js", show, [plain])
    assert len(page.js(kinds)) == 1


NAMELESS = """
const named = (each) => each.getAttribute("aria-label") || each.textContent.trim() || each.title
  || [...(each.labels ?? [])].some((label) => label.textContent.trim());
const focus = [...document.querySelectorAll("button, input, select, textarea, summary, [tabindex]")]
  .filter((each) => each.checkVisibility() && !each.matches(".token"));
const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
return [
  ...focus.filter((each) => !named(each)).map((each) => each.outerHTML),
  ...focus.filter((each) => each.tabIndex > 0).map((each) => `order: ${each.outerHTML}`),
  ...ids.filter((id, at) => ids.indexOf(id) !== at),
];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_a_formatted_answer_can_be_read_everywhere(
    page: Browser, server: RunningServer, shots: Shots, width: int, scheme: str
) -> None:
    page.open(server.base_url, KEY, width, scheme, {"max_tokens": "30", "thinking": "false"})
    page.set(message="Tom has 12 apples and buys 7 more.")
    page.send("chat")
    page.module("markdown.js", RENDER, MARKDOWN + "\n> " + "a" * 90)
    page.module("markdown.js", "return it.colour(document.getElementById('messages'))")
    assert page.is_narrow() and page.js(NAMELESS) == []
    assert page.text(".assistant .rich")
    found = page.js(CONTRAST, "h1, p, label, summary, .tool, .name, .rich *, pre *, .quiet")
    assert [pair for pair in found if pair[1] < 4.5] == []
    shots(f"{width}-{scheme}")
    if width == 360:
        page.press("[data-act=view]")
        page.js("document.querySelector('.token:not([data-shown])').focus()")
        assert page.js("return document.querySelector('#steps.held').checkVisibility()")
        page.press("#close-steps")
        assert page.texts("#step .tree") == [] and not page.texts("#steps.held")
        assert not page.js(
            "return [...document.querySelectorAll('.token[data-shown]')]"
            ".some((each) => each.checkVisibility())"
        )


# ── which characters came from which token ───────────────────────────────────────────────────

ALIGN = """
const [tokens, events, at] = args, shown = [];
const aligner = new it.Aligner((place, text, token) => shown.push([place, text, token?.text]));
for (const [count, place, text] of events) {
  aligner.addTokens(tokens.splice(0, count).map((text) => ({text})));
  if (at && place === at) aligner.takeTokens(place);
  else aligner.addText(place, text);
}
aligner.finish("end");
return shown;
"""


@pytest.mark.parametrize(
    ("tokens", "events", "shown"),
    [
        pytest.param(
            ["I", " am", " so", "</s>"],
            [[2, "c", "I am"], [2, "c", " so"]],
            [["c", "I", "I"], ["c", " am", " am"], ["c", " so", " so"], ["end", "", "</s>"]],
            id="plain",
        ),
        pytest.param(
            ["a", "\ufffd", "\ufffd", "\ufffd", "b"],
            [[2, "c", "a"], [1, "c", ""], [2, "c", "日b"]],
            [["c", "a", "a"], ["c", "日", "\ufffd"], ["c", "", "\ufffd"], ["c", "", "\ufffd"]]
            + [["c", "b", "b"]],
            id="a character of three tokens",
        ),
        pytest.param(
            ["<think>", "\n", "Hm", "</think>", "\n\n", "Yes", "."],
            [[3, "r", "Hm"], [4, "c", "Yes."]],
            [["r", "", "<think>"], ["r", "", "\n"], ["r", "Hm", "Hm"], ["c", "", "</think>"]]
            + [["c", "", "\n\n"], ["c", "Yes", "Yes"], ["c", ".", "."]],
            id="tags and white space that are left out",
        ),
        pytest.param(
            [" Ans", "wer 1", "9\nQ"],
            [[3, "c", " Answer 1"], [0, "c", "9"]],
            [["c", " Ans", " Ans"], ["c", "wer 1", "wer 1"], ["c", "9", "9\nQ"]],
            id="cut by a stop string",
        ),
    ],
)
def test_tokens_are_matched_to_what_the_text_shows(
    page: Browser, server: RunningServer, tokens: list[str], events: Any, shown: Any
) -> None:
    page.open(server.base_url, KEY)
    assert page.module("align.js", ALIGN, tokens, events, None) == shown


def test_the_pieces_are_the_text_whatever_the_tokens_say(
    page: Browser, server: RunningServer
) -> None:
    page.open(server.base_url, KEY)
    luck = random.Random(7)
    for _ in range(60):
        tokens = [luck.choice(["a", " b", "ab", "\ufffd", "<t>", "\n", ""]) for _ in range(12)]
        pieces = ["".join(luck.choices(["a", " b", "ab", "日", "\n"], k=3)) for _ in range(5)]
        events = [[luck.randrange(5), "c", piece] for piece in pieces]
        shown = page.module("align.js", ALIGN, tokens, events, None)
        assert "".join(text for _, text, _ in shown) == "".join(pieces)
