"""The training scripts run, and what they save is what they trained: small, on the CPU."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mamba2_math import loop, pretrain, skills
from mamba2_math.checkpoint import MODEL_CONFIG, load_weights
from mamba2_math.data import ProblemEncoder, Sequences, SequenceStream, make_block
from mamba2_math.draft import document
from mamba2_math.evaluate import Question, exact_match, greedy, last_integer, make_questions
from mamba2_math.problems import generate, held_out
from mamba2_math.skills.chat import READ, SKIPPED, WRITTEN, pieces
from mamba2_math.tokenizer import EOS_ID, VOCAB_SIZE, save_tokenizer, train_tokenizer
from mamba2_math.training_context import TrainingContext
from mamba_eagle.embedded import EMBEDDED_DRAFTERS, EMBEDDED_MODEL
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.nemotron_h import NemotronHForCausalLM
from mamba_eagle.models.registry import parse_config, read_model_config
from mamba_eagle.train.heads.base import initialize
from mamba_eagle.train.trainer import make_optimizer

LENGTH = 96
SMALL = ["--batch-rows", "2", "--length", str(LENGTH), "--workers", "1", "--device", "cpu"]
OFTEN = ["--log-every", "1", "--eval-seconds", "0", "--save-seconds", "0", "--eval-count", "2"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = (document(**problem) for problem in generate(0, 4000))
    save_tokenizer(train_tokenizer(texts, vocab_size=1024), folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Three training steps."""
    output = tmp_path_factory.mktemp("model")
    arguments = ["--output", str(output), "--steps", "3", "--final-count", "0", *SMALL, *OFTEN]
    pretrain.main([*arguments, "--tokenizer", str(tokenizer_folder)])
    return output


def load(folder: Path) -> NemotronHForCausalLM:
    model = NemotronHForCausalLM(read_model_config(folder)).float()
    load_weights(model, folder)
    return model


