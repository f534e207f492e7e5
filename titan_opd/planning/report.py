"""A plan as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from titan_opd.errors import StorageError
from titan_opd.observe import make_table
from titan_opd.planning.plan import MIB, Plan, ProcessMemory


def describe(plan: Plan) -> list[str]:
    """Lines that say what is planned, and on which assumptions."""
    grid, answers, work = plan.layouts[0].grid, plan.answers, plan.work
    lines = [
        f"processes: {plan.num_processes} = dp_replicate {grid.replicate} x dp_shard {grid.shard} x tp {grid.tp}",
        f"assumed: {answers.count} answers a batch, each with {answers.prompt} tokens of the prompt and "
        f"{answers.response} of its own (--prompt-tokens, --answer-tokens)",
        f"an optimizer step of one process: {work.num_microbatches} micro-batches of {work.num_tokens} tokens, "
        f"{work.num_rows} of them trained",
        f"assumed: every device is a {plan.device.name}: {plan.device.flops / 1e12:g} TFLOP/s, "
        f"{plan.device.bandwidth / 1e9:g} GB/s, of which {plan.utilization:.0%} are reached",
    ]
    lines += [
        f"assumed: one {section} worker, because the configuration starts none here (--{section}.workers N)"
        for section in plan.uncounted
    ]
    return lines


def tables(plan: Plan) -> list[Table]:
    """All tables, in the order in which they are read."""
    found = [_layout_table(plan)]
    found += [_memory_table(memory) for memory in plan.memory]
    if plan.traffic:
        found.append(_traffic_table(plan))
    return [*found, _roles_table(plan)]


def verdict(plan: Plan) -> list[str]:
    """Lines that say what fits, what is slowest and what would balance."""
    lines = []
    for memory in plan.memory:
        if memory.in_host:
            lines.append(f"{memory.process}: {memory.total / 1e9:.2f} GB at its peak")
            continue
        fits = "fits" if memory.total <= plan.device.memory else "does NOT fit"
        lines.append(
            f"{memory.process}: {memory.total / 1e9:.2f} GB at its peak {fits} the device's "
            f"{plan.device.memory / 1e9:g} GB (libraries and fragmentation take more)"
        )
    busy = {role.name: role.seconds(plan.device, plan.utilization) for role in plan.roles}
    slowest = max(busy, key=busy.__getitem__)
    lines.append(
        f"one after the other the roles take {_seconds(sum(busy.values()))} a batch; side by side {slowest} is the "
        f"slowest with {_seconds(busy[slowest])}"
    )
    least = min(role.device_seconds(plan.device, plan.utilization) for role in plan.roles)
    ratio = " : ".join(f"{role.device_seconds(plan.device, plan.utilization) / least:.3g}" for role in plan.roles)
    lines.append(f"balanced side by side: devices for {' : '.join(role.name for role in plan.roles)} as {ratio}")
    return lines


def write_json(plan: Plan, path: Path) -> None:
    """The plan's numbers, bytes and operations as they are.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(_as_dict(plan), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}") from error


def _as_dict(plan: Plan) -> dict[str, Any]:
    values = dataclasses.asdict(plan)
    for memory, own in zip(plan.memory, values["memory"], strict=True):
        own["total"] = memory.total
    for one, own in zip(plan.traffic, values["traffic"], strict=True):
        own["wire_bytes"] = one.wire_bytes
    for role, own in zip(plan.roles, values["roles"], strict=True):
        own["seconds"] = role.seconds(plan.device, plan.utilization)
    return values


def _layout_table(plan: Plan) -> Table:
    """Parameters by placement and by the shapes of their shards, those of all layers in one row."""
    first, last = plan.layouts
    rows: Counter[tuple[str, ...]] = Counter()
    for one, other in zip(first.shards, last.shards, strict=True):
        parts = one.name.removeprefix("model.").removesuffix(".weight").split(".")
        name = f"layer {'.'.join(parts[2:])}" if parts[0] == "layers" else ".".join(parts)
        rows[name, _shape(one.shape), one.placements, _shape(one.local_shape), _shape(other.local_shape)] += 1
    title = f"Layout, tried on {plan.num_processes} fake processes"
    columns = ("parameter", "number", "whole", "placement", f"rank {first.rank}", f"rank {last.rank}")
    body = [(name, str(count), *rest) for (name, *rest), count in rows.items()]
    body.append(("all elements", "", "", "", f"{first.num_elements:,}", f"{last.num_elements:,}"))
    return make_table(title, columns, body)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _memory_table(memory: ProcessMemory) -> Table:
    rows = [(name, "always", _mib(num_bytes)) for name, num_bytes in memory.resident.items()]
    for moment in memory.moments:
        rows += [(name, moment.name, _mib(num_bytes)) for name, num_bytes in moment.num_bytes.items() if num_bytes]
    rows.append(("peak", memory.peak.name, _mib(memory.total)))
    return make_table(f"Memory of a {memory.process}", ("what", "when", "MiB"), rows)


def _traffic_table(plan: Plan) -> Table:
    rows = [
        (one.what, one.axis, one.collective, str(one.calls), _mib(one.num_bytes), _mib(one.wire_bytes))
        for one in plan.traffic
    ]
    columns = ("what", "axis", "collective", "calls", "MiB whole", "MiB sent by a process")
    return make_table("Communication of an optimizer step", columns, rows)


def _roles_table(plan: Plan) -> Table:
    busy = [role.seconds(plan.device, plan.utilization) for role in plan.roles]
    rows = [
        (
            role.name,
            str(role.num_devices),
            f"{role.flops / 1e12:.4g}",
            f"{role.read_bytes / 1e9:.4g}" if role.read_bytes else "",
            _seconds(seconds),
            f"{seconds / max(busy):.0%}",
        )
        for role, seconds in zip(plan.roles, busy, strict=True)
    ]
    columns = ("role", "devices", "TFLOP a batch", "GB read decoding", "busy", "of the slowest")
    return make_table("Balance of the roles", columns, rows)


def other_volumes(plan: Plan) -> list[str]:
    """Lines about what leaves the trainer, and the operations behind MFU."""
    return [
        f"weights: {_mib(plan.weight_bytes)} MiB to each engine with a policy version; scores: "
        f"{_mib(plan.score_bytes)} MiB a batch",
        f"training takes {plan.flops_per_token / 1e9:.4g} GFLOP a token of such a sequence (model FLOPs, as for MFU)",
    ]


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
