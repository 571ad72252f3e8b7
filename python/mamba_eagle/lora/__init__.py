"""Adapters: what a folder of PEFT's says, which products take it, the slots that hold it."""
