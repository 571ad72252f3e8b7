"""Drafters, by the name that ``--speculative-algorithm`` takes."""
