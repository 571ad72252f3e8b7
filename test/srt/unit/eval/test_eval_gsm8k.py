"""GSM8K prompts and answers, and the lines the evaluation prints, against a scripted server."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mamba_eagle.bench import results
from mamba_eagle.eval import few_shot_gsm8k, gsm8k


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5 + 4 = <<5+4=9>>9 apples.\n#### 9", 9),
        ("It costs $1,234,567.", 1234567),
        ("between 3 and 4", 4),
        ("exactly 2.50", 50),  # as in SGLang's script: the last run of digits
        ("007", 7),
        ("no number", None),
        ("", None),
        ("1" * 5000, None),
    ],
)
def test_answer_is_the_last_integer(text: str, value: int | None) -> None:
    assert gsm8k.answer_value(text) == value


def test_every_embedded_problem_has_an_answer() -> None:
    problems = gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS)
    assert len(problems) == 200
    for problem in problems:
        assert problem.answer.endswith(f"#### {gsm8k.answer_value(problem.answer)}")


def test_prompt_form() -> None:
    shots = [gsm8k.Example("1 + 1?", "#### 2"), gsm8k.Example("2 + 2?", "#### 4")]
    assert gsm8k.make_prompt(shots, "3 + 3?") == (
        "Question: 1 + 1?\nAnswer: #### 2\n\n"
        "Question: 2 + 2?\nAnswer: #### 4\n\n"
        "Question: 3 + 3?\nAnswer:"
    )
    assert gsm8k.make_prompt([], "3 + 3?") == "Question: 3 + 3?\nAnswer:"


def write_problems(path, count: int):
    path.write_text(
        "".join(
            json.dumps({"question": f"What is {i}?", "answer": f"#### {i}"}) + "\n"
            for i in range(count)
        )
    )
    return path


def test_no_question_is_also_a_shot(tmp_path) -> None:
    path = write_problems(tmp_path / "test.jsonl", 10)
    task = gsm8k.load_task(path, num_shots=3, num_questions=200)
    assert [shot.answer for shot in task.shots] == ["#### 0", "#### 1", "#### 2"]
    assert [question.answer for question in task.questions] == [f"#### {i}" for i in range(3, 10)]
    embedded = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 5, 200)
    assert not set(embedded.shots) & set(embedded.questions)


def test_zero_shots_asks_every_line(tmp_path) -> None:
    task = gsm8k.load_task(write_problems(tmp_path / "test.jsonl", 4), 0, 200)
    assert task.shots == [] and len(task.questions) == 4
    assert len(gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, 200).questions) == 200


def test_bad_files_are_refused_with_the_reason(tmp_path) -> None:
    with pytest.raises(ValueError, match="--num-shots 4: .* has 4 problems"):
        gsm8k.load_task(write_problems(tmp_path / "short.jsonl", 4), 4, 200)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "?", "answer": "1"}\n\n{"question": "?"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3"):
        gsm8k.read_examples(bad)
    bad.write_text('{"question": "?", "answer": 1}')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: .*both are texts"):
        gsm8k.read_examples(bad)


def test_a_line_ends_where_one_of_json_ends(tmp_path) -> None:
    example = gsm8k.Example("Two\u2028lines\x85?", "#### 2")
    results.write(tmp_path / "lines.jsonl", [example._asdict()] * 2)
    assert gsm8k.read_examples(tmp_path / "lines.jsonl") == [example] * 2
    assert results.read(tmp_path / "lines.jsonl") == [example._asdict()] * 2


@pytest.fixture
def scripted_server() -> Iterator[ThreadingHTTPServer]:
    """Answers "What is N?" with N, but for N = 5 with 6 and for N = 7 without a number."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            if server.refuse:
                self.reply(400, {"error": {"message": "text: too long"}})
                return
            number = re.findall(r"What is (\d+)\?", body["text"])[-1]
            text = {"5": " #### 6", "7": " none"}.get(number, f" #### {number}")
            meta = {"completion_tokens": 12, **server.extra_meta}
            self.reply(200, {"text": text, "meta_info": meta})

        def reply(self, status: int, value: dict) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.refuse, server.extra_meta = [], False, {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_output_lines_and_saved_texts(scripted_server, tmp_path, capsys) -> None:
    scripted_server.extra_meta = {"spec_verify_ct": 4}
    data = write_problems(tmp_path / "test.jsonl", 10)
    saved = tmp_path / "texts.jsonl"
    few_shot_gsm8k.main(
        f"--port {scripted_server.server_port} --num-shots 2 --data-path {data} "
        f"--save-texts {saved} --parallel 3 --max-new-tokens 40".split()
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Accuracy: 0.750"  # 8 questions, two wrong
    assert lines[1] == "Invalid: 0.125"
    assert re.fullmatch(r"Latency: \d+\.\d{3} s", lines[2])
    assert re.fullmatch(r"Output throughput: \d+\.\d{3} token/s", lines[3])
    assert lines[4] == "Acceptance length: 3.000 token/step"
    assert len(scripted_server.bodies) == 8
    for body in scripted_server.bodies:
        assert body["sampling_params"] == {
            "temperature": 0.0,
            "max_new_tokens": 40,
            "stop": ["Question", "Assistant:", "<|separator|>"],
        }
    records = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [record["label"] for record in records] == list(range(2, 10))  # in question order
    assert [record["value"] for record in records] == [2, 3, 4, 6, 6, None, 8, 9]


def test_the_score_is_printed_where_the_texts_cannot_be_saved(
    scripted_server, tmp_path, capsys
) -> None:
    data = write_problems(tmp_path / "test.jsonl", 4)
    with pytest.raises(SystemExit, match="Is a directory"):
        few_shot_gsm8k.main(
            f"--port {scripted_server.server_port} --num-shots 0 --data-path {data} "
            f"--save-texts {tmp_path}".split()
        )
    assert capsys.readouterr().out.startswith("Accuracy: 1.000")


def test_what_is_written_to_stays_a_link_or_a_device(tmp_path) -> None:
    link = tmp_path / "stdout"
    link.symlink_to(tmp_path / "file")
    results.write(link, [{"a": 1}])
    assert link.is_symlink() and results.read(tmp_path / "file") == [{"a": 1}]


def test_without_speculation_no_acceptance_is_printed(scripted_server, tmp_path, capsys) -> None:
    data = write_problems(tmp_path / "test.jsonl", 4)
    few_shot_gsm8k.main(
        f"--port {scripted_server.server_port} --num-shots 0 --data-path {data}".split()
    )
    assert "Acceptance" not in capsys.readouterr().out


def test_server_errors_end_the_run(scripted_server, tmp_path) -> None:
    data = write_problems(tmp_path / "test.jsonl", 4)
    flags = f"--num-shots 0 --data-path {data} --port".split()
    scripted_server.refuse = True
    with pytest.raises(SystemExit, match="answered 400: .*too long"):
        few_shot_gsm8k.main([*flags, str(scripted_server.server_port)])
    with pytest.raises(SystemExit, match="no answer from http://127.0.0.1:1"):
        few_shot_gsm8k.main([*flags, "1"])


def test_numbers_that_cannot_be_meant_are_refused(tmp_path, capsys) -> None:
    data = str(write_problems(tmp_path / "test.jsonl", 4))
    for flag in ("--parallel", "--num-questions"):
        for value in ("0", "-1"):
            with pytest.raises(SystemExit):
                few_shot_gsm8k.main(["--data-path", data, flag, value])
            assert f"{flag}: {value}: must be 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--num-shots -1: must be 0 or more"):
        few_shot_gsm8k.main(["--data-path", data, "--num-shots", "-1"])
