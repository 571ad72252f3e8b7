"""Trains draft heads for any model that the server loads (``mamba-eagle train-drafter``)."""
