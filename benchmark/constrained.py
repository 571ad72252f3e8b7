"""What grammars cost and gain: masks of trees, compiling, step times, JSON extraction.

    python -m benchmark.constrained                                  # on a CPU, all parts
    python -m benchmark.constrained --part steps --batch-size 1 8 32 --load-format dummy \\
        --model-path benchmark/models/nemotron-nano-9b-v2 --speculative-algorithm STANDALONE \\
        --speculative-draft-model-path benchmark/models/llama-2-layers      # on a GPU

Times on a CPU are CPU time of this process with one thread, the best of some rounds: the machine
may be shared. On a GPU a step's time is the median of the runner's own. Appends one JSON line per
measurement to benchmark/results/constrained.jsonl and prints it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llguidance import TokenizerWrapper

from benchmark.lib.problems import prompt_ids
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.batch import BatchEngine, Generation, greedy, sized_for
from mamba_eagle.config import EngineConfig, add_arguments, from_arguments
from mamba_eagle.constrain.grammar import json_schema_grammar
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.constrain.place import Place
from mamba_eagle.constrain.request import RequestGrammar, fill_masks
from mamba_eagle.constrain.vocabulary import Vocabulary, read_tokenizer
from mamba_eagle.core import SamplingParams
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.eval import gsm8k
from mamba_eagle.eval.gsm8k import load_tokenizer, synthetic_prompts
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner
from mamba_eagle.runner.sampler import Scored

RESULTS = Path(__file__).parent / "results" / "constrained.jsonl"
TREES = (8, 16, 64)
SIZES = (2048, 131_072)
EXTRACTION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "question_type": {"enum": ["addition", "subtraction", "multiplication", "division"]},
        "number_of_items": {"type": "integer", "minimum": 0, "maximum": 9999},
        "unit_of_measure": {"enum": ["apples", "dollars", "kilometres", "hours", "people"]},
        "needs_several_steps": {"type": "boolean"},
        "intermediate_result": {"type": "integer", "minimum": 0, "maximum": 9999},
        "final_answer": {"type": "integer", "minimum": 0, "maximum": 9999},
        "confidence": {"enum": ["low", "medium", "high"]},
    },
    "additionalProperties": False,
}
EXTRACTION["required"] = list(EXTRACTION["properties"])
ENDLESS: dict[str, dict[str, Any]] = {
    # near the limit a mask takes 1 to 2 ms, and texts at random get there often
    "strings of up to 40 characters": {"type": "string", "maxLength": 40},
    "extraction": EXTRACTION,
}
ENDLESS = {name: {"type": "array", "items": one, "minItems": 1000} for name, one in ENDLESS.items()}


# ── vocabularies ─────────────────────────────────────────────────────────────────────────────


class Words:
    """A made-up tokenizer: bytes, then random words and pieces of JSON, ``size`` tokens in all."""

    eos_token_id, bos_token_id, special_token_ids = 2, 1, [0, 1, 2]

    def __init__(self, size: int) -> None:
        luck = random.Random(1)
        known = {bytes([byte]): None for byte in range(256)}
        pieces = ['":', '",', '{"', '"}', '","', '":"', "},{", "],", '["', "true", "false", "null"]
        known |= {piece.encode(): None for piece in pieces}
        while len(known) < size - 3:
            word = "".join(luck.choices("etaoinshrdlucmfw", k=luck.randint(2, 9)))
            known[
                (" " * luck.randint(0, 1) + word.title() * luck.randint(0, 1) or word).encode()
            ] = None
        self.tokens = [b"<pad>", b"<s>", b"</s>", *known]
        self._ids = {token: i for i, token in enumerate(self.tokens)}

    def __call__(self, text: str | bytes) -> list[int]:
        text, ids = text.encode() if isinstance(text, str) else text, []
        while text:
            length = next(n for n in range(20, 0, -1) if text[:n] in self._ids)
            ids.append(self._ids[text[:length]])
            text = text[length:]
        return ids


def made_up(size: int) -> Vocabulary:
    return Vocabulary(TokenizerWrapper(Words(size)), size, (2,))


def vocabulary_of(size: int) -> Vocabulary:
    if size == SIZES[0]:
        return Vocabulary(read_tokenizer(str(EMBEDDED_MODEL)), size, (2,))
    return made_up(size)


# ── schemas ──────────────────────────────────────────────────────────────────────────────────


def random_schema(luck: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of the kinds that tools and extractions use: up to three levels of objects and lists."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": luck.choice([20, 60, 200])},
        {"type": "string"},
        {"type": "integer", "minimum": 0, "maximum": luck.choice([100, 99999])},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": [f"choice {i}" for i in range(luck.randint(2, 12))]},
        {"type": "string", "format": luck.choice(["date", "date-time", "email", "uuid"])},
        {"type": "string", "pattern": r"^[A-Z]{2}-[0-9]{3,6}$"},
        {"anyOf": [{"type": "null"}, {"type": "integer"}]},
    ]
    if depth == 3 or (depth and luck.random() < 0.65):
        return luck.choice(leaves)
    if depth and luck.random() < 0.4:
        return {"type": "array", "items": random_schema(luck, depth + 1), "maxItems": 8}
    names = [f"{luck.choice(['name', 'count', 'kind', 'place', 'date'])}_{i}" for i in range(9)]
    own = {name: random_schema(luck, depth + 1) for name in names[: luck.randint(1, 9)]}
    required = [name for name in own if luck.random() < 0.7]
    return {
        "type": "object",
        "properties": own,
        "required": required,
        "additionalProperties": False,
    }


def compile_times(args: argparse.Namespace) -> Iterator[results.Line]:
    """Milliseconds from a schema to a matcher, and to a refusal; none is known before."""
    for size in SIZES:
        vocabulary, luck = vocabulary_of(size), random.Random(3)
        compiled, refused = [], []
        for i in range(200):
            schema = random_schema(luck)
            compiled.append(cpu_ms(tried, vocabulary, schema))
            wrong = {**schema, "properties": {**schema["properties"], "x": {"not": {"const": i}}}}
            refused.append(cpu_ms(tried, vocabulary, wrong))
        for name, times in (("compile_ms", compiled), ("refuse_ms", refused)):
            yield {"name": name, "vocabulary": size, "schemas": 200, **quantiles(times)}


def tried(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    vocabulary.problem(json_schema_grammar(schema))


# ── trees ────────────────────────────────────────────────────────────────────────────────────


def tree_times(args: argparse.Namespace) -> Iterator[results.Line]:
    """Microseconds for all masks of a tree whose nodes the grammar allows, nine in ten."""
    for size in SIZES:
        matchers, luck = Matchers(partial(vocabulary_of, size), size, (2,)), random.Random(5)
        vocabulary = matchers.prepare().result()
        grammars = [json_schema_grammar(random_schema(luck)).text for _ in range(20)]
        for nodes in TREES:
            times = []
            for case in range(args.trees):
                params = SamplingParams(grammar=grammars[case % len(grammars)])
                known, grammar = matchers.start(params), matchers.start(params)
                walk_ahead(known, vocabulary, luck)
                tokens, parents = random_tree(known, nodes, vocabulary, luck)
                grammar.advance(known.output)  # and knows nothing of the tree
                grammar.is_over(grammar.root)
                masks = np.full((nodes, vocabulary.words), 0xFFFFFFFF, dtype=np.uint32)
                times.append(1e3 * cpu_ms(fill_masks, grammar, tokens, parents, masks))
            yield {"name": "tree_us", "vocabulary": size, "nodes": nodes, **quantiles(times)}


def walk_ahead(grammar: RequestGrammar, vocabulary: Vocabulary, luck: random.Random) -> None:
    for _ in range(luck.randrange(25)):
        tokens = allowed(grammar.mask(), vocabulary)
        if not tokens:
            break
        grammar.advance([luck.choice(tokens)])


def allowed(mask: Any, vocabulary: Vocabulary) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary.size]
    return [int(token) for token in bits.nonzero()[0] if token not in vocabulary.eos]


def random_tree(
    grammar: RequestGrammar, nodes: int, vocabulary: Vocabulary, luck: random.Random
) -> tuple[list[int], list[int]]:
    tokens, parents = [0], [0]
    places: list[Place | None] = [grammar.root]  # None: only a mask, or nothing, would tell
    while len(tokens) < nodes:
        parent = luck.randrange(max(0, len(tokens) - 8), len(tokens))
        place = places[parent]
        mask = grammar.mask(place) if place is not None else None
        choices = allowed(mask, vocabulary) if mask is not None else []
        known = choices and luck.random() < 0.9
        tokens.append(luck.choice(choices) if known else luck.randrange(3, vocabulary.size))
        parents.append(parent)
        places.append(grammar.below(place, tokens[-1]) if place is not None else None)
    return tokens, parents


# ── steps ────────────────────────────────────────────────────────────────────────────────────


def engine_of(args: argparse.Namespace, batch: int, tokens: int, **changes: Any) -> BatchEngine:
    config = from_arguments(EngineConfig, args)
    config = sized_for(resolve(type(config)(**{**vars(config), **changes})), batch, tokens)
    engine = BatchEngine(config, make_runner(config))
    if not (Path(config.model_path) / "tokenizer.json").exists():
        ready, runner = engine.ready, engine.runner
        known = Vocabulary(TokenizerWrapper(Words(ready.vocab_size)), ready.vocab_size, (2,))
        matchers = Matchers(lambda: known, ready.vocab_size, (2,))
        runner.constraints.matchers = matchers  # type: ignore[attr-defined]
    engine.runner.constraints.matchers.prepare().result()  # type: ignore[attr-defined]
    return engine


class Replay:
    """Lets an engine sample a given text, so that the same steps can be run without a grammar:
    texts differ in how much of the drafts is accepted, and steps in how many requests they have."""

    def __init__(self, engine: BatchEngine, first: int) -> None:
        """first: position of the first output token, the same for all requests."""
        self.chooser, self.first = engine.runner.chooser, first  # type: ignore[attr-defined]
        self.sample = self.chooser.sample
        self.texts: torch.Tensor | None = None  # [request slots, tokens]
        self.seconds = 0.0  # of CPU time, spent here
        self.chooser.sample = self

    def __call__(self, nodes: Scored, *others: Any) -> torch.Tensor:
        tokens = self.sample(nodes, *others)
        if self.texts is None:
            return tokens
        began = time.process_time()
        index = (nodes.positions - self.first).clamp_(0, self.texts.shape[1] - 1)
        tokens = self.texts[nodes.slots].gather(1, index)
        self.seconds += time.process_time() - began
        return tokens

    def end(self) -> None:
        self.chooser.sample = self.sample


class Timed(NamedTuple):
    made: Generation
    seconds: float  # of all decode steps

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / len(self.made.step_seconds)


def timed(
    engine: BatchEngine, replay: Replay, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Timed:
    """CPU time; on a GPU the time that passes, since the host's CPU time says nothing there."""
    clock = time.perf_counter if engine.runner.overlaps else time.process_time
    run = engine.start(prompts, params)
    own, before = replay.seconds, clock()
    made = run.finish()
    return Timed(made, clock() - before - (replay.seconds - own))


