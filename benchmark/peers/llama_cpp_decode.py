"""Measurements of llama.cpp, by the Python of an environment that has llama-cpp-python and nothing
of ours: for each shape prompts one after the other, then decode steps of the whole batch with
random tokens, no sampling. Prints one JSON object; called by benchmark/cpu_vs_llama.py.

    python llama_cpp_decode.py GGUF THREADS STEPS BATCH:INPUT_LEN...
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from typing import Any

UBATCH = 512  # llama.cpp's default
MARGIN = 8  # KV slots per sequence beyond those that are used


class Model:
    def __init__(self, path: str, threads: int, sequences: int, tokens: int, prompt: int) -> None:
        """Room for so many sequences, for tokens of all of them together, and for a prompt."""
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        begin = time.perf_counter()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = tokens
        context.n_batch = max(UBATCH, prompt)
        context.n_ubatch = UBATCH
        context.n_seq_max = sequences
        context.n_threads = context.n_threads_batch = threads
        context.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.load_seconds = time.perf_counter() - begin
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.room = llama_cpp.llama_batch_init(max(UBATCH, prompt), 0, 1)
        self.random = random.Random(0)

    def step(self, items: list[tuple[int, int, bool]]) -> float:
        """items: position, sequence, whether its logits are wanted. Returns seconds."""
        room = self.room
        room.n_tokens = len(items)
        for i, (position, sequence, wanted) in enumerate(items):
            room.token[i] = self.random.randrange(self.vocab_size)
            room.pos[i], room.n_seq_id[i] = position, 1
            room.seq_id[i][0], room.logits[i] = sequence, wanted
        begin = time.perf_counter()
        if (code := self.lib.llama_decode(self.context, room)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        self.lib.llama_synchronize(self.context)
        return time.perf_counter() - begin

    def run(self, batch: int, input_len: int, steps: int) -> dict[str, list[float]]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        last, sequences = input_len - 1, range(batch)
        prompts = [self.step([(i, s, i == last) for i in range(input_len)]) for s in sequences]
        decode = [self.step([(input_len + k, s, True) for s in sequences]) for k in range(steps)]
        return {"prompt_seconds": prompts, "step_seconds": decode}


def main() -> None:
    path, threads, steps, *given = sys.argv[1:]
    shapes = [(int(batch), int(length)) for batch, length in (each.split(":") for each in given)]
    sequences = max(batch for batch, _ in shapes)
    tokens = max(batch * (length + int(steps) + MARGIN) for batch, length in shapes)
    longest = max(length for _, length in shapes)
    model = Model(path, int(threads), sequences, tokens, longest)
    made: dict[str, Any] = {"load_seconds": model.load_seconds, "shapes": []}
    for shape in shapes:
        model.run(*shape, 2)  # warm-up
        made["shapes"].append(model.run(*shape, int(steps)))
    made["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(made))


if __name__ == "__main__":
    main()
