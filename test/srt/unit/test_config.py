"""Settings: the command line made from them, and what is wrong with them, without any file."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mamba_eagle import launch_server
from mamba_eagle.chat.family import FAMILIES
from mamba_eagle.config import (
    ConfigError,
    ServerConfig,
    add_arguments,
    flag_of,
    from_arguments,
)
from mamba_eagle.config.flags import unreadable
from mamba_eagle.resolve import resolve

AUTO = [spec.name for spec in dataclasses.fields(ServerConfig) if spec.default is None]


def parsed(*flags: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServerConfig)
    return from_arguments(ServerConfig, parser.parse_args(flags))


def test_no_flags_are_the_defaults() -> None:
    assert parsed() == ServerConfig()


def test_flags_become_settings_of_their_type() -> None:
    config = parsed(
        *("--model-path", "a", "--port", "1", "--mem-fraction-static", "0.5"),
        *("--disable-radix-cache", "--no-speculative-adaptive", "--mamba-rows", "20"),
    )
    assert config == ServerConfig(
        model_path="a",
        port=1,
        mem_fraction_static=0.5,
        disable_radix_cache=True,
        speculative_adaptive=False,
        mamba_rows=20,
    )


def test_another_servers_name_of_a_flag_is_the_same_flag() -> None:
    assert parsed("--lora-paths", "a=b").lora_modules == ("a=b",)


@pytest.mark.parametrize("name", AUTO)
def test_auto_and_zero_leave_the_choice_to_the_runner(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    assert parsed(flag, "auto") == parsed(flag, "0") == ServerConfig()
    assert getattr(parsed(flag, "7"), name) == 7


def test_zero_is_not_auto_where_it_means_none() -> None:
    assert parsed("--mamba-checkpoint-interval", "0").mamba_checkpoint_interval == 0


def test_what_is_neither_number_nor_auto_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--mamba-rows", "many")
    assert "--mamba-rows: 'many' is neither a number nor auto" in capsys.readouterr().err


def test_help_names_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    words = " ".join(capsys.readouterr().out.split())
    for spec in dataclasses.fields(ServerConfig):
        flag = "--" + spec.name.replace("_", "-")
        assert f"{flag} " in words
        if spec.default is None:
            assert f"{spec.metadata['help']} (default: auto)" in words
    assert all(f" {family}, " in words for family in FAMILIES)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max_running_requests", 0, "--max-running-requests 0: must be 1 or more"),
        ("mamba_rows", 0, "--mamba-rows 0: must be 1 or more, or auto"),
        ("cpu_threads", -1, "--cpu-threads -1: must be 1 or more, or auto"),
        ("mamba_checkpoint_interval", -1, "--mamba-checkpoint-interval -1: must be 0 or more"),
        ("mem_fraction_static", 0.0, "--mem-fraction-static 0.0: must be above 0 and at most 1"),
        ("mem_fraction_static", 1.1, "--mem-fraction-static 1.1: must be above 0 and at most 1"),
        (
            "model_path",
            "/m\udcff",
            "--model-path '/m\\udcff': is not UTF-8; with letters beyond ASCII the locale must be "
            "UTF-8, too (LC_ALL=C.UTF-8)",
        ),
        ("port", 0, "--port 0: must be between 1 and 65535"),
        ("port", 65536, "--port 65536: must be between 1 and 65535"),
        ("stream_interval", 0, "--stream-interval 0: must be 1 or more"),
        ("max_queued_requests", -1, "--max-queued-requests -1: must be 0 or more"),
        (
            "otlp_traces_endpoint",
            "localhost:4318",
            "--otlp-traces-endpoint localhost:4318: must begin with http:// or https://, "
            "as http://localhost:4318/v1/traces does",
        ),
        (
            "speculative_draft_p_min",
            1.5,
            "--speculative-draft-p-min 1.5: must be between 0 and 1, a probability",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named(name: str, value: object, problem: str) -> None:
    config = dataclasses.replace(ServerConfig(speculative_algorithm="NONE"), **{name: value})
    assert config.problems() == [problem]


def test_a_text_that_is_not_utf8_is_named_once(tmp_path: Path) -> None:
    """Of the model's path the tokenizer's and the served name are made; and keys are a tuple."""
    folder = tmp_path / "m\udcff"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as refused:
        resolve(ServerConfig(model_path=str(folder), api_key=("a", "k\udcff")))
    flags = [problem.partition(" ")[0] for problem in refused.value.problems]
    assert flags == ["--model-path", "--api-key"]


def test_drafts_on_a_cpu_are_chains_from_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits for EAGLE, four with AVX2 alone, and all unless something else is set."""

    def drafts(**given: object) -> tuple[str, str]:
        config = resolve(ServerConfig(**given))
        return config.tree_shape.name, config.speculative_draft_model_quantization

    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx,+avx2,+fma,-avx512vnni")
    assert drafts(device="cpu") == ("1x5x6", "int4")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+avx512f,+avx512vnni")
    assert drafts(device="cpu") == ("1x5x6", "int8")
    assert drafts(device="cpu", speculative_eagle_topk=4) == ("4x5x8", "int8")
    assert drafts(device="cpu", speculative_algorithm="MTP") == ("1x5x6", "same")
    assert drafts(device="cpu", quantization="int4") == ("1x5x6", "same")
    assert drafts(device="cpu", dtype="bfloat16") == ("1x5x6", "same")
    own = "speculative_draft_model_quantization"
    assert drafts(device="cpu", **{own: "auto"}) == ("1x5x6", "auto")
    for drivers, found in ((["/nowhere"], "1x5x6"), (["/nowhere", __file__], "2x5x8")):
        monkeypatch.setattr("mamba_eagle.backend.forecast.GPU_DRIVERS", drivers)
        assert drafts()[0] == found