def step_times(args: argparse.Namespace) -> Iterator[results.Line]:
    """Steps of a constrained text and the same steps without a grammar, in turns. On a GPU those
    without one make a text of their own.

    With drafts that follow the grammar there are fewer steps; ``time_ratio`` compares the whole
    text's time.
    """
    length = args.tokens
    engine = engine_of(args, max(args.batch_size), 64 + length)
    runner = engine.runner
    constraints = runner.constraints  # type: ignore[attr-defined]
    vocab = engine.ready.vocab_size
    follows = constraints.steers_drafts and engine.shape.nodes > 1
    ways = [None, False, True] if follows else [None, False]
    for batch, (schema, endless) in product(args.batch_size, ENDLESS.items()):
        grammar = json_schema_grammar(endless, whitespace="").text
        constrained = SamplingParams(temperature=0.0, max_new_tokens=length, grammar=grammar)
        prompts = synthetic_prompts(from_arguments(EngineConfig, args), vocab, batch, 64)
        constraints.steers_drafts = False
        texts = engine.generate(prompts, constrained).tokens
        assert all(len(text) == length for text in texts)
        replay = Replay(engine, 64)
        times: dict[bool | None, list[Timed]] = {way: [] for way in ways}
        for round_ in range(args.rounds + 1):
            for way in ways:
                constraints.steers_drafts = bool(way)
                replays = way is None and not runner.overlaps  # else it samples in its graphs
                replay.texts = torch.tensor(texts) if replays else None
                made = timed(
                    engine, replay, prompts, greedy(length) if way is None else constrained
                )
                same = made.made.tokens == texts
                assert same or (way is None and runner.overlaps), "texts differ"
                if round_:
                    times[way].append(made)
        replay.end()
        least = {way: min(each.seconds for each in times[way]) for way in ways}
        for way in ways[1:]:
            own, free = (min(each.step_ms for each in times[each_way]) for each_way in (way, None))
            yield {
                "name": "step_ms",
                "algorithm": runner.config.speculative_algorithm,  # type: ignore[attr-defined]
                "shape": engine.shape.name,
                "batch": batch,
                "schema": schema,
                "drafts_follow_grammar": way,
                "accept_length": round(times[way][0].made.accept_length, 3),
                "unconstrained": round(free, 4),
                "constrained": round(own, 4),
                "ratio": round(own / free, 4),
                "time_ratio": round(least[way] / least[None], 4),
            }


