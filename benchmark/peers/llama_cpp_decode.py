"""One measurement of llama.cpp, by the Python of an environment that has llama-cpp-python and
nothing of ours: prompts one after the other, then decode steps of the whole batch with random
tokens, no sampling. Prints one JSON object; called by benchmark/cpu_vs_llama.py.

    python llama_cpp_decode.py GGUF THREADS BATCH INPUT_LEN STEPS
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from typing import Any


class Model:
    def __init__(self, path: str, threads: int, batch: int, input_len: int, steps: int) -> None:
        import llama_cpp

        self.lib, self.batch_size = llama_cpp, batch
        llama_cpp.llama_backend_init()
        begin = time.perf_counter()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = 2 * batch * (input_len + steps + 8)
        context.n_batch = max(512, input_len)
        context.n_ubatch = 512
        context.n_seq_max = batch
        context.n_threads = context.n_threads_batch = threads
        context.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.load_seconds = time.perf_counter() - begin
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.room = llama_cpp.llama_batch_init(max(512, input_len), 0, 1)
        self.random = random.Random(0)

    def step(self, items: list[tuple[int, int, bool]]) -> float:
        """items: position, sequence, whether its logits are wanted. Returns seconds."""
        begin, room = time.perf_counter(), self.room
        room.n_tokens = len(items)
        for i, (position, sequence, wanted) in enumerate(items):
            room.token[i] = self.random.randrange(self.vocab_size)
            room.pos[i], room.n_seq_id[i] = position, 1
            room.seq_id[i][0], room.logits[i] = sequence, wanted
        if (code := self.lib.llama_decode(self.context, room)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        self.lib.llama_synchronize(self.context)
        return time.perf_counter() - begin

    def run(self, input_len: int, steps: int) -> dict[str, list[float]]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        last, sequences = input_len - 1, range(self.batch_size)
        prompts = [self.step([(i, s, i == last) for i in range(input_len)]) for s in sequences]
        decode = [self.step([(input_len + k, s, True) for s in sequences]) for k in range(steps)]
        return {"prompt_seconds": prompts, "step_seconds": decode}


def main() -> None:
    path, *sizes = sys.argv[1:]
    threads, batch, input_len, steps = map(int, sizes)
    model = Model(path, threads, batch, input_len, steps)
    model.run(input_len, 4)  # warm-up
    made: dict[str, Any] = model.run(input_len, steps)
    made["load_seconds"] = model.load_seconds
    made["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(made))


if __name__ == "__main__":
    main()
