"""Weights of few bits: how checkpoints publish them, and what they stand for.

A *layout* is one tool's way of writing them (one file each); ``layouts.py`` finds it from
config.json. It turns a checkpoint's tensors into *matrices*, which do not depend on the tool.
"""