class NoConstraints:
    """In place of a runner's ``Constraints``: no request has a grammar, and nothing is asked."""

    steers_drafts = False

    def any(self, slots: Sequence[int]) -> bool:
        return False

    def observe(self, slots: Sequence[int], tokens: Any, counts: Any) -> None: ...

    def release(self, slot: int) -> None: ...


def free_step_times(args: argparse.Namespace) -> Iterator[results.Line]:
    """Steps that no grammar constrains, with the runner's questions for grammars and without."""
    length = args.tokens
    engine = engine_of(args, max(args.batch_size), 64 + length)
    runner: Any = engine.runner
    asks, none = runner.constraints, NoConstraints()
    for batch in args.batch_size:
        prompts = synthetic_prompts(
            from_arguments(EngineConfig, args), engine.ready.vocab_size, batch, 64
        )
        times: dict[Any, list[float]] = {asks: [], none: []}
        for round_ in range(args.rounds + 1):
            for way in times if round_ % 2 else reversed(times):
                run = engine.start(prompts, greedy(length))
                runner.constraints = runner.step.constraints = way
                before = time.process_time()
                made = run.finish()
                spent = time.process_time() - before
                runner.constraints = runner.step.constraints = asks
                if round_:
                    times[way].append(1e3 * spent / len(made.step_seconds))
        yield {
            "name": "free_step_ms",
            "algorithm": runner.config.speculative_algorithm,
            "shape": engine.shape.name,
            "batch": batch,
            "without_questions": round(min(times[none]), 4),
            "with_questions": round(min(times[asks]), 4),
            "ratio": round(min(times[asks]) / min(times[none]), 4),
            "median_ratio": round(
                statistics.median(a / b for a, b in zip(times[asks], times[none])), 4
            ),
        }


