"""mamba-eagle: fast, exact inference of Mamba2 and Mamba2/attention hybrid models."""

__version__ = "0.1.0"
