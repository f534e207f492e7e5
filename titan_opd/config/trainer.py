"""How the student is trained and spread over the processes: the sections [training], [parallel] and [optimizer].

What is common to all sections stands in `schema.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.engines import DTYPES
from titan_opd.config.float8 import Float8Config
from titan_opd.config.options import MAX_SECONDS, check_section, option


@dataclass(frozen=True)
class TrainingConfig:
    """The size of a step."""

    steps: int = option(doc="batches to train on; the policy version rises once a batch", minimum=1)
    tokens_per_microbatch: int = option(8192, "packed tokens, prompts included, in one forward-backward", minimum=1)
    compute_dtype: str = option(
        "float32",
        "of the student's layers while training; weights, gradients and optimizer stay float32",
        choices=DTYPES,
    )
    recompute_activations: str = option(
        "none",
        "what the backward pass computes again instead of keeping it: 'full': all of a layer but its input (least "
        "memory, a third more computation); 'selective': all but attention and what crosses processes",
        choices=("none", "full", "selective"),
    )
    compile: bool = option(False, "compile each layer with torch.compile: slow first steps, fewer kernels after them")
    logits_chunk_mb: float = option(
        256.0, "memory of one chunk of logits in the loss head and the scorer, MiB", above=0
    )
    float8: Float8Config = option(Float8Config, "8-bit products")

    def __post_init__(self) -> None:
        check_section(self, "training")
        if self.float8.recipe != "none" and not self.float8.emulate and self.compute_dtype != "bfloat16":
            raise ValueError(
                f"training.float8.recipe = {self.float8.recipe!r} has products in bfloat16, and training.compute_dtype "
                f"= {self.compute_dtype!r}; set it to 'bfloat16', or leave float8 out"
            )
        if self.compile and self.recompute_activations == "selective":
            raise ValueError(
                "training.compile = true decides by itself which products a layer keeps, so "
                "training.recompute_activations = 'selective' has no effect; set it to 'none' or 'full'"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How the trainer's processes share the student; titan_opd/parallel/README.md says what each way costs.

    The processes that torchrun starts are dp_replicate x dp_shard x tp.
    """

    dp_replicate: int = option(1, "copies of the sharded student; each trains other samples (HSDP)", minimum=1)
    dp_shard: int = option(
        -1, "processes that share one copy's parameters, each with samples of its own (FSDP); -1: all that are left"
    )
    tp: int = option(
        1,
        "processes that split every matrix and work on the same samples (tensor parallel); divides the heads",
        minimum=1,
    )
    sequence_parallel: bool = option(
        False, "between the matrices the processes of `tp` have tokens of their own: less memory, the same traffic"
    )
    reshard_after_forward: bool = option(
        True,
        "free a layer's gathered parameters after its forward pass; false: they stay until the last backward pass of "
        "the step: more memory, one gather a step",
    )
    prefetch: int = option(0, "layers gathered ahead of their use; 0: FSDP's own choice", minimum=0)
    reduce_gradients: str = option(
        "last",
        "when gradients are summed over processes: after a step's last micro-batch (each process holds a whole "
        "gradient until then), or after each (shards of it only)",
        choices=("last", "each"),
    )
    cpu_offload: bool = option(False, "parameters, gradients and optimizer state live in the host's memory")
    timeout_seconds: float = option(
        1800.0,
        "a process that has waited so long for the others ends and says for whom; above the longest time that one of "
        "them writes or scores answers alone",
        above=0,
        maximum=MAX_SECONDS,
    )

    def __post_init__(self) -> None:
        check_section(self, "parallel")
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"parallel.dp_shard = {self.dp_shard} must be a number of processes, or -1 for the rest")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "parallel.sequence_parallel = true splits tokens among the processes of parallel.tp, which is 1; "
                "set parallel.tp, or leave it out"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with warm-up and decay."""

    name: str = option(
        "adamw",
        "'adamw', fused; 'adamw_8bit': the same with moments of 8 bits (torchao, an extra); 'muon': orthogonalised "
        "momentum for the matrices within layers, AdamW for the rest",
        choices=("adamw", "adamw_8bit", "muon"),
    )
    learning_rate: float = option(1e-4, "peak learning rate", minimum=0)
    betas: tuple[float, float] = option((0.9, 0.95), "decay of the first and second moments", minimum=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", above=0)
    momentum: float = option(0.95, "of 'muon'", minimum=0, below=1)
    muon_dtype: str = option("bfloat16", "of the products by which 'muon' orthogonalises", choices=DTYPES)
    weight_decay: float = option(0.0, "decoupled decay of the matrices; norms and biases have none", minimum=0)
    max_grad_norm: float = option(1.0, "the gradient's global 2-norm is clipped to this; 0 does not clip", minimum=0)
    warmup_steps: int = option(0, "optimizer steps of linear warm-up from 0", minimum=0)
    decay: str = option("cosine", "shape after the warm-up", choices=("constant", "linear", "cosine"))
    final_fraction: float = option(0.1, "learning rate at the last step over its peak", minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check_section(self, "optimizer")
        plain = OptimizerConfig.__dataclass_fields__
        for option_name in ("momentum", "muon_dtype"):
            value = getattr(self, option_name)
            if self.name != "muon" and value != plain[option_name].default:
                raise ValueError(
                    f"optimizer.{option_name} = {value!r} has no effect with optimizer.name = {self.name!r}; leave it "
                    "out, or set the name to 'muon'"
                )
