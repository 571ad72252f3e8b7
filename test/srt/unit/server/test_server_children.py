"""What the server passes on of its processes' standard error, and keeps of it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from mamba_eagle.server.engine.children import Child, end_children

WAIT_SECONDS = 120.0  # only what hangs takes so long


def test_a_progress_bar_is_passed_on_while_it_grows(capsys: pytest.CaptureFixture[str]) -> None:
    """It ends no line; the half of a letter that a read may end with is kept for the next."""
    write = "sys.stderr.buffer.write({}); sys.stderr.flush(); time.sleep(0.2)"
    parts = [b"\rloading 10%", b"\rloading \xc3", b"\xbc 20%"]
    code = "import sys, time; " + "; ".join(write.format(part) for part in parts)

    async def watch() -> str:
        seen = ""
        while "20%" not in seen:
            await asyncio.sleep(0.01)
            seen += capsys.readouterr().err
        return seen

    async def run() -> str:
        child = Child("runner", [sys.executable, "-c", f"{code}; time.sleep(60)"], lambda _: None)
        try:
            return await asyncio.wait_for(watch(), WAIT_SECONDS)
        finally:
            end_children([child])

    assert asyncio.run(run()) == "\rloading 10%\rloading ü 20%"


@pytest.mark.parametrize("end", ["", "\n"], ids=["unfinished", "finished"])
def test_the_last_line_is_named_with_the_exit_code(end: str) -> None:
    code = f"import sys; sys.stderr.write('loading 1%\\rloading 2%\\nerror: no\\n  such' + {end!r})"

    async def run() -> str:
        ended: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        command = [sys.executable, "-c", f"{code}; sys.exit(3)"]
        child = Child("runner", command, ended.set_result)
        assert await asyncio.wait_for(ended, WAIT_SECONDS) is child
        assert list(child.last_words) == ["loading 1%", "loading 2%", "error: no", "  such"]
        return child.how_it_ended()

    said = asyncio.run(run())
    assert said.startswith("the runner process (pid ") and "ended with exit code 3:" in said
    assert said.endswith("such")


def test_what_was_said_need_not_be_said_again() -> None:
    async def run() -> list[str]:
        ended: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        Child("runner", [sys.executable, "-c", "exit('error: no')"], ended.set_result)
        child = await asyncio.wait_for(ended, WAIT_SECONDS)
        return [child.how_it_ended(), child.how_it_ended(quotes=False)]

    whole, short = asyncio.run(run())
    assert whole == f"{short}: error: no"
