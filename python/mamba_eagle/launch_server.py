"""``python -m mamba_eagle.launch_server``: the server, with SGLang's flags where both have them."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from mamba_eagle import logs
from mamba_eagle.config import ConfigError, Parser, ServerConfig, add_arguments, from_arguments
from mamba_eagle.config_file import add_config_flag, with_config_file
from mamba_eagle.torchless import hide_torch, show_torch


def _stop_before_start(number: int, frame: FrameType | None) -> None:
    # Nothing has been started, and an import may be under way: exit without a traceback.
    os._exit(0)


def make_parser() -> Parser:
    parser = Parser(usage="%(prog)s [-h] [options]", description="Serve a model over HTTP.")
    add_config_flag(parser)
    add_arguments(parser, ServerConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is stopped. Returns the exit code."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a closed standard stream's number would be a socket's, which libuv refuses
    os.close(opened)
    parser = make_parser()
    try:
        arguments = with_config_file(sys.argv[1:] if argv is None else argv, ServerConfig)
    except ConfigError as error:
        return _report(error)
    config: ServerConfig = from_arguments(ServerConfig, parser.parse_args(arguments))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_before_start)
    hide_torch()
    from mamba_eagle.server.serve import launch  # slow to import: --help does not wait for it

    try:
        code = launch(config)
    except ConfigError as error:
        show_torch()  # for a caller of this as a function
        return _report(error)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one that was closed before is None
        with contextlib.suppress(OSError):  # no one reads it any more
            stream.flush()
    # Everything is closed. Threads may still be importing, which must not delay the exit.
    os._exit(code)


def _report(error: ConfigError) -> int:
    for problem in error.problems:
        logs.complain(problem)
    return 2


if __name__ == "__main__":
    sys.exit(main())
