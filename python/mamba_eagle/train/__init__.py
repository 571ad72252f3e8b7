"""The recipe of the embedded model and of its draft head: text, tokenizer, training."""
