"""How much of its devices a step uses: tokens per second and device, and MFU.

MFU (model FLOPs utilization, arXiv 2204.02311) of a step is

    training_flops(tokens, trained tokens, causal pairs) / (seconds of the phase `train` * devices * peak)

with the operations of models/flops.py, summed over all samples that the step trains. They are what the model needs, so
nothing that is computed a second time (`training.recompute_activations`) adds to them, nor do the loss's own passes
beside training: the proximal policy's, M2PO's, the teacher's product of dense scores. What all of those cost shows in
the seconds. The peak is that of dense bfloat16 products, whatever type the run computes in.
"""

from __future__ import annotations

from titan_opd.models.config import DecoderConfig
from titan_opd.models.flops import training_flops


def utilization_metrics(
    config: DecoderConfig,
    *,
    num_tokens: int,
    num_rows: int,
    num_pairs: int,
    seconds: float,
    num_devices: int,
    peak_flops: float | None,
) -> dict[str, float]:
    """`tokens_per_second/train_per_device`, and `mfu` where the peak is known.

    Args:
        config: of the student.
        num_tokens: that go through the layers in the step, prompts included, over all processes.
        num_rows: trained tokens among them.
        num_pairs: of tokens that attention compares, `causal_pairs` of the sequences.
        seconds: of the step's phase `train`.
        num_devices: that it is trained on.
        peak_flops: of one of them, operations a second.
    """
    device_seconds = seconds * num_devices
    metrics = {"tokens_per_second/train_per_device": num_tokens / device_seconds}
    if peak_flops is not None:
        flops = training_flops(config, num_tokens=num_tokens, num_rows=num_rows, num_pairs=num_pairs)
        metrics["mfu"] = flops / (device_seconds * peak_flops)
    return metrics
