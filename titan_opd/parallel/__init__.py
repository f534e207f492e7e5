"""The trainer's processes and how the student is spread over them."""

from titan_opd.parallel.fsdp import parallelize, reshard, whole_tensor
from titan_opd.parallel.memory import return_freed_memory
from titan_opd.parallel.world import World, open_world

__all__ = ["World", "open_world", "parallelize", "reshard", "return_freed_memory", "whole_tensor"]
