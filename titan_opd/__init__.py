"""titan_opd: a native torch.distributed trainer for on-policy distillation of language models."""

__version__ = "0.1.0"
