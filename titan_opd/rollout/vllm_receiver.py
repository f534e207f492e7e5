"""What runs inside vLLM's workers: the receiver of new weights, and small services for the engine around it.

vLLM loads `Receiver` as its worker extension, in whichever process a worker lives; importing this module registers the
transport of weights, `titan`, with vLLM. New weights go through vLLM's layerwise reload, which collects a layer until
it is complete and writes into the storage that the model has, so that captured CUDA graphs stay valid.

Between processes the tensors lie in a file in shared memory, which the engine's client fills, bucket by bucket; names,
types, shapes and offsets come by call.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from titan_opd.ops import multi_digest
from titan_opd.rollout.vllm_draws import take_records
from titan_opd.weights.pieces import Piece, copy_all_digested
from titan_opd.weights.quantization import Dequantizer

BACKEND = "titan"
BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")  # one row for each token, and some for padding
_PR_SET_PDEATHSIG = 1


class LayerwiseUpdate:
    """Puts whole tensors, under their Hugging Face names, into the model of one worker.

    Args:
        model: is overwritten; its parameters keep their storage.
        config: vLLM's, of this engine.
        device: of the model.

    Attributes:
        digests: of the tensors of the last update, by name, as they were handed over.
    """

    def __init__(self, model: nn.Module, config: VllmConfig, device: torch.device) -> None:
        self.digests: dict[str, int] = {}
        self._model = model
        self._config = config
        self._device = device
        self._num_tokens = config.model_config.get_vocab_size()
        self._dequantizer = Dequantizer(config.model_config.dtype)
        self._is_open = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weight-digests")
        self._being_read: list[tuple[list[str], Future[list[int]]]] = []

    @contextmanager
    def _inside_vllm(self) -> Iterator[None]:
        # On a CPU new tensors are there anyway, and saying so slows down each of thousands of calls.
        device = nullcontext() if self._device.type == "cpu" else torch.device(self._device)
        with device, set_current_vllm_config(self._config):
            yield

    def begin(self) -> None:
        """Begin an update, after one that broke off too."""
        self.digests = {}
        self._being_read = []
        self._dequantizer = Dequantizer(self._config.model_config.dtype)
        with self._inside_vllm():
            if self._is_open:  # vLLM would go on with it
                finalize_layerwise_reload(self._model, self._config.model_config)
            initialize_layerwise_reload(self._model)
        self._is_open = True

    def take(self, pieces: Sequence[Piece]) -> None:
        """Take some of the tensors, whole; those that do not stay are copied."""
        with self._inside_vllm():
            named = self._dequantizer.values(self._kept(pieces))
            self._model.load_weights((name, _own_rows(name, tensor, self._num_tokens)) for name, tensor in named)

    def _kept(self, pieces: Sequence[Piece]) -> list[tuple[str, Tensor]]:
        """The tensors in memory that vLLM can keep until their layers are complete.

        Their digests are taken too, of those that stay in another thread, beside vLLM's own work.
        """
        staying = {piece.name: piece.tensor for piece in pieces if piece.stays and piece.tensor.device == self._device}
        moving = [piece for piece in pieces if piece.name not in staying]
        copies = [torch.empty_like(piece.tensor, device=self._device) for piece in moving]
        names = [piece.name for piece in moving]
        self._being_read.append((list(staying), self._reader.submit(multi_digest, list(staying.values()))))
        self.digests |= zip(names, copy_all_digested([piece.tensor for piece in moving], copies), strict=True)
        return [*staying.items(), *zip(names, copies, strict=True)]

    def finish(self) -> None:
        """All tensors have been taken: the model computes with them from now on."""
        with self._inside_vllm():
            finalize_layerwise_reload(self._model, self._config.model_config)
            refresh_tied_head(self._model, self._device)
        for names, digests in self._being_read:
            self.digests |= zip(names, digests.result(), strict=True)
        self._being_read = []
        self._is_open = False


@dataclass
class BucketFile(WeightTransferInitInfo):
    """The shared memory: where it is, and its size in bytes."""

    path: str
    num_bytes: int


@dataclass
class BucketContent(WeightTransferUpdateInfo):
    """What the bucket holds now: [name, dtype, shape, first byte] of each tensor."""

    layout: list[Any] = field(default_factory=list)


class SharedMemoryReceiver(WeightTransferEngine[BucketFile, BucketContent]):
    """Takes buckets of weights out of shared memory."""

    init_info_cls = BucketFile
    update_info_cls = BucketContent

    def init_transfer_engine(self, init_info: BucketFile) -> None:
        self._bucket = map_file(init_info.path, init_info.num_bytes)
        self.update = LayerwiseUpdate(self.model, self.vllm_config, self.device)

    def start_weight_update(self) -> None:
        self.update.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator here, and a CPU has none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketContent) -> None:
        tensors = bucket_tensors(self._bucket, update_info.layout)
        self.update.take([Piece(name, 0, tensor) for name, tensor in tensors])

    def finish_weight_update(self) -> None:
        self.update.finish()

    def shutdown(self) -> None:
        self._bucket = None


class Receiver:
    """The worker's extension: its methods are called by name, in every worker (`collective_rpc`)."""

    def end_with_parent(self) -> None:
        """Let this process end when the one that started it does, however that ends."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def process_number(self) -> int:
        """Where this worker runs."""
        return os.getpid()

    def layerwise_update(self) -> LayerwiseUpdate:
        """For an engine in the caller's process, which hands over its tensors themselves."""
        return LayerwiseUpdate(self.model_runner.get_model(), self.vllm_config, self.device)

    def weight_digests(self) -> dict[str, int]:
        """The digests of the tensors that the last update brought, by name."""
        return self.weight_transfer_engine.update.digests

    def quantized_layers(self) -> list[str]:
        """Which layers vLLM quantises by itself, and to what; one text for each kind of layer."""
        return getattr(self.vllm_config.quant_config, "quantized_layer_summaries", [])

    def shape_logits(self, num_tokens: int, scale: float) -> None:
        """From now on logits end with token `num_tokens` - 1 and are multiplied by `scale`, the inverse temperature."""
        processor = self.model_runner.get_model().logits_processor
        processor.org_vocab_size = num_tokens
        processor.scale = scale

    def take_draws(self, keys: list[str]) -> list[Any]:
        """What `vllm_draws` recorded for requests, which is forgotten here."""
        return take_records(keys)


def refresh_tied_head(model: nn.Module, device: torch.device) -> None:
    """Let an output projection that is tied to the embedding use the embedding's product with the vocabulary, on a CPU.

    There vLLM packs the weights of each for it. The layerwise reload packs those of the embedding anew and leaves the
    other's as they are: the engine would read with new weights and write with old ones.
    """
    if device.type != "cpu":
        return
    embeddings: dict[int, VocabParallelEmbedding] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            first = embeddings.setdefault(id(module.weight), module)
            module.cpu_linear = first.cpu_linear  # a function of the packed weights and the input, not of the module


def _own_rows(name: str, tensor: Tensor, num_tokens: int) -> Tensor:
    """What vLLM's model has of a tensor: of one with a row for each token, no padding."""
    return tensor[:num_tokens] if name in BY_TOKEN else tensor


def map_file(path: str, num_bytes: int) -> Tensor:
    """[num_bytes] uint8, the content of a file that other processes map too."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage.from_file(path, True, num_bytes))


def bucket_tensors(bucket: Tensor, layout: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a bucket, as views of its bytes."""
    for name, dtype_name, shape, begin in layout:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, bucket[begin : begin + size].view(dtype).view(shape)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryReceiver)
