"""servetune finds the fastest valid way to serve a model and proves it."""

__version__ = "0.1.0"
