"""Trains a draft head for any target: prompts, answers by our own engine, the loop, the folder."""
