"""A model-runner process: receives plans, executes them in order, sends results.

With --tp-size and --pp-size there are several, the ranks. All get the same plans and execute them
together; one alone sends the results.
"""

import gc
import os
import sys

import zmq

from mamba_eagle import logs
from mamba_eagle.config import ConfigError
from mamba_eagle.message.lifetime import REFUSED, begin, end_in_order, ignore_end_signal


def main() -> None:
    """Loads the model, reports what fits, then executes plans until it is to stop."""
    # Set before torch is imported: OpenMP threads that spin while they wait take the core that
    # the server process needs (8 s instead of 0.2 s per request, measured on two busy cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    config, socket_dir, rank = begin("runner")
    # after the signals are set: torch takes a second, a tenth of it in looking for garbage
    gc.disable()
    from mamba_eagle.runner.start import start_rank
    from mamba_eagle.runner.worker import Worker

    gc.freeze()
    gc.enable()
    try:
        worker = Worker(start_rank(config, rank, socket_dir), zmq.Context(), socket_dir, rank)
    except ConfigError as error:
        logs.complain(f"error: {error}")
        sys.exit(REFUSED)
    end_in_order()
    worker.pulse.start()
    try:
        worker.serve()
    except ConfigError as error:
        logs.complain(f"error: {error}")
        sys.exit(1)
    ignore_end_signal()  # before pools and sockets are destroyed, as this returns
    worker.close()


if __name__ == "__main__":
    main()
