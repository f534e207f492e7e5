"""The trainer's processes and how the student is spread over them."""

from titan_opd.parallel.float8 import describe_float8, plain_products
from titan_opd.parallel.fsdp import begin_micro_batch, reshard, whole_tensor
from titan_opd.parallel.materialize import init_shards, load_shards, materialize, own_part
from titan_opd.parallel.memory import return_freed_memory
from titan_opd.parallel.parallelize import parallelize
from titan_opd.parallel.tensor_parallel import own_rows
from titan_opd.parallel.world import World, open_world

__all__ = [
    "World",
    "begin_micro_batch",
    "describe_float8",
    "init_shards",
    "load_shards",
    "materialize",
    "open_world",
    "own_part",
    "own_rows",
    "parallelize",
    "plain_products",
    "reshard",
    "return_freed_memory",
    "whole_tensor",
]
