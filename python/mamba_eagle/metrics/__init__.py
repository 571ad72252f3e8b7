"""Prometheus metrics of the server."""

from mamba_eagle.metrics.recorder import Recorder

__all__ = ["Recorder"]
