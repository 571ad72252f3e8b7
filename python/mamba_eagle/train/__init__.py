"""Draft heads for any model (drafter/), and the recipe of the embedded one: text, tokenizer."""
