"""A trainer in another process sends weights in a group: they are served whole, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ports import free_ports
from rollout_rig import checkpoint, post, texts
from running_server import need_weights
from safetensors.torch import load_file
from trainer import train

from mamba_eagle import Engine, EngineError
from mamba_eagle.embedded import EMBEDDED_DRAFTERS, EMBEDDED_MODEL
from mamba_eagle.message.channel import RECEIVED_PREFIX, memory_dir

HOST = "127.0.0.1"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["safetensors.torch", "torch.distributed"])  # seconds per trainer


def call(engine: Engine, path: str, **body: Any) -> Any:
    """Raises: EngineError"""
    return engine._post(path, **body)


class Trainer:
    """One that has met an engine's ranks in a group."""

    def __init__(self, engine: Engine, folder: Path, ranks: int = 1, device: str = "cpu") -> None:
        self.engine, path = engine, folder / "model.safetensors"
        self.weights = load_file(path)
        port = free_ports(1)
        self.meeting = {"master_address": HOST, "master_port": port, "world_size": ranks + 1}
        told, self.tell = FORKS.Pipe(duplex=False)
        given = (told, HOST, port, ranks + 1, str(path), device)
        self.process = FORKS.Process(target=train, args=given, daemon=True)
        self.process.start()
        told.close()

    def join(self, **fields: Any) -> None:
        call(self.engine, "/init_weights_update_group", **self.meeting, rank_offset=1, **fields)

    def send(self, names: Sequence[str], flat: bool = False) -> dict[str, Any]:
        """Broadcasts these; what the engine is to be told of them."""
        with contextlib.suppress(BrokenPipeError):  # a trainer whose group has ended may end, too
            for together in [list(names)] if flat else [[name] for name in names]:
                self.tell.send(together)
        return self.told(names, flat)

    def told(self, names: Sequence[str], flat: bool = False) -> dict[str, Any]:
        sent = [self.weights[name] for name in names]
        return {
            "names": list(names),
            "dtypes": [str(tensor.dtype) for tensor in sent],
            "shapes": [list(tensor.shape) for tensor in sent],
            **({"load_format": "flattened_bucket"} if flat else {}),
        }

    def end(self) -> None:
        self.tell.close()
        self.process.join()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_weights(EMBEDDED_MODEL)
    return checkpoint(tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One that rounds what it is sent, as at a start."""
    settings: dict[str, Any] = {"device": "cpu", "max_running_requests": 8, "in_process": True}
    with Engine(quantization="int8", **settings) as engine:
        yield engine
    assert not received()


def version(engine: Engine) -> str:
    answer: str = post(engine, "/get_weight_version").body["weight_version"]
    return answer


def received() -> list[Path]:
    return list(Path(memory_dir()).glob(f"{RECEIVED_PREFIX}*"))


def test_weights_of_a_group_give_what_those_of_a_folder_give(engine: Engine, other: Path) -> None:
    """In one call, in parts during a pause, and all as one tensor; and the old ones come back."""
    before = texts(engine)
    engine.update_weights_from_disk(str(other))
    wanted = texts(engine)
    trains = Trainer(engine, other)
    trains.join()
    names = sorted(trains.weights)
    for flat in (False, True):
        engine.update_weights_from_disk(str(EMBEDDED_MODEL), weight_version="1")
        engine.pause_generation("in_place")
        for part in (names[::2], names[1::2]):
            call(
                engine,
                "/update_weights_from_distributed",
                **trains.send(part, flat),
                weight_version="2",
            )
        assert version(engine) == "1"  # so far
        engine.continue_generation()
        assert version(engine) == "2"
        assert texts(engine) == wanted != before
    # a part alone: the others stay as they are
    call(engine, "/update_weights_from_distributed", **trains.send(names[:3]), weight_version="3")
    assert texts(engine) == wanted
    engine.release_memory_occupation()
    engine.resume_memory_occupation()  # from what was received
    assert texts(engine) == wanted and len(received()) == 1
    call(engine, "/destroy_weights_update_group")
    engine.update_weights_from_disk(str(EMBEDDED_MODEL))
    assert texts(engine) == before and not received()
    trains.end()


def first_rank() -> psutil.Process:
    """Of an engine with processes of its own; it writes what all receive."""
    wanted = ("mamba_eagle.runner.process", "--rank 0")
    children = psutil.Process().children()
    return next(
        each for each in children if all(part in " ".join(each.cmdline()) for part in wanted)
    )


def test_ranks_take_their_parts_of_a_folder_and_of_what_a_group_sends(other: Path) -> None:
    """One that fails alone, as its disk is full, takes the others out of the group. Then all may
    meet again."""
    settings: dict[str, Any] = {"device": "cpu", "max_running_requests": 8}
    with Engine(tp_size=2, **settings) as engine:
        before = texts(engine)
        engine.update_weights_from_disk(str(other))
        wanted = texts(engine)
        assert post(engine, "/update_weights_from_disk", model_path="/nowhere").status == 400
        assert texts(engine) == wanted != before
        engine.update_weights_from_disk(str(EMBEDDED_MODEL))
        first = first_rank()
        path = "/update_weights_from_distributed"
        for limit, status, found in ((5000, 400, before), (psutil.RLIM_INFINITY, 200, wanted)):
            first.rlimit(psutil.RLIMIT_FSIZE, (limit, psutil.RLIM_INFINITY))
            trains = Trainer(engine, other, ranks=2)
            trains.join(timeout=30)
            answer = post(engine, path, **trains.send(sorted(trains.weights)))
            assert answer.status == status, answer.body
            assert texts(engine) == found
            trains.end()
    assert not received()  # what was served until the end goes with its processes


def test_what_one_rank_alone_finds_is_what_a_caller_hears(other: Path) -> None:
    """Its disk is full before the checkpoint is whole; another rank answers, and sees no more than
    half of one."""
    with Engine(pp_size=2, device="cpu", max_running_requests=8) as engine:
        trains = Trainer(engine, other, ranks=2)
        trains.join()
        smallest = min(trains.weights, key=lambda name: trains.weights[name].nbytes)
        first_rank().rlimit(psutil.RLIMIT_FSIZE, (4000, psutil.RLIM_INFINITY))
        with pytest.raises(EngineError, match="what was received: .*File too large"):
            call(engine, "/update_weights_from_distributed", **trains.send([smallest]))
        trains.end()
    assert not received()


@pytest.mark.gpu
def test_weights_come_from_another_gpu(other: Path) -> None:
    """By NCCL, and take the places of the old ones in captured steps."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_running_requests": 8}
    with Engine(speculative_algorithm="NONE", exact=True, **settings) as engine:
        before = texts(engine)
        engine.update_weights_from_disk(str(other))
        wanted = texts(engine)
        engine.update_weights_from_disk(str(EMBEDDED_MODEL))
        trains = Trainer(engine, other, device="cuda:1")
        trains.join(timeout=60)
        for flat in (False, True):
            sent = trains.send(sorted(trains.weights), flat)
            call(engine, "/update_weights_from_distributed", **sent)
            assert texts(engine) == wanted != before
            engine.update_weights_from_disk(str(EMBEDDED_MODEL))
            assert texts(engine) == before
        # NCCL's side of the trainer ends once the engine's has
        call(engine, "/destroy_weights_update_group")
        trains.end()
    assert not received()


