"""The way of the weights from the trainer into the engines."""

from titan_opd.weights.source import named_weights

__all__ = ["named_weights"]
