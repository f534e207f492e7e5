"""The trainer's processes as a grid with named axes.

    dp_replicate   copies of the student; gradients are summed over them                                  (HSDP)
    dp_shard       shards of one copy; parameters are gathered, gradients reduced and scattered over them (FSDP)
    tp             parts of every matrix; activations are reduced, or gathered and scattered, over them
    dp             dp_replicate and dp_shard together: the shares of the samples

Neighbouring ranks are neighbours on the tp axis, whose traffic is the heaviest: torchrun puts them on one machine.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from titan_opd.config.schema import ParallelConfig

AXES = ("dp_replicate", "dp_shard", "tp")


def build_mesh(config: ParallelConfig, device_type: str, num_processes: int) -> DeviceMesh:
    """The grid of all processes, [dp_replicate, dp_shard, tp]; all of them call it together.

    Raises:
        ValueError: the axes do not multiply to the number of processes.
    """
    mesh = init_device_mesh(device_type, axis_sizes(config, num_processes), mesh_dim_names=AXES)
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    if config.tp > 1:  # then the gradient's norm is one sum over processes, not one for each axis
        mesh[AXES if config.dp_replicate > 1 else AXES[1:]]._flatten("holders")
    return mesh


def set_timeout(mesh: DeviceMesh, seconds: float) -> None:
    """How long a process waits for the others of an axis; axes do not take it over from the group of all processes."""
    for axis in (*AXES, "dp", *(["holders"] if mesh["tp"].size() > 1 else [])):
        _set_pg_timeout(timedelta(seconds=seconds), mesh.get_group(axis))


def axis_sizes(config: ParallelConfig, num_processes: int) -> tuple[int, int, int]:
    """The sizes of the axes, dp_shard = -1 resolved.

    Raises:
        ValueError: the axes do not multiply to the number of processes.
    """
    others = config.dp_replicate * config.tp
    shard = num_processes // others if config.dp_shard == -1 else config.dp_shard
    if shard * others != num_processes or shard == 0:
        given = f"parallel.dp_replicate = {config.dp_replicate}, dp_shard = {config.dp_shard}, tp = {config.tp}"
        if config.dp_shard == -1:
            wanted = f"a multiple of {others}"
            fix = f"choose axes whose product divides {num_processes}"
        else:
            wanted = f"{shard * others}"
            fix = "set dp_shard = -1 for all that are left"
        raise ValueError(
            f"{given} need {wanted} processes, and there are {num_processes}; {fix}, or start another number "
            "(torchrun --nproc-per-node)"
        )
    return config.dp_replicate, shard, config.tp


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that FSDP works on: [dp_shard], or [dp_replicate, dp_shard] where there are several copies."""
    return mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