def test_vllms_calls_update_the_model_and_its_drafter_apart(engine: Engine, other: Path) -> None:
    before = texts(engine)
    head = checkpoint(other.parent / "head", like=EMBEDDED_DRAFTERS["EAGLE"])
    for path, folder in (("/start_draft_weight_update", head), ("/start_weight_update", other)):
        trains = Trainer(engine, folder)
        answer = post(engine, "/init_weight_transfer_engine", init_info=trains.meeting)
        assert answer.status == 200
        assert post(engine, path).status == 200
        names = sorted(trains.weights)
        for part, packed in ((names[:2], True), (names[2:], False)):
            sent = trains.send(part, packed)
            info = {"names": part, "dtype_names": sent["dtypes"], "shapes": sent["shapes"]}
            info |= {"packed": packed, "packed_num_buffers": 2}
            assert post(engine, "/update_weights", update_info=info).status == 200
            assert version(engine) == ("default" if folder == head else "head")
        finished = post(engine, "/finish_weight_update", weight_version=folder.name)
        assert finished.body["weight_version"] == folder.name == version(engine)
        assert (texts(engine) == before) == (folder == head)
        assert post(engine, "/destroy_weights_update_group").status == 200
        trains.end()


WRONG = [("names", "model.nothing", "unexpected"), ("shapes", [3, 5], "shape of")]
WRONG += [("dtypes", "int8", "dtype of"), ("dtypes", "float12", "torch has no")]


