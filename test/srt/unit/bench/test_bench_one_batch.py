"""Batches in this process and bench_one_batch's lines, with a runner that makes up its tokens."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from mamba_eagle import bench_one_batch
from mamba_eagle.bench import one_batch
from mamba_eagle.bench.batch import BatchEngine, greedy, sized_for
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.eval.gsm8k import synthetic_prompts
from mamba_eagle.message import Plan, Ready, RequestResult, StepResult

SECONDS = 0.25  # of every step
VOCABULARY = 10**5


class Done(NamedTuple):
    made: StepResult

    def result(self) -> StepResult:
        return self.made


class CountingRunner:
    """A request whose prompt begins with token p < 99 outputs 1000 p, 1000 p + 1, …; with a tree,
    steps accept 1, 2, … nodes in turn.

    Checks the protocol: which slots may be written, and that no two requests share one.
    """

    def __init__(self, config: EngineConfig, max_kv_slots: int = 0, eos: int = -1) -> None:
        self.config = config
        self.ready = Ready(
            max_kv_slots=max_kv_slots or config.max_total_tokens,
            max_state_slots=config.max_mamba_cache_size,
            max_running_requests=config.max_running_requests,
            context_length=4096,
            vocab_size=VOCABULARY,
            eos_token_ids=[eos],
            details={
                "device": "cpu",
                "dtype": "float32",
                "rows_per_request": 7,
                "checkpoint_bytes": 2_000_000 * config.max_mamba_cache_size,
                "verify_bytes": 500_000 * config.max_running_requests,
            },
        )
        self.plans: list[Plan] = []
        self.made: dict[int, int] = {}  # request slot: tokens so far
        self.limit: dict[int, int] = {}
        self.prompt: dict[int, list[int]] = {}
        self.prompts: list[list[int]] = []  # of released requests
        self.held: dict[int, set[int]] = {}  # request slot: its KV slots
        self.overlaps = False

    def launch(self, plan: Plan) -> Done:
        return Done(self.execute(plan))

    def execute(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        assert not (plan.prefill and plan.decode), "steps are of one kind"
        for release in plan.releases:
            assert self.made.pop(release.slot) == self.limit[release.slot]
            self.prompts.append(self.prompt.pop(release.slot))
            del self.held[release.slot]
        return StepResult(
            step=plan.step,
            prefill=[self.prefill(item) for item in plan.prefill],
            decode=self.decode(plan.decode) if plan.decode else [],
            seconds=SECONDS,
        )

    def take(self, slot: int, kv_slots: list[int]) -> None:
        new = set(kv_slots)
        assert len(new) == len(kv_slots) and max(new) < self.ready.max_kv_slots
        assert not any(new & held for held in self.held.values())
        self.held.setdefault(slot, set()).update(new)

    def prefill(self, item) -> RequestResult:
        if item.is_first:
            assert item.start == 0 and item.source == -1 and item.slot not in self.made
            self.prompt[item.slot] = []
            self.limit[item.slot] = item.first.sampling.max_new_tokens
            if not item.first.sampling.ignore_eos:  # the only other thing that ends a request here
                self.limit[item.slot] = self.ready.eos_token_ids[0] - self.first(item) + 1
        assert item.start == len(self.prompt[item.slot]) and not item.saves
        self.prompt[item.slot] += item.token_ids
        assert len(item.kv_slots) == len(item.token_ids)
        self.take(item.slot, item.kv_slots)
        if not item.is_last:
            return RequestResult()
        self.made[item.slot] = 1
        return RequestResult(tokens=[self.first(item)])

    def first(self, item) -> int:
        return 1000 * ((self.prompt.get(item.slot) or item.token_ids)[0] % 99)

    def decode(self, batch) -> list[RequestResult]:
        results = []
        for slot, kv_slots in zip(batch.slots, batch.kv_slots):
            assert len(kv_slots) == batch.shape.nodes
            self.take(slot, kv_slots)
            accepted = 1 + len(self.plans) % batch.shape.nodes
            accepted = min(accepted, self.limit[slot] - self.made[slot])
            nodes = [0, *range(batch.shape.nodes - accepted + 1, batch.shape.nodes)]
            if not accepted:  # it ended in the step before
                nodes = []
            self.held[slot] -= {kv_slots[n] for n in range(batch.shape.nodes) if n not in nodes}
            first = 1000 * (self.prompt[slot][0] % 99) + self.made[slot]
            self.made[slot] += accepted
            results.append(RequestResult(tokens=list(range(first, first + accepted)), nodes=nodes))
        return results


MODEL = str(EMBEDDED_MODEL)
PLAIN = EngineConfig(model_path=MODEL, speculative_algorithm="NONE", load_format="dummy")
TREE = EngineConfig(
    model_path=MODEL,
    speculative_algorithm="EAGLE",
    load_format="dummy",
    speculative_num_steps=3,
    speculative_eagle_topk=2,
    speculative_num_draft_tokens=6,
)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("config", [PLAIN, TREE], ids=["plain", "tree"])
def test_a_batch_makes_each_request_its_tokens(config: EngineConfig, overlaps: bool) -> None:
    config = sized_for(config, batch_size=3, total_tokens=9 + 20)
    runner = CountingRunner(config)
    runner.overlaps = overlaps
    engine = BatchEngine(config, runner)
    prompts = [[1, 2, 3], [4] * 9, [5]]
    for _ in range(2):  # a second batch finds every slot free again
        runner.prompts.clear()
        made = engine.generate(prompts, greedy(20))
        assert made.tokens == [[1000 * prompt[0] + k for k in range(20)] for prompt in prompts]
        assert sorted(runner.prompts) == sorted(prompts)
        assert runner.made == {} and runner.held == {}  # all were released
    assert made.prompt_tokens == 13 and made.output_tokens == 60
    assert sum(made.step_tokens) == 57  # the first token of each comes from prefill
    assert sum(n * count for n, count in made.accept_lengths.items()) == 57
    if config.tree_shape == TreeShape():
        assert made.accept_length == 1.0 and made.step_requests == [3] * 19
    else:
        assert made.accept_length > 2


def test_times_are_the_runners_own() -> None:
    config = sized_for(EngineConfig(speculative_algorithm="NONE", chunked_prefill_size=4), 2, 20)
    made = BatchEngine(config, CountingRunner(config)).generate([[1] * 6, [2] * 5], greedy(3))
    assert made.prefill_seconds == 3 * SECONDS and made.step_seconds == [SECONDS, SECONDS]
    assert made.seconds == 5 * SECONDS
    assert made.median_decode_throughput == 2 / SECONDS
    made.step_seconds, made.step_requests = [1.0, 1.0, 4.0], [2, 2, 2]
    assert made.median_decode_latency == 1.0 and made.mean_decode_latency == 2.0


def test_prompts_are_cut_into_chunks_and_all_run_before_the_first_decode_step() -> None:
    config = sized_for(EngineConfig(speculative_algorithm="NONE", chunked_prefill_size=4), 2, 20)
    runner = CountingRunner(config)
    BatchEngine(config, runner).generate([list(range(6)), list(range(5))], greedy(2))
    chunks = [
        [(i.slot, i.start, list(i.token_ids), i.is_first, i.is_last) for i in p.prefill]
        for p in runner.plans
    ]
    assert chunks == [
        [(0, 0, [0, 1, 2, 3], True, False)],
        [(0, 4, [4, 5], False, True), (1, 0, [0, 1], True, False)],
        [(1, 2, [2, 3, 4], False, True)],
        [],  # both decode
        [],  # both are released
    ]
    assert [plan.decode is not None for plan in runner.plans] == [False, False, False, True, False]
    assert all(item.first is None for p in runner.plans for item in p.prefill if item.start)


def test_prompts_and_decode_steps_can_be_run_apart() -> None:
    config = sized_for(PLAIN, batch_size=2, total_tokens=20)
    runner = CountingRunner(config)
    run = BatchEngine(config, runner).start([[1], [2]], greedy(4))
    assert run.made.tokens == [[1000], [2000]] and run.made.step_seconds == []
    assert len(runner.plans) == 1
    assert run.finish().tokens == [[1000, 1001, 1002, 1003], [2000, 2001, 2002, 2003]]


def test_requests_end_at_stop_tokens() -> None:
    config = sized_for(PLAIN, 1, 30)
    runner = CountingRunner(config, eos=1004)
    engine = BatchEngine(config, runner)
    stopping = SamplingParams(max_new_tokens=8, temperature=0.0)
    assert engine.generate([[1]], stopping).tokens == [[1000, 1001, 1002, 1003, 1004]]
    assert runner.made == {}
    assert engine.generate([[1]], greedy(8)).tokens == [list(range(1000, 1008))]  # ignores it


def test_what_does_not_fit_is_refused() -> None:
    config = sized_for(PLAIN, batch_size=2, total_tokens=10)
    engine = BatchEngine(config, CountingRunner(config))
    with pytest.raises(ValueError, match="3 prompts: the runner holds 2"):
        engine.generate([[1]] * 3, greedy(1))
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate([[1], []], greedy(1))
    with pytest.raises(ValueError, match="needs 30 KV slots, the runner has 24"):
        engine.generate([[1] * 6] * 2, greedy(7))
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        engine.generate([[1]], greedy(0))
    with pytest.raises(ValueError, match="between 0 and 99999"):
        engine.generate([[VOCABULARY]], greedy(1))


def test_a_runner_that_fails_is_told_apart_from_a_batch_that_does_not_fit() -> None:
    config = sized_for(PLAIN, batch_size=1, total_tokens=10)
    runner = CountingRunner(config)
    runner.ready.vocab_size = 1002
    with pytest.raises(RuntimeError, match="request 0 failed: .*1002"):
        BatchEngine(config, runner).generate([[1]], greedy(4))


@pytest.fixture
def bench(monkeypatch):
    """Runs the command with runners that count, and returns these."""

    def run(config: EngineConfig, flags: str) -> list[CountingRunner]:
        runners = []

        def make_runner(sized: EngineConfig) -> CountingRunner:
            runners.append(CountingRunner(sized))
            return runners[-1]

        monkeypatch.setattr(one_batch, "make_runner", make_runner)

        def resolve(asked: EngineConfig) -> EngineConfig:
            own = replace(config, simulate_acc_len=asked.simulate_acc_len)
            if problems := own.simulation_problems():
                raise ConfigError(problems)
            return own

        monkeypatch.setattr(bench_one_batch, "resolve", resolve)
        bench_one_batch.main(flags.split())
        return runners

    return run


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("config", [PLAIN, TREE], ids=["plain", "tree"])
def test_lines_other_tools_parse(config, bench, capsys, tmp_path) -> None:
    results = tmp_path / "results.jsonl"
    bench(config, f"--batch-size 1 2 --input-len 6 --output-len 16 --result-filename {results}")
    text = capsys.readouterr().out
    seconds, rate = r"latency: *\d+\.\d{5} s", r"throughput: *\d+\.\d{2} token/s"
    assert len(re.findall(rf"^Prefill\. {seconds}, {rate}$", text, re.M)) == 2
    for i in range(3):
        assert re.search(rf"^Decode {i}\. Batch size: 2, {seconds}, {rate}$", text, re.M)
    assert len(re.findall(rf"^Decode\.  median {seconds}, median {rate}$", text, re.M)) == 2
    assert len(re.findall(rf"^Decode\.  mean {seconds}$", text, re.M)) == 2
    assert len(re.findall(rf"^Total\. latency: *\d+\.\d{{3}} s, {rate}$", text, re.M)) == 2
    assert "Decode 5." not in text
    records = read_lines(results)
    assert [record["batch_size"] for record in records] == [1, 2]
    for record in records:
        assert record["input_len"] == 6 and record["output_len"] == 16
        assert record["run_name"] == "default"
        for key in (
            "prefill_latency",
            "prefill_throughput",
            "median_decode_latency",
            "median_decode_throughput",
            "mean_decode_latency",
            "total_latency",
            "overall_throughput",
        ):
            assert record[key] > 0
        assert (record["accept_length"] == 1) == (config is PLAIN)


@pytest.mark.parametrize("config", [PLAIN, TREE], ids=["plain", "tree"])
def test_result_lines_say_what_was_measured_and_on_what(config, bench, tmp_path) -> None:
    file = tmp_path / "results.jsonl"
    bench(config, f"--batch-size 1 2 --input-len 6 --output-len 16 --results {file}")
    lines = read_lines(file)
    step = "decode_step_ms" if config is PLAIN else "tree_step_ms"
    names = ["prefill_s", "state_mb_per_request", step, "tokens_per_s"]
    assert [(line["batch"], line["name"]) for line in lines] == [
        (batch, name) for batch in (1, 2) for name in names
    ]
    for line in lines:
        assert line["mode"] == "deferred" and line["rows"] == 7 and line["value"] > 0
        assert line["nodes"] == config.tree_shape.nodes
        assert line["simulated_accept_length"] is None
        assert {"accept_length", "gpu", "copy_tb_s", "torch", "triton", "commit", "date"} <= set(
            line
        )
    by_name = {line["name"]: line for line in lines[4:]}
    assert by_name["state_mb_per_request"]["value"] == 2.5
    assert by_name["state_mb_per_request"]["checkpoint_mb"] == 2.0
    tokens = by_name["tokens_per_s"]["value"] * by_name[step]["value"] / 1e3  # of a step
    assert tokens == pytest.approx(2, rel=1e-4) if config is PLAIN else tokens > 2


def test_a_simulated_length_is_said_wherever_there_are_numbers(bench, capsys, tmp_path) -> None:
    results, records = tmp_path / "lines.jsonl", tmp_path / "records.jsonl"
    flags = f"--output-len 16 --results {results} --result-filename {records}"
    (runner,) = bench(TREE, f"{flags} --simulate-acc-len 2.5")
    assert runner.config.simulate_acc_len == 2.5
    assert "SIMULATED: --simulate-acc-len forces 2.5 accepted tokens" in capsys.readouterr().out
    for line in read_lines(results) + read_lines(records):
        assert line["simulated_accept_length"] == 2.5
    bench(TREE, "--output-len 4")
    assert "SIMULATED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "config, flags, message",
    [
        (PLAIN, "--simulate-acc-len 2", "2: without a drafter each step makes one token"),
        (TREE, "--simulate-acc-len 0.5", "0.5: must be between 1 and 4"),
        (TREE, "--simulate-acc-len 4.1", "4.1: must be between 1 and 4"),
        (TREE, "--simulate-acc-len nan", "nan: must be between 1 and 4"),
        (TREE, "--simulate-acc-len 2 --correctness-test", "nothing to compare"),
    ],
)
def test_a_simulated_length_that_cannot_be_is_refused(bench, config, flags, message) -> None:
    with pytest.raises(SystemExit, match=message):
        bench(config, flags)


def test_both_verify_modes_are_measured_and_compared(bench, capsys, tmp_path) -> None:
    file = tmp_path / "results.jsonl"
    flags = f"--batch-size 1 2 --output-len 16 --compare-verify-modes --results {file}"
    runners = bench(TREE, flags)
    assert [runner.config.mamba_verify_mode for runner in runners] == ["deferred", "snapshot"]
    text = capsys.readouterr().out
    row = r" +{} +\d+\.\d{{3}} +\d+\.\d +\d\.\d{{3}} +2\.50 +0\.50$"
    for batch in (1, 2):
        for mode in ("deferred", "snapshot"):
            assert len(re.findall("^" + mode + row.format(batch), text, re.M)) == 1
    assert "Batch 2: 2 of 2 texts are equal in both modes" in text
    steps = [line for line in read_lines(file) if line["name"] == "tree_step_ms"]
    assert [(line["mode"], line["batch"]) for line in steps] == [
        (mode, batch) for mode in ("deferred", "snapshot") for batch in (1, 2)
    ]
    bench(TREE, f"{flags} --simulate-acc-len 2")
    assert "texts are not compared" in capsys.readouterr().out


def test_texts_that_part_are_told_with_the_place() -> None:
    told = one_batch.compared_texts([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]])
    assert told == (
        "Batch 2: 1 of 2 texts are equal in both modes; request 1 parts at output token 2"
    )


def test_prompts_have_the_wanted_length() -> None:
    config = EngineConfig(load_format="dummy")
    ids = synthetic_prompts(config, vocab_size=50, batch_size=3, length=20)
    assert [len(prompt) for prompt in ids] == [20] * 3
    assert all(0 <= token < 50 for prompt in ids for token in prompt)


def test_bad_flags_are_named() -> None:
    with pytest.raises(SystemExit):
        bench_one_batch.main(["--batch-size", "0"])
    with pytest.raises(SystemExit, match="--chunked-prefill-size -1: must be 1 or more, or auto"):
        bench_one_batch.main(["--chunked-prefill-size", "-1"])
