"""Parts that training loops share."""

from __future__ import annotations

import os
import signal

import pytest

from mamba_eagle.train.trainer import stop_on_signals


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_and_nothing_else(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.received
        os.kill(os.getpid(), number)
        assert stop.received
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) == before
