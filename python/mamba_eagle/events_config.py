"""--kv-events-config: where KV events are published."""

import msgspec

from mamba_eagle.core import shown

BLOCK = 16  # tokens of a block
SCHEMES = ("tcp://", "ipc://", "inproc://")


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names are vLLM's. Both addresses are bound, on this machine unless they say otherwise."""

    publisher: str = "zmq"  # or "null"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = "tcp://127.0.0.1:5558"  # "": no replay
    buffer_steps: int = 10_000  # batches that can be replayed
    hwm: int = 100_000  # messages that wait for a slow subscriber; more are dropped
    max_queue_size: int = 100_000  # batches that wait to be sent
    topic: str = ""
    enable_kv_cache_events: bool = True

    def problems(self) -> list[str]:
        wrong = []
        if self.publisher not in ("zmq", "null"):
            wrong.append(f"publisher {shown(self.publisher)}: must be zmq or null")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if (value or name == "endpoint") and not value.startswith(SCHEMES):
                wrong.append(
                    f"{name} {shown(value)}: must be an address to bind, as tcp://127.0.0.1:5557 is"
                )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                wrong.append(f"{name} {getattr(self, name)}: must be 1 or more")
        return wrong


def read_events_config(text: str) -> EventsConfig | None:
    """None if nothing is to be published.

    Raises: ValueError with a text that names the flag; it may have several lines.
    """
    if not text:
        return None
    try:
        config = msgspec.json.decode(text, type=EventsConfig)
    except msgspec.DecodeError as error:
        known = ", ".join(EventsConfig.__struct_fields__)
        message = f"{shown(text)}: {error}; give a JSON object with any of {known}"
        raise ValueError(f"--kv-events-config {message}") from None
    if wrong := config.problems():
        raise ValueError("\n".join(f"--kv-events-config: {each}" for each in wrong))
    return config if config.publisher == "zmq" and config.enable_kv_cache_events else None