def test_a_wrong_tensor_ends_its_update_and_group_and_changes_nothing(
    engine: Engine, other: Path
) -> None:
    """Also what came before it, and what comes after it."""
    before = texts(engine)
    for field, value, says in WRONG:
        trains = Trainer(engine, other)
        trains.join()
        names = sorted(trains.weights)
        engine.pause_generation("retract")
        call(engine, "/update_weights_from_distributed", **trains.send(names[:2]))
        wrong = trains.send(names[2:4])
        wrong[field][1] = value
        with pytest.raises(EngineError, match=says):
            call(engine, "/update_weights_from_distributed", **wrong)
        with pytest.raises(EngineError, match="another part of this update"):
            call(engine, "/update_weights_from_distributed", **trains.send(names[4:5]))
        engine.continue_generation()
        assert version(engine) == "default" and not received()
        with pytest.raises(EngineError, match="was not joined, or has failed"):
            call(engine, "/update_weights_from_distributed", **trains.send(names[:2]))
        trains.process.join(60)
        assert trains.process.exitcode, "its broadcast fails instead of waiting"
    assert texts(engine) == before


def test_an_update_that_is_refused_takes_no_other_with_it(engine: Engine, other: Path) -> None:
    """Where no pause joins calls each is an update of its own; a part that comes after another one
    was refused is refused as well, and leaves nothing."""
    before, path = texts(engine), "/update_weights_from_distributed"
    trains = Trainer(engine, other)
    trains.join()
    names = sorted(trains.weights)
    answers: list[Any] = []

    def refusal(path: str, **body: Any) -> str:
        message: str = post(engine, path, **body).body["error"]["message"]
        return message

    def work() -> None:
        answers.append(post(engine, path, **trains.told(names)))

    for pauses in (True, False):
        if pauses:
            engine.pause_generation("in_place")
        taking = threading.Thread(target=work)
        taking.start()
        while "is busy" not in refusal("/init_weights_update_group", **trains.meeting):
            pass  # until the engine has begun to receive
        wrong = {"group_name": "nobody's", "weight_version": "refused"}
        assert "was not joined" in refusal(path, **trains.told(names), **wrong)
        trains.send(names)
        taking.join()
        if pauses:
            assert "another part" in answers.pop().body["error"]["message"] and not received()
            engine.continue_generation()
            assert texts(engine) == before
    assert answers[0].status == 200 and texts(engine) != before and version(engine) == "default"
    trains.end()


