"""How models of each family write, and what it means. Written by hand after their templates."""

from __future__ import annotations

from typing import Any, NamedTuple

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "zip": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}
CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


class Sample(NamedTuple):
    """``calls``: names and arguments."""

    family: str
    prompt: str
    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


def tagged(**arguments: str) -> str:
    inner = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items()
    )
    return f"<tool_call>\n<function=weather>\n{inner}</function>\n</tool_call>"


OSLO, ROME = ("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAMPLES: dict[str, Sample] = {
    "tags after reasoning": Sample(
        "nemotron_3",
        CHATML + "<think>\n",
        "Rain?\n</think>\n\nLet me look.\n"
        + tagged(city="São Paulo", days="3", zip="01310", tags='["a", "b"]')
        + "\n"
        + tagged(city="Oslo <b>"),
        "Let me look.",
        "Rain?",
        (
            ("weather", {"city": "São Paulo", "days": 3, "zip": "01310", "tags": ["a", "b"]}),
            ("weather", {"city": "Oslo <b>"}),
        ),
    ),
    "reasoning never closed": Sample(
        "nemotron_3", CHATML + "<think>\n", "Hm.\n" + tagged(city="Rome"), None, "Hm.", (ROME,)
    ),
    "no reasoning": Sample("nemotron_3", CHATML + "<think></think>", "4 < 5.", "4 < 5."),
    "cut inside reasoning": Sample(
        "nemotron_3", CHATML + "<think>\n", "Hm. </thi", None, "Hm. </thi"
    ),
    "cut call in tags": Sample(
        "nemotron_3",
        CHATML + "<think>\n",
        "Hm.</think>OK\n" + tagged(city="Oslo") + tagged(city="Rome")[:-9],
        "OK",
        "Hm.",
        (OSLO,),
    ),
    "a tag in prose": Sample(
        "nemotron_3",
        CHATML + "<think></think>",
        "Write <tool_call> or <think>, then </think>.",
        "Write <tool_call> or <think>, then </think>.",
    ),
    "a line of a value": Sample(
        "qwen3_coder",
        CHATML,
        tagged(city="\n\n a\nb \n"),
        None,
        None,
        (("weather", {"city": "\n\n a\nb \n"}),),
    ),
    "one list of calls": Sample(
        "nemotron_nano_v2",
        "<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\n<think>\n",
        'Hm\n</think>\n\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>',
        None,
        "Hm",
        (OSLO, ROME),
    ),
    "no list": Sample(
        "nemotron_nano_v2",
        "<SPECIAL_11>Assistant\n<think></think>",
        "<TOOLCALL>Oslo</TOOLCALL>",
        "<TOOLCALL>Oslo</TOOLCALL>",
    ),
    "text around calls": Sample(
        "granite_4",
        "<|start_of_role|>assistant<|end_of_role|>",
        "First.\n" + HERMES + "\nLast.\n",
        "First.\n\nLast.",
        None,
        (OSLO,),
    ),
    "arguments as a string": Sample(
        "granite_4",
        "<|start_of_role|>assistant<|end_of_role|>",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        None,
        None,
        (OSLO,),
    ),
    "bad JSON": Sample(
        "granite_4",
        "<|start_of_role|>assistant<|end_of_role|>",
        "A <tool_call>{city: Oslo}</tool_call> B",
        "A <tool_call>{city: Oslo}</tool_call> B",
    ),
    "no object of arguments": Sample(
        "hermes",
        CHATML,
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    ),
    "not a number": Sample(
        "hermes",
        CHATML,
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
    ),
    "no name": Sample(
        "hermes",
        CHATML,
        '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
        '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
    ),
    "a call after a question": Sample(
        "mamba2_math", "Question: Hi\nAnswer:", HERMES, None, None, (OSLO,)
    ),
    "cut call in JSON": Sample("hermes", CHATML, "Hm " + HERMES[:-3], "Hm"),
    "reasoning that the model opens": Sample(
        "qwen3", CHATML, "<think>\nHm\n</think>\n\nSo:\n" + HERMES, "So:", "Hm", (OSLO,)
    ),
    "reasoning switched off": Sample(
        "qwen3", CHATML + "<think>\n\n</think>\n\n", "Answer. ", "Answer."
    ),
    "reasoning and a call": Sample(
        "falcon_h1", CHATML, "<think>a</think>" + HERMES, None, "a", (OSLO,)
    ),
    "nothing but spaces": Sample("qwen3", CHATML, " \n\n ", None),
}
# Calls that a stream has begun, and a plain reply leaves out: the arguments.
BEGUN = {
    "cut call in tags": '{"city": "Rome"',
    "cut call in JSON": '{"city": "Oslo"}',
    "not a number": '{"days": NaN}',
}
