"""The memory of one process over an optimizer step: what lives at each moment that can be the peak.

No number here is fitted: each term is a count of elements times the bytes of their type, at a moment of the program as
it is (`learner.py`, `losses/head.py`, `parallel/fsdp.py` with PyTorch 2.13's FSDP2). Left out are numbers per candidate
(tokens by K), what kernels and communication libraries allocate for themselves, and fragmentation.

V vocabulary rows, H hidden, n processes of the FSDP axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titan_opd.config.schema import OptimizerConfig, ParallelConfig, TrainingConfig
from titan_opd.losses.chunks import rows_per_chunk
from titan_opd.models import DecoderConfig
from titan_opd.planning.activations import FLOAT32, ITEMSIZE, Workload, layer_memory
from titan_opd.planning.parts import Grid, Group, Part, Parts, divide

PARAMETERS, OPTIMIZER = "parameters", "optimizer state"
ACTIVATIONS, GATHERED, GRADIENTS = "activations", "gathered parameters", "gradients"
HEAD, BUFFERS, TEMPORARY = "loss head", "communication buffers", "backward pass of a layer"


@dataclass(frozen=True)
class Moment:
    """What lives at one moment of a step, beside parameters and optimizer state.

    Attributes:
        name: of the moment.
        num_bytes: by what they are.
    """

    name: str
    num_bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.num_bytes.values())


@dataclass(frozen=True)
class TeacherShape:
    """Of a teacher whose logits the loss computes beside the student's (the support "dense").

    Attributes:
        vocab_size: rows of its output projection.
        itemsize: bytes of a number in its type.
    """

    vocab_size: int
    itemsize: int


class StepMemory:
    """A process's memory over the optimizer steps.

    Args:
        config: of the student.
        work: what the process trains in a step.
        grid: the processes, and which of them it is.
        training, parallel, optimizer: the sections of these names.
        dense_teacher: when the loss is over the whole vocabulary.
        gloo: whether the processes talk over gloo, as on CPUs, instead of NCCL.
    """

    def __init__(
        self,
        config: DecoderConfig,
        work: Workload,
        grid: Grid,
        *,
        training: TrainingConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        dense_teacher: TeacherShape | None = None,
        gloo: bool = False,
    ) -> None:
        self.config = config
        self.work = work
        self.grid = grid
        self.parts: Parts = divide(config, grid)
        self._training = training
        self._parallel = parallel
        self._optimizer = optimizer
        self._dense_teacher = dense_teacher
        self._gloo = gloo
        self._itemsize = ITEMSIZE[training.compute_dtype]
        self._layer = layer_memory(
            config, work, grid, itemsize=self._itemsize, recompute=training.recompute_activations
        )

    # ---- What stays --------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """Of the float32 masters."""
        return FLOAT32 * sum(part.held for part in self.parts.all)

    @property
    def optimizer_state(self) -> int:
        """AdamW: two float32 moments of each parameter; Muon: one of the matrices within layers."""
        if self._optimizer.name == "adamw_8bit":
            return 2 * sum(_narrow_moment(part.held) for part in self.parts.all)
        moments = 0
        for group in self.parts.groups:
            for part in group.parts:
                has_one = self._optimizer.name == "muon" and group is not self.parts.root and len(part.shape) == 2
                moments += part.held * (1 if has_one else 2)
        return FLOAT32 * moments

    @property
    def reduced_gradients(self) -> int:
        """Of all the process's shards, as the optimizer reads them."""
        return FLOAT32 * sum(group.padded for group in self.parts.groups)

    # ---- What comes and goes -----------------------------------------------------------------------------------------

    @property
    def peak(self) -> Moment:
        """The moment of a step at which most lives."""
        return max(self.moments(), key=lambda moment: moment.total)

    def moments(self) -> Iterator[Moment]:
        """The moments that can be the peak, in their order, of the last micro-batch of a step."""
        yield self._loss()
        for index in reversed(range(len(self.parts.layers))):
            yield self._backward(index)
            yield self._reduction(index)
        yield self._root_backward()
        yield self._root_reduction()
        yield self._update()

    def _loss(self) -> Moment:
        # The forward pass holds the last gather's result until the next one, or its own end, after the loss.
        return Moment(
            "loss",
            {
                ACTIVATIONS: self._activations(len(self.parts.layers)),
                GATHERED: self._gathered(None),
                GRADIENTS: self._accumulated(len(self.parts.layers)),
                HEAD: self.head + self.head_gradient,
                BUFFERS: self._gather_buffer(self.parts.layers[-1]),
            },
        )

    def _backward(self, index: int) -> Moment:
        """Of the feed-forward part of a layer, while those before it are being gathered."""
        layers = self.parts.layers
        following = self._reduce_buffer(layers[index + 1]) if index + 1 < len(layers) else 0
        return Moment(
            f"backward pass of layer {index}",
            {
                ACTIVATIONS: self._activations(index) + self._layer.whole,
                GATHERED: self._gathered(index),
                GRADIENTS: self._shards(index + 1) + self._accumulated(index + 1) + self.head_gradient,
                BUFFERS: self._prefetched(index) + following,
                TEMPORARY: self._layer.temporary + self._first_gradient(index),
            },
        )

    def _reduction(self, index: int) -> Moment:
        """Of a layer's gradients, when its parameters have been freed."""
        group = self.parts.layers[index]
        own = 0 if self._adds_in_place else self._itemsize * group.gathered
        return Moment(
            f"reduction of layer {index}",
            {
                ACTIVATIONS: self._activations(index) + self.work.num_tokens * self.config.hidden_size * self._itemsize,
                GATHERED: self._gathered(None),
                GRADIENTS: self._shards(index + 1) + self._accumulated(index + 1) + self.head_gradient,
                BUFFERS: self._prefetched(index) + self._reducing(group, own),
            },
        )

    def _root_backward(self) -> Moment:
        """Of the embedding, whose gradient is dense; where the projection is tied to it, the two are then added."""
        root = self.parts.root
        embedding = root.parts[0].gathered
        gradients = FLOAT32 * embedding + self.head_gradient
        return Moment(
            "backward pass of the embedding",
            {
                ACTIVATIONS: self.work.num_tokens * self.config.hidden_size * FLOAT32,
                GATHERED: self._gathered(None),
                GRADIENTS: self._shards(0) + self._accumulated(0) + gradients,
                BUFFERS: self._reduce_buffer(self.parts.layers[0]),
            },
        )

    def _root_reduction(self) -> Moment:
        root = self.parts.root
        return Moment(
            "reduction of embedding and output projection",
            {GRADIENTS: self._shards(0), BUFFERS: self._reducing(root, FLOAT32 * root.gathered)},
        )

    def _update(self) -> Moment:
        root = 0 if self._parallel.cpu_offload else FLOAT32 * self.parts.root.padded
        gradients = self._shards(0) + root
        return Moment("optimizer", {GRADIENTS: gradients, BUFFERS: self._muon_buffers()})

    # ---- Terms -------------------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Chunks of logits, copies of the trained rows, their gradient; without the output projection's gradient."""
        rows, itemsize = self.work.num_rows, self._itemsize
        vocabulary = self._head_part().gathered // self.config.hidden_size
        row_bytes = vocabulary * itemsize
        padded_bytes = -(-vocabulary // 64) * 64 * itemsize  # rows begin at multiples of 64 elements
        teacher = self._dense_teacher
        if teacher is not None:
            teacher_rows = -(-teacher.vocab_size // self.grid.tp)
            row_bytes += teacher_rows * teacher.itemsize
            padded_bytes += -(-teacher_rows // 64) * 64 * teacher.itemsize
        chunk = min(rows, rows_per_chunk(rows, row_bytes, self._training.logits_chunk_mb)) * padded_bytes
        # Selected by position, selected by weight, their gradient; over tp the gradient is summed in float32.
        states = 3 * rows * self.config.hidden_size * itemsize
        if self.grid.tp > 1 and itemsize != FLOAT32:
            states += rows * self.config.hidden_size * FLOAT32
        # The projection is cast for products in another type.
        cast = 0 if itemsize == FLOAT32 else self._head_part().gathered * itemsize
        return chunk + states + cast

    @property
    def head_gradient(self) -> int:
        """The output projection's gradient, float32, from the loss to the end of the backward pass."""
        return FLOAT32 * self._head_part().gathered

    def _head_part(self) -> Part:
        return self.parts.root.parts[-1]  # the embedding where they are tied

    @property
    def _each(self) -> bool:
        return self._parallel.reduce_gradients == "each"

    def _activations(self, num_layers: int) -> int:
        """Kept by the first layers; by the final norm, too, when that is all of them."""
        stream = self.work.num_tokens * self.config.hidden_size * self._itemsize
        if self.grid.sequence_parallel:
            stream = -(-stream // self.grid.tp)
        final = stream if num_layers == len(self.parts.layers) else 0
        angles = self.work.num_tokens * self.config.head_dim * FLOAT32  # cosines and sines, half as many each
        return num_layers * self._layer.kept + final + angles

    def _gathered(self, index: int | None) -> int:
        """The root's parameters, and those of layer `index`; of all layers where they are not freed."""
        root = FLOAT32 * self.parts.root.gathered
        if not self._parallel.reshard_after_forward:
            return root + self._itemsize * sum(group.gathered for group in self.parts.layers)
        return root + (0 if index is None else self._itemsize * self.parts.layers[index].gathered)

    def _shards(self, first: int) -> int:
        """Reduced gradients of the layers from `first` on, where they are on the device."""
        if self._parallel.cpu_offload:
            return 0
        return FLOAT32 * sum(group.padded for group in self.parts.layers[first:])

    def _accumulated(self, num_layers: int) -> int:
        """Gradients of earlier micro-batches, of the first layers and the root."""
        if self.work.num_microbatches == 1:
            return 0
        groups = (*self.parts.layers[:num_layers], self.parts.root)
        if not self._each:
            return FLOAT32 * sum(group.gathered for group in groups)
        if self._parallel.cpu_offload:
            return 0
        return FLOAT32 * sum(group.padded for group in groups)

    def _gather_buffer(self, group: Group) -> int:
        """What a gather writes, before it is copied into the parameters; a lone process copies its own."""
        return 0 if self.grid.shard == 1 else self._itemsize * group.padded * self.grid.shard

    def _prefetched(self, index: int) -> int:
        """Gathers under way in the backward pass of a layer: of the one before it, or of as many as were asked for."""
        if not self._parallel.reshard_after_forward:
            return 0
        first = max(0, index - max(1, self._parallel.prefetch))
        return sum(self._gather_buffer(group) for group in self.parts.layers[first:index])

    def _reduce_buffer(self, group: Group) -> int:
        """What a reduction reads; it is kept until the next one."""
        return FLOAT32 * group.padded * self.grid.shard

    def _reducing(self, group: Group, own: int) -> int:
        """The most while a group is reduced: its gradients (`own` bytes) are copied and freed, then the result is made.

        A lone process makes a divided copy of all in between. Among several the last gradient is held to the end, and
        gloo reduces in a copy.
        """
        read = self._reduce_buffer(group)
        if self.grid.shard == 1:
            return read + max(own, read + FLOAT32 * group.padded)
        itemsize = FLOAT32 if group is self.parts.root else self._itemsize
        held = itemsize * group.parts[-1].gathered + (read if self._gloo else 0)
        return read + max(own, held + FLOAT32 * group.padded)

    @property
    def _adds_in_place(self) -> bool:
        """Whether a layer's gradients are added to those of earlier micro-batches as autograd makes them."""
        return self.work.num_microbatches > 1 and not self._each and self._itemsize == FLOAT32

    def _first_gradient(self, index: int) -> int:
        """Of the down projection, which autograd makes before anything else of a layer."""
        if self._adds_in_place:
            return 0
        (down,) = (part for part in self.parts.layers[index].parts if part.name.endswith("mlp.down_proj.weight"))
        return self._itemsize * down.gathered

    def _muon_buffers(self) -> int:
        """A round of Muon: as many whole matrices as there are processes, and their orthogonalised forms."""
        if self._optimizer.name != "muon":
            return 0
        matrices = [part for group in self.parts.layers for part in group.parts if len(part.shape) == 2]
        num_processes = self.grid.dp * self.grid.tp
        sizes = [part.shape[0] * part.shape[1] for part in matrices]
        rounds = (sizes[first : first + num_processes] for first in range(0, len(sizes), num_processes))
        return max(2 * sum(round_sizes) for round_sizes in rounds) * ITEMSIZE[self._optimizer.muon_dtype]


def _narrow_moment(num_elements: int) -> int:
    """Bytes of torchao's 8-bit moment: a byte an element and a float32 for each 256; small or odd ones stay float32."""
    if num_elements < 4096 or num_elements % 256:
        return FLOAT32 * num_elements
    return num_elements + FLOAT32 * num_elements // 256
