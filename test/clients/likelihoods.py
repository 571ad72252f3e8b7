"""Log likelihoods that transformers computes, in float32, beside those on standard input.

In: a JSON list of {context, text, value}; out: {"max_difference": …}. A text follows its context
as in lm-eval: both are tokenized together; without a context it follows the token that begins a
text.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import transformers


def main() -> None:
    folder = os.environ["MAMBA_EAGLE_TOKENIZER"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for pair in json.load(sys.stdin):
        start = tokenizer.encode(pair["context"], add_special_tokens=False)
        whole = tokenizer.encode(pair["context"] + pair["text"], add_special_tokens=False)
        if not start:
            start = [tokenizer.bos_token_id]
            whole = start + whole
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0]
        logprobs = torch.log_softmax(logits.double(), -1)
        places = range(len(start), len(whole))
        value = sum(float(logprobs[place - 1, whole[place]]) for place in places)
        worst = max(worst, abs(value - pair["value"]))
    json.dump({"max_difference": worst}, sys.stdout)


if __name__ == "__main__":
    main()