def test_an_update_that_is_started_again_has_nothing_of_before(engine: Engine, other: Path) -> None:
    """A trainer that was ended half-way starts again; one that was refused is not finished."""
    trains = Trainer(engine, other)
    trains.join()
    first, *rest = sorted(trains.weights)

    def part(*names: str) -> int:
        sent = trains.send(names)
        told = {"names": names, "dtype_names": sent["dtypes"], "shapes": sent["shapes"]}
        status: int = post(engine, "/update_weights", update_info=told).status
        return status

    assert part(first) == 200  # alone
    wanted = texts(engine)
    engine.update_weights_from_disk(str(EMBEDDED_MODEL))
    for names in (rest, [first]):
        call(engine, "/start_weight_update")
        assert part(*names) == 200 and len(received()) == 1
    call(engine, "/finish_weight_update")
    assert texts(engine) == wanted
    call(engine, "/start_weight_update")
    assert part(first) == 200
    wrong = {"names": ["nothing"], "dtype_names": ["float32"], "shapes": [[1]]}
    for path, body in (("/update_weights", {"update_info": wrong}), ("/finish_weight_update", {})):
        with pytest.raises(EngineError, match="unexpected"):
            call(engine, path, **body)
    assert texts(engine) == wanted
    trains.end()


def test_a_part_that_comes_while_a_model_changes_is_served_or_gone(
    engine: Engine, other: Path
) -> None:
    """As a pause ends, it is not held for the next one; beside another change, it is refused."""
    trains = Trainer(engine, other)
    trains.join()
    names, path = sorted(trains.weights), "/update_weights_from_distributed"

    def goes_on() -> None:
        while post(engine, "/continue_generation").status != 200:
            pass  # a part is being received

    engine.pause_generation("in_place")
    call(engine, path, **trains.send(names[:1]), weight_version="first")
    going = threading.Thread(target=goes_on)
    going.start()
    while not any(received()[0].glob("*.json")):
        pass  # until the first is being loaded
    call(engine, path, **trains.send(names), weight_version="second")
    going.join()
    assert version(engine) == "second" and len(received()) == 1
    engine.pause_generation("in_place")
    call(engine, path, **trains.send(names[:1]))

    async def both() -> list[int]:
        disk = engine.async_post("/update_weights_from_disk", {"model_path": str(other)})
        answers = await asyncio.gather(disk, engine.async_post("/continue_generation", {}))
        return [answer.status for answer in answers]

    disk, group = asyncio.run(both())
    assert {disk, group} == {200, 400} and len(received()) == (group == 200)
    engine.continue_generation()
    trains.end()


MEETINGS = [("master_address", ""), ("rank_offset", 2), ("backend", "nccl")]


def test_a_group_that_cannot_form_is_refused_at_once(engine: Engine) -> None:
    for field, value in MEETINGS:
        meeting = {"master_address": HOST, "master_port": 1, "world_size": 2, field: value}
        answer = post(engine, "/init_weights_update_group", **meeting)
        assert answer.status == 400 and answer.body["error"]["param"] == field


def test_a_group_that_never_forms_and_a_trainer_that_goes_hold_up_nobody(
    engine: Engine, other: Path
) -> None:
    before = texts(engine)
    alone = {"master_address": HOST, "master_port": free_ports(1), "world_size": 2}
    failures: list[str] = []

    def fails(path: str, **body: Any) -> threading.Thread:
        def work() -> None:
            with pytest.raises(EngineError) as error:
                call(engine, path, **body)
            failures.append(str(error.value))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    joining = fails("/init_weights_update_group", **alone, timeout=1)
    assert texts(engine) == before
    joining.join()
    assert "did not meet" in failures[0] and "1 s" in failures[0]
    trains = Trainer(engine, other)
    trains.join()
    engine.pause_generation("in_place")
    first, second = sorted(trains.weights)[:2]
    sent = trains.send([first])  # of two that are announced
    both = {
        "names": [first, second],
        "dtypes": [*sent["dtypes"], str(trains.weights[second].dtype)],
        "shapes": [*sent["shapes"], list(trains.weights[second].shape)],
    }
    taking = fails("/update_weights_from_distributed", **both)
    incoming = engine._app.state.server.incoming
    while not incoming.receiving:  # a call after the pause is another update
        time.sleep(0.01)
    with pytest.raises(EngineError, match="still being received"):
        engine.continue_generation()
    trains.process.kill()
    taking.join()
    engine.continue_generation()
    assert len(failures) == 2 and texts(engine) == before and not received()