def test_a_part_of_a_tree_leaves_the_others_as_they_would_be() -> None:
    """A default that is set changes nothing, and what is left out fits what is set."""

    def tree(device: str, **given: int) -> str:
        shape = {f"speculative_{name}": value for name, value in given.items()}
        return resolve(ServerConfig(device=device, **shape)).tree_shape.name

    for part in ({"num_steps": 5}, {"eagle_topk": 1}, {"num_draft_tokens": 6}):
        assert tree("cpu", **part) == "1x5x6"
    for part in ({"num_steps": 5}, {"eagle_topk": 2}, {"num_draft_tokens": 8}):
        assert tree("cuda", **part) == "2x5x8"
    assert tree("cpu", num_steps=3) == tree("cuda", num_steps=3, eagle_topk=1) == "1x3x4"
    assert tree("cpu", num_steps=9) == "1x9x10"
    assert tree("cpu", num_draft_tokens=16) == "2x5x16"
    assert tree("cuda", num_steps=1) == "2x1x3"


def test_defaults_have_no_problems() -> None:
    assert ServerConfig().problems() == []


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "float32"},
        {"quantization": "nvfp4"},
        {"mamba_ssm_dtype": "bfloat16"},
        {"mamba_verify_mode": "snapshot"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"pp_size": 2},
        {"max_loras": 2},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_exact_bits_cannot_be_had_with_is_named(given: dict[str, Any]) -> None:
    (name,) = given
    flag = f"--{name.replace('_', '-')}"
    (problem,) = ServerConfig(exact=True, device="cuda", **given).problems()
    assert flag in problem and "--exact" in problem
    assert ServerConfig(device="cuda", **given).problems() == []


def test_a_cpu_is_exact_anyway() -> None:
    given = {"dtype": "float32", "tp_size": 2, "quantization": "int8"}
    assert ServerConfig(exact=True, device="cpu", **given).problems() == []


def test_all_problems_are_said_at_once() -> None:
    """Of numbers, of folders and of the drafter's tree."""
    config = ServerConfig(
        model_path="/not/there",
        speculative_algorithm="EAGLE",
        speculative_num_steps=0,
        port=0,
    )
    with pytest.raises(ConfigError) as refused:
        resolve(config)
    said = str(refused.value)
    for part in (
        "--model-path /not/there: no such folder",
        "--speculative-num-steps 0",
        "--port 0: must be",
        "EAGLE needs --speculative-draft-model-path",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("quantization", "fp4", "must be one of auto, fp8, nvfp4"),
        ("dtype", None, "must be one of auto, float32"),
        ("disable_radix_cache", "no", "must be True or False"),
        ("max_total_tokens", "500", "must be a whole number"),
        ("max_running_requests", 2.5, "must be a whole number"),
        ("queue_timeout", "1", "must be a number"),
        ("pp_layers", 3, "must be a text"),
    ],
)
def test_settings_made_in_python_are_what_flags_could_have_given(
    name: str, value: Any, said: str
) -> None:
    fits = {
        "max_total_tokens": None,
        "queue_timeout": 1,
        "cache_dir": None,
        "lora_modules": ["a=b"],
    }
    assert unreadable(ServerConfig(**fits)) == []
    (found,) = unreadable(ServerConfig(**{**fits, name: value}))
    assert found.startswith(f"{flag_of(name)} {value!r}: ") and said in found


@pytest.mark.parametrize("module", ["config", "resolve", "server.serve", "scheduler.process"])
def test_only_the_runner_loads_torch(module: str) -> None:
    code = f"import sys, mamba_eagle.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--prot", "3"], "no flag --prot; did you mean --port?"),
        (["--model-pth=x", "y"], "no flag --model-pth; did you mean --model-path?"),
        (["--xyzzy"], "no flag --xyzzy (--help"),
        (["stray"], "'stray' belongs to no flag"),
        (["--port", "many"], "argument --port: invalid int value: 'many'"),
    ],
)
def test_a_wrong_flag_is_one_line_with_what_may_be_meant(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch_server.make_parser().parse_args(line)
    (text,) = capsys.readouterr().err.splitlines()
    assert said in text and caught.value.code == 2