# --- tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["fresh", "shipped"])
def test_tokenizer_round_trips_any_text(folder: str, tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    path = tokenizer_folder if folder == "fresh" else EMBEDDED_MODEL
    tokenizer = AutoTokenizer.from_pretrained(path)
    if folder == "shipped":
        assert len(tokenizer) == VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for text in ["Question: 1234 + 5?", " é 漢字 🙂\t\n\n x  y ", "Hello , it 's <<2*3=6>>6", ""]:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert not {0, 1, 2} & set(ids)
    assert len(tokenizer("7315").input_ids) == 4  # one token a digit


def test_chat_template_is_the_prompt_form(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    turns = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == f"{document('q1', 'a1')}\n\nQuestion: q2\nAnswer:"
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(EMBEDDED_MODEL).chat_template
    for skill in skills.SKILLS:
        for chat in skills.held_out(skill):
            text = tokenizer.apply_chat_template(
                [*chat.messages], tools=[*chat.tools], tokenize=False
            )
            assert text == "".join(piece.text for piece in pieces(chat))


# --- data ----------------------------------------------------------------------------------------


def test_pieces_join_to_the_tokens_of_the_whole_text(tokenizer_folder: Path) -> None:
    encoder = ProblemEncoder(tokenizer_folder)
    texts = [(p["question"], p["answer"]) for p in generate(1, 40)]
    encoded = encoder.encode(texts)
    for (first, second), pair in zip(pairwise(texts), pairwise(encoded)):
        whole = document(*first) + "\n\n" + document(*second)
        joined = [*pair[0].prompt, *pair[0].answer, *encoder.blank_line]
        joined += [*pair[1].prompt, *pair[1].answer]
        assert encoder._tokenizer.encode(whole).ids == joined


def test_sequences_begin_with_a_document_and_mark_answers(tokenizer_folder: Path) -> None:
    encoder = ProblemEncoder(tokenizer_folder)
    sequences = make_block(encoder, seed=3, index=0, length=512, count=16)
    assert sequences.tokens.shape == sequences.kinds.shape == (16, 512)
    starts = ("Question: ", "Tools: ", *skills.SYSTEMS)
    for tokens, kinds in zip(sequences.tokens.tolist(), sequences.kinds.tolist()):
        assert encoder.decode(tokens).startswith(starts)
        assert all(kinds[t] == WRITTEN for t, token in enumerate(tokens) if token == EOS_ID)
    parts = {READ: "", WRITTEN: "", SKIPPED: ""}
    for kind in parts:
        chosen = sequences.tokens[sequences.kinds == kind].tolist()
        parts[kind] = encoder.decode(chosen)
    assert "####" in parts[WRITTEN] and "<tool_call>" in parts[WRITTEN]
    assert "Question" not in parts[WRITTEN] and "<tool_response>" not in parts[WRITTEN]
    assert "<tool_response>" in parts[SKIPPED] and "####" not in parts[SKIPPED]


def test_tokens_that_others_write_have_no_weight() -> None:
    kinds = np.array([[READ, WRITTEN, SKIPPED]], dtype=np.uint8)
    _, weights = pretrain.to_device(Sequences(kinds.astype(np.uint16), kinds), "cpu")
    assert weights.tolist() == [[pytest.approx(0.2), 1.0, 0.0]]


def test_sequence_stream_does_not_depend_on_the_number_of_workers(tokenizer_folder: Path) -> None:
    batches: list[Sequences] = []
    for workers in (1, 2):
        stream = SequenceStream(tokenizer_folder, 0, 64, workers, per_block=4)
        try:
            parts = [stream.batch(3) for _ in range(4)]
        finally:
            stream.close()
        batches.append(Sequences(*map(np.concatenate, zip(*parts))))
    np.testing.assert_array_equal(batches[0].tokens, batches[1].tokens)
    np.testing.assert_array_equal(batches[0].kinds, batches[1].kinds)


def test_sequence_stream_ends_when_the_parent_ignores_sigterm(tokenizer_folder: Path) -> None:
    """A handler inherited by the workers once kept close() waiting for them for ever."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        stream = SequenceStream(tokenizer_folder, 0, 64, workers=1, per_block=2)
        stream.batch(2)
        stream.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(process.is_alive() for process in stream._processes)


# --- the model -----------------------------------------------------------------------------------


def test_training_context_equals_full_sequence_context() -> None:
    model = NemotronHForCausalLM(parse_config(MODEL_CONFIG)).float()
    initialize(model, seed=0)
    tokens = torch.randint(3, VOCAB_SIZE, (2 * 80,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens, FullSequenceContext(2, 80))
        torch.testing.assert_close(
            model(tokens, TrainingContext(2, 80)), expected, atol=1e-4, rtol=1e-4
        )


def test_initialization_is_complete_and_deterministic() -> None:
    config = parse_config(MODEL_CONFIG)
    models = [NemotronHForCausalLM(config).float() for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        initialize(model, seed=1)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        assert torch.isfinite(a).all(), name
        assert torch.equal(a, b), name
    assert sum(p.numel() for p in models[0].parameters()) == pytest.approx(5.8e6, rel=0.01)


def test_a_few_steps_on_one_batch_lower_the_loss(tokenizer_folder: Path) -> None:
    model = NemotronHForCausalLM(parse_config(MODEL_CONFIG)).float()
    initialize(model, seed=0)
    optimizer = make_optimizer(model, 1e-3)
    sequences = make_block(ProblemEncoder(tokenizer_folder), 0, 0, LENGTH, 2)
    losses = []
    for _ in range(5):
        loss = pretrain.language_loss(model, *pretrain.to_device(sequences, "cpu"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(VOCAB_SIZE), abs=0.5)
    assert losses[-1] < losses[0] - 1


def test_saved_model_gives_equal_logits_in_transformers(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "\n\n".join(document(p.question, p.answer) for p in held_out()[:2])
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :150]  # more than two chunks
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ours = load(checkpoint)
    with torch.no_grad():
        expected = theirs(ids, logits_to_keep=0).logits[0]
        hidden = ours(ids[0], FullSequenceContext(1, ids.shape[1]))
        torch.testing.assert_close(ours.compute_logits(hidden), expected, atol=1e-4, rtol=1e-4)
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["hybrid_override_pattern"] == "M-M*M-M-M*M-"
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_exact_match_is_greedy_text_equal_to_the_reference(
    checkpoint: Path, tokenizer_folder: Path
) -> None:
    model = load(checkpoint)
    encoder = ProblemEncoder(tokenizer_folder)
    asked = make_questions(held_out()[:2], encoder)
    written = greedy(model, asked, max_tokens=5)
    own = [Question(q.prompt, answer) for q, answer in zip(asked, written)]
    assert exact_match(model, own) == 1.0
    assert exact_match(model, [own[0]._replace(answer=[*own[0].answer[:-1], 7])]) == 0.0


def test_last_integer_reads_a_worked_answer() -> None:
    assert last_integer("so 3 * 4 = <<3*4=12>>12 left.\n#### 1,012") == "1012"
    assert last_integer("none") is None


def test_transformers_can_initialize_from_the_config(checkpoint: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_pretraining_with_a_config_gives_the_drafter_of_that_config(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Of the embedded STANDALONE drafter's, for one step."""
    folder = EMBEDDED_DRAFTERS["STANDALONE"]
    arguments = ["--output", str(tmp_path), "--config", str(folder / "config.json"), *SMALL]
    arguments += ["--tokenizer", str(tokenizer_folder), "--steps", "1", "--final-count", "0"]
    pretrain.main(arguments)
    config = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text()) == config
    shapes = [
        {name: weight.shape for name, weight in load_file(path / "model.safetensors").items()}
        for path in (tmp_path, folder)
    ]
    assert shapes[0] == shapes[1]


def test_learning_rate_rises_then_falls_to_almost_nothing() -> None:
    rates = [loop.learning_rate(1.0, fraction / 100) for fraction in range(101)]
    peak = rates.index(max(rates))
    assert peak == 2 and rates[:3] == sorted(rates[:3])
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] <= 0.01


def test_rescue_returns_to_the_last_good_weights() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    rescue = loop.Rescue(model)
    good = model.weight.detach().clone()
    model.weight.data.fill_(float("nan"))
    assert not rescue.restore_if_broken(1.0, optimizer)
    assert rescue.restore_if_broken(float("nan"), optimizer)
    assert torch.equal(model.weight, good) and rescue.lr_scale == 0.5