# ── extraction ───────────────────────────────────────────────────────────────────────────────


def extraction(args: argparse.Namespace) -> Iterator[results.Line]:
    """JSON of a fixed schema from the embedded problems: tokens per second of decoding."""
    config = resolve(from_arguments(EngineConfig, args))
    questions = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, args.problems).questions
    prompts = prompt_ids(questions, load_tokenizer(config))
    params = SamplingParams(
        temperature=0.0,
        max_new_tokens=160,
        grammar=json_schema_grammar(EXTRACTION, whitespace="").text,
    )
    longest = max(map(len, prompts)) + 160
    players = [
        ("NONE", False),
        ("EAGLE", False),
        ("EAGLE", True),
        ("NGRAM", False),
        ("NGRAM", True),
    ]
    for batch in args.batch_size:
        engines = []
        for algorithm, steers in players:
            own = {"speculative_algorithm": algorithm, "speculative_draft_model_path": ""}
            engine = engine_of(args, batch, longest, **own)
            engine.runner.constraints.steers_drafts = steers  # type: ignore[attr-defined]
            engines.append(engine)
        speeds: list[list[float]] = [[] for _ in players]
        texts: list[list[list[int]]] = []
        lengths = []
        for round_ in range(args.rounds + 1):
            for i, engine in enumerate(engines):
                tokens, seconds, outputs, made = extract(engine, prompts, batch, params)
                if round_:
                    speeds[i].append(tokens / seconds)
                else:
                    texts.append(outputs)
                    lengths.append(made)
        assert all(each == texts[0] for each in texts), "texts differ"
        for text in load_tokenizer(config).decode_batch(texts[0]):
            json.loads(text)
        plain = max(speeds[0])
        for (algorithm, steers), engine, own_speeds, length in zip(
            players, engines, speeds, lengths
        ):
            yield {
                "name": "extraction_tokens_per_cpu_s",
                "algorithm": algorithm,
                "shape": engine.shape.name,
                "drafts_follow_grammar": steers,
                "batch": batch,
                "problems": len(prompts),
                "accept_length": round(length, 3),
                "value": round(max(own_speeds), 1),
                "ratio_to_plain": round(max(own_speeds) / plain, 3),
            }


