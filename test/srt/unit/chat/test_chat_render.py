"""Templates: what they are given, and that none can hold the server up."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tiny_tokenizer import byte_level

from mamba_eagle.chat.render import (
    Chat,
    ChatTemplate,
    OutOfTime,
    TemplateError,
    run_bounded,
    template_source,
)

USER = {"role": "user", "content": "hi"}


def rendered(template: str, seconds: float = 2.0, **values: Any) -> str:
    chat = Chat(**{"messages": [USER], **values})
    made = ChatTemplate(byte_level().hf, template)
    made.max_seconds = seconds
    return made.render(chat)


def test_a_template_sees_all_that_is_given() -> None:
    template = (
        "{{ tools[0].function.name }} {{ documents[0].text }} {{ mood }} "
        "{{ add_generation_prompt }} {{ bos_token }} {{ messages[0].content }}"
    )
    text = rendered(
        template,
        tools=[{"type": "function", "function": {"name": "f"}}],
        documents=[{"title": "t", "text": "d"}],
        arguments={"mood": "calm"},
        add_generation_prompt=False,
    )
    assert text == "f d calm False <s> hi"


def test_a_message_is_continued() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "The"}]
    chat = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert rendered(template, **chat) == "<user>hi<end><assistant>The"


def test_developer_is_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert rendered("{{ messages[0].role }}", messages=messages) == "system"
    known = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert rendered(known, messages=messages) == "yes"


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.nothing.at_all }}", "no attribute 'nothing'"),
        ("{{ 'x'.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "Expected"),
    ],
)
def test_what_a_template_raises_is_told(template: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        rendered(template)


LOOPS = {
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 1 }}{% endmacro %}{{ f(60) }}",
    "silent": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% set c = b %}"
    "{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_loops_is_stopped(name: str) -> None:
    with pytest.raises(TemplateError, match="had not ended after 0.1 s"):
        rendered(LOOPS[name], seconds=0.1)
    deadline = time.monotonic() + 60
    while any(thread.name == "bounded-work" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the template still runs"
        time.sleep(0.01)


def test_bounded_work_gives_its_result_and_its_errors() -> None:
    assert run_bounded(lambda: 7, 60.0) == 7
    with pytest.raises(KeyError):
        run_bounded(lambda: {}["x"], 60.0)
    with pytest.raises(OutOfTime):
        run_bounded(lambda: [None for _ in iter(int, 1)], 0.05)


def test_a_template_is_a_file_or_a_text(tmp_path: Any) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("x{{ 1 }}")
    assert template_source(str(path)) == "x{{ 1 }}" == template_source("x{{ 1 }}")
    with pytest.raises(ValueError, match="No such file.*path of a Jinja file"):
        template_source(str(tmp_path / "none"))


def test_tools_may_have_a_template_of_their_own() -> None:
    hf = byte_level().hf
    hf.chat_template = {"default": "plain", "tool_use": "with tools"}
    template = ChatTemplate(hf)
    assert template.render(Chat([USER])) == "plain"
    assert template.render(Chat([USER], tools=[{}])) == "with tools"
