"""A process that compiles: a build per line of standard input, an answer per line of output.

    python -m mamba_eagle.backend.triton.builder

Not of multiprocessing, whose processes would run the parent's main script once more.
"""

import json
import os
import signal
import sys

import torch

from mamba_eagle.backend.triton.builds import Build, compile_build
from mamba_eagle.message.lifetime import die_with_parent


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        module, name, data, target = json.loads(line)
        try:
            compile_build(Build(module, name, data, tuple(target)))
            problem = ""
        except Exception as error:  # the launch that needs the kernel raises it again
            problem = f"{name}: {error!r}"
        print(json.dumps(problem), file=answers, flush=True)


if __name__ == "__main__":
    main()
