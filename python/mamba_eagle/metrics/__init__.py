"""What is measured: metrics for Prometheus, spans for OpenTelemetry."""

from mamba_eagle.metrics.recorder import Recorder

__all__ = ["Recorder"]
