"""A trainer's and an engine's end of the weights, in one process, for tests."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import torch
from torch import Tensor

from tests.engines.writing import make_decoder, make_engine, make_samples
from titan_opd.channel import InProcessTransport, PayloadFetcher, PayloadStore
from titan_opd.config.schema import SamplingConfig
from titan_opd.models import Decoder
from titan_opd.rollout import NativeEngine
from titan_opd.rollout.quantized import quantize_linears
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.quantization import TYPES, is_quantized, quantize_rows, scale_name
from titan_opd.weights.quantized_source import QuantizedSource
from titan_opd.weights.receiver import Checks, WeightReceiver
from titan_opd.weights.source import Source, WeightSource
from titan_opd.weights.transports import WEIGHT_LIMITS, ChannelOutlet, InProcess, ProcessGroupOutlet, SharedMemoryOutlet

SAMPLING = SamplingConfig(max_new_tokens=8)
BUCKET_BYTES = 6000  # several buckets, and an embedding that is larger than one
DIGEST_ONLY = Checks(digest=True, probe=False)


def make_source(decoder: Decoder, dtype: torch.dtype, quantization: str = "none") -> Source:
    """The weights of a decoder, cast and quantised."""
    source = WeightSource(decoder, dtype=dtype, bucket_bytes=BUCKET_BYTES, timeout=20)
    return source if quantization == "none" else QuantizedSource(source, quantization)


class Ends(contextlib.ExitStack):
    """Publishes weights of decoders and takes them into engines.

    Args:
        transport: "in_process", "shared_memory", "channel" or "process_group".
        folder: an empty one, on a file system in memory.
        dtype: what weights are cast to.
        delta: whether versions are published, and taken, as what changed, too.
        quantization: how they are published, as `rollout.quantization`.
    """

    def __init__(
        self,
        transport: str,
        folder: Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        delta: bool = False,
        quantization: str = "none",
    ) -> None:
        super().__init__()
        self.quantization = quantization
        self.dtype = dtype
        self.delta = delta
        self._transport = transport
        self._channel = InProcessTransport()
        self.store = PayloadStore(
            self._channel, name="weights", capacity_bytes=1 << 24, consumer="the engines", limits=WEIGHT_LIMITS
        )
        self.callback(self.store.close)
        self.local = InProcess()
        self.outlet = {
            "in_process": lambda: self.local,
            "shared_memory": lambda: SharedMemoryOutlet(folder / "weights"),
            "channel": lambda: ChannelOutlet(self.store),
            "process_group": lambda: ProcessGroupOutlet("127.0.0.1", torch.device("cpu"), timeout=20),
        }[transport]()
        self.publisher: WeightPublisher | None = None

    def publish(self, decoder: Decoder, version: int, **options: object) -> None:
        """A version that is the weights of `decoder`."""
        source = make_source(decoder, self.dtype, self.quantization)
        if self.publisher is None:
            self.publisher = WeightPublisher(
                source, [self.outlet], self.store, bucket_bytes=BUCKET_BYTES, delta=self.delta
            )
            self.callback(self.publisher.close)
        self.publisher.source = source
        self.manifest = self.publisher.publish(version, **options)

    def receiver(self, checks: Checks = DIGEST_ONLY, *, transport: str | None = None) -> WeightReceiver:
        """An engine's end."""
        return WeightReceiver(
            PayloadFetcher(self._channel, name="rollout-0", limits=WEIGHT_LIMITS),
            worker="rollout-0",
            checks=checks,
            transport=transport or self._transport,
            timeout=20,
            device=torch.device("cpu"),
            local=self.local if self._transport == "in_process" else None,
            delta=self.delta,
        )

    def take(self, engine: NativeEngine, version: int, checks: Checks = DIGEST_ONLY) -> None:
        """Take a version into an engine, by a new receiver."""
        self.receiver(checks).take(engine, self.store.address, version)


def engine_on(
    seed: int, dtype: torch.dtype = torch.bfloat16, quantization: str = "none", **overrides: object
) -> NativeEngine:
    """An engine that was made with the weights of a seed."""
    decoder = make_decoder(seed=seed, **overrides).to(dtype)
    if quantization != "none":
        quantize_linears(decoder, quantization)
    return make_engine(decoder)


def weights_of(engine: NativeEngine) -> dict[str, Tensor]:
    """What an engine stores."""
    return {name: value.detach() for name, value in engine._decoder.named_parameters()}


def holds(engine: NativeEngine, decoder: Decoder) -> bool:
    """Whether an engine stores exactly the cast weights of a decoder."""
    stored = weights_of(engine)
    return all(torch.equal(stored[name], value.to(stored[name].dtype)) for name, value in decoder.named_parameters())


@torch.no_grad()
def stored_by_hand(decoder: Decoder, dtype: torch.dtype, quantization: str) -> dict[str, Tensor]:
    """What an engine must hold of a decoder, bit for bit, from each whole parameter by itself."""
    found = {}
    for name, value in decoder.named_parameters():
        found[name] = value.detach().to(dtype)
        if quantization != "none" and is_quantized(name):
            found[name], found[scale_name(name)] = quantize_rows(found[name], TYPES[quantization])
    return found


def answers(engine: NativeEngine) -> list[list[int]]:
    """What an engine writes."""
    return [one.response_ids.tolist() for one in engine.generate(make_samples(3), SAMPLING)]


@torch.no_grad()
def nudged(decoder: Decoder, share: float, *, seed: int = 0, only: str = "") -> Decoder:
    """A copy in which `share` of the elements of each parameter, at least one, have other bits in any dtype.

    Args:
        only: parameters whose names contain this.
    """
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(decoder)
    for name, parameter in other.named_parameters():
        if only in name:
            count = max(1, int(share * parameter.numel()))
            chosen = torch.randperm(parameter.numel(), generator=generator)[:count]
            parameter.view(-1)[chosen] = parameter.view(-1)[chosen] * 2 + 1
    return other
