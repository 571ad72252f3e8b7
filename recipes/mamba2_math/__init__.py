"""How the embedded model was made: its text, its tokenizer, its training. See README.md here."""
