"""The expected balance of a run's roles: for how long a batch keeps those busy who write, who score and who train.

Seconds of a role are the larger of its operations over the device's rate and, where it decodes, the bytes it reads over
the device's bandwidth, both at the given utilisation. They are for comparing roles with each other, not a forecast: an
engine that waits for its slowest answer, a kernel at a tenth of the peak or a network are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.models import DecoderConfig
from titan_opd.models.flops import causal_pairs, forward_flops, training_flops
from titan_opd.planning.devices import Device


@dataclass(frozen=True)
class Answers:
    """The answers of one batch.

    Attributes:
        count: how many.
        prompt, response: tokens of each.
    """

    count: int
    prompt: int
    response: int

    @property
    def inputs(self) -> int:
        """Tokens that a model reads of one: the last one predicts nothing."""
        return self.prompt + self.response - 1


@dataclass(frozen=True)
class RoleWork:
    """What a role does for one batch.

    Attributes:
        name: of the role.
        num_devices: that share the work.
        flops: of all devices together.
        read_bytes: that all devices together read from their memory while they decode; 0 for a role that does not.
    """

    name: str
    num_devices: int
    flops: float
    read_bytes: float = 0.0

    def seconds(self, device: Device, utilization: float) -> float:
        """That the role's devices are busy."""
        slowest = max(self.flops / device.flops, self.read_bytes / device.bandwidth)
        return slowest / (utilization * self.num_devices)

    def device_seconds(self, device: Device, utilization: float) -> float:
        """Of one device that had all the work."""
        return self.num_devices * self.seconds(device, utilization)


def trainer_work(config: DecoderConfig, answers: Answers, *, num_devices: int, recompute: str) -> RoleWork:
    """Forward and backward passes over all answers, the layers' forward pass twice where it is computed again.

    "selective" repeats the products and keeps attention.
    """
    tokens, rows = answers.count * answers.inputs, answers.count * answers.response
    pairs = answers.count * causal_pairs([answers.inputs])
    flops = training_flops(config, num_tokens=tokens, num_rows=rows, num_pairs=pairs)
    if recompute != "none":
        again = pairs if recompute == "full" else 0
        flops += forward_flops(config, num_tokens=tokens, num_rows=0, num_pairs=again)
    return RoleWork("trainer", num_devices, flops)


def teacher_work(config: DecoderConfig, answers: Answers, *, num_devices: int) -> RoleWork:
    """One forward pass over all answers."""
    flops = forward_flops(
        config,
        num_tokens=answers.count * answers.inputs,
        num_rows=answers.count * answers.response,
        num_pairs=answers.count * causal_pairs([answers.inputs]),
    )
    return RoleWork("teacher", num_devices, flops)


def rollout_work(
    config: DecoderConfig, answers: Answers, *, num_devices: int, num_parameters: int, itemsize: int, concurrent: int
) -> RoleWork:
    """Prompts are read at once; then each step of decoding reads all weights and the running answers' keys and values.

    Args:
        num_parameters: of the model.
        itemsize: bytes of a number in the engine's type.
        concurrent: answers that one engine writes at the same time.
    """
    flops = answers.count * forward_flops(
        config,
        num_tokens=answers.inputs,
        num_rows=answers.response,
        num_pairs=causal_pairs([answers.inputs]),
    )
    per_engine = -(-answers.count // num_devices)
    rounds = -(-per_engine // concurrent)
    steps = rounds * (answers.response - 1) * num_devices  # an answer's first token comes of reading its prompt
    row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize  # of a token's keys and values
    seen = answers.count * (causal_pairs([answers.inputs]) - causal_pairs([answers.prompt]))
    return RoleWork("rollout", num_devices, flops, read_bytes=steps * num_parameters * itemsize + seen * row_bytes)