def extract(
    engine: BatchEngine, prompts: list[list[int]], batch: int, params: SamplingParams
) -> tuple[int, float, list[list[int]], float]:
    """Decoded tokens, CPU seconds of the decode steps, all outputs, tokens per step."""
    tokens, seconds, outputs, lengths = 0, 0.0, [], []
    for first in range(0, len(prompts), batch):
        run = engine.start(prompts[first : first + batch], params)
        before = time.process_time()
        made: Generation = run.finish()
        seconds += time.process_time() - before
        tokens += sum(made.step_tokens)
        outputs += made.tokens
        lengths.append(made.accept_length)
    return tokens, seconds, outputs, statistics.mean(lengths)


# ── all of it ────────────────────────────────────────────────────────────────────────────────


def cpu_ms(work: Callable[..., Any], *args: Any) -> float:
    before = time.process_time()
    work(*args)
    return 1e3 * (time.process_time() - before)


def quantiles(times: Sequence[float]) -> results.Line:
    ordered = sorted(times)

    def at(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)

    mean = round(statistics.mean(times), 3)
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)}


PARTS = {
    "trees": tree_times,
    "compile": compile_times,
    "steps": step_times,
    "free": free_step_times,
    "extraction": extraction,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--trees", type=int, default=300, help="per size and vocabulary")
    parser.add_argument("--tokens", type=int, default=128, help="of an output, for step times")
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    add_arguments(parser, EngineConfig)
    args = parser.parse_args(argv)
    args.cpu_threads = args.cpu_threads or 1
    torch.set_num_threads(1)
    where = {
        "machine": facts.device_name(args.device),
        "commit": facts.commit(),
        "date": facts.today(),
    }
    for part in args.part:
        for line in PARTS[part](args):
            print(json.dumps(line), flush=True)
            results.append(args.results, [{**line, **where}])


if __name__ == "__main__":
    main()
