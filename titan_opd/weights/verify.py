"""Whether an engine holds what the trainer sent: digests of bytes, and what they tell when they differ.

The digest of a tensor whose bytes are the 32-bit words w_0 .. w_(n-1) (the last one filled up with zeros) is

    sum_i w_i k_(i mod B) K_(i div B) + c(n)   modulo 2^64,    B = 65,536,

with fixed odd 64-bit keys k, K drawn once from a seed. It depends on where a byte stands, so tensors whose halves are
exchanged differ. A change within one word always changes it, because an odd key times a number below 2^32 is not 0. For
other changes that know nothing of the keys the odds of the same digest are at most about 2^-33 (the worst: only the
words' highest bits change), and 2^-64 for scattered ones (multilinear hashing: Carter and Wegman, 1979). It is a check
against faults, not against an attacker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from titan_opd.weights.errors import LayoutError, VerificationError
from titan_opd.weights.pieces import WeightSpec

_BLOCK = 1 << 16  # words; 256 KiB stay in a core's cache while they are read
_MODULUS = 1 << 64
_KEYS: dict[torch.device, Tensor] = {}
_MOST_NAMED = 5


def digest(tensor: Tensor) -> int:
    """64 bits of a tensor's bytes, as a signed integer; equal on every device.

    Args:
        tensor: of any dtype and shape. One that is not contiguous is copied.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = _words(flat)
    keys = _keys(flat.device)
    total = len(flat) * flat.dtype.itemsize
    blocks = words.split(_BLOCK) if len(words) else ()
    sums = [(block * keys[: len(block)]).sum() for block in blocks]
    for index, value in enumerate(torch.stack(sums).tolist() if sums else ()):
        total += value * _mixed(index)
    total %= _MODULUS
    return total - _MODULUS if total >= _MODULUS // 2 else total


def _words(flat: Tensor) -> Tensor:
    if flat.dtype.itemsize >= 4:
        return flat.view(torch.int32)
    raw = flat.view(torch.uint8)
    if raw.storage_offset() % 4:
        raw = raw.clone()
    spare = -len(raw) % 4
    if spare:
        raw = torch.cat([raw, raw.new_zeros(spare)])
    return raw.view(torch.int32)


def _keys(device: torch.device) -> Tensor:
    if device not in _KEYS:
        generator = torch.Generator().manual_seed(0x7174616E)
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (_BLOCK,), generator=generator, dtype=torch.int64)
        _KEYS[device] = (keys | 1).to(device)
    return _KEYS[device]


def _mixed(index: int) -> int:
    """An odd 64-bit number (splitmix64's finalizer)."""
    value = (index + 1) * 0x9E3779B97F4A7C15 % _MODULUS
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % _MODULUS
    value = (value ^ value >> 27) * 0x94D049BB133111EB % _MODULUS
    return (value ^ value >> 31) | 1


# ---- Before a byte is written ----------------------------------------------------------------------------------------


def check_layout(
    offered: Mapping[str, WeightSpec], expected: Mapping[str, WeightSpec], *, version: int, worker: str
) -> None:
    """Refuse weights that are not exactly those of the engine's model.

    Args:
        offered: what the trainer sends, by Hugging Face name.
        expected: what the engine has.
        version: of the weights.
        worker: who has the engine.

    Raises:
        LayoutError: a name is missing or unknown, a shape or type differs; it names the tensors.
    """
    place = f"the weights of version {version} do not fit the engine of {worker}"
    missing, unknown = [name for name in expected if name not in offered], [n for n in offered if n not in expected]
    if missing:
        raise LayoutError(f"{place}: {len(missing)} of {len(expected)} parameters are missing: {_listed(missing)}")
    if unknown:
        raise LayoutError(f"{place}: it has no parameter for {_listed(unknown)}")
    for name, spec in expected.items():
        given = offered[name]
        if given.shape != spec.shape:
            raise LayoutError(f"{place}: {name!r} is of shape {list(given.shape)}, the engine's {list(spec.shape)}")
        if given.dtype != spec.dtype:
            raise LayoutError(
                f"{place}: {name!r} was cast to {given.dtype} and the engine stores {spec.dtype}; casting twice rounds "
                "twice: let the trainer cast to the engine's own type (rollout.dtype)"
            )


# ---- Afterwards ------------------------------------------------------------------------------------------------------


def check_digests(
    sent: Mapping[str, int],
    found: Mapping[str, int],
    *,
    previous: Mapping[str, int],
    version: int,
    worker: str,
    what: str,
) -> None:
    """Refuse bytes that are not those that were sent.

    Args:
        sent: digests of the cast bytes, at the trainer.
        found: digests of the same tensors at the engine.
        previous: digests of the version that the engine had before, where they are known, to say what went wrong.
        version, worker: for the error.
        what: was read at the engine: "stored" bytes or "written" ones.

    Raises:
        VerificationError: names the tensors and what they hold instead, as far as that can be told.
    """
    wrong = [name for name in found if found[name] != sent[name]]
    if not wrong:
        return
    owners = {value: name for name, value in sent.items()}
    reasons = []
    for name in wrong[:_MOST_NAMED]:
        reason = "differs from what was sent"
        if found[name] in owners:
            reason = f"holds the bytes of {owners[found[name]]!r}"
        elif found[name] == previous.get(name):
            reason = "has not changed: it holds the bytes of the version before"
        reasons.append(f"{name!r} {reason}")
    raise VerificationError(
        f"version {version} at {worker}: {len(wrong)} of {len(sent)} tensors are wrong in the {what} bytes: "
        + "; ".join(reasons)
        + ("; ..." if len(wrong) > _MOST_NAMED else "")
    )


def check_moved(
    sent: Mapping[str, int],
    previous: Mapping[str, int],
    before: Mapping[str, int],
    fingerprint: Callable[[str], int | None],
    *,
    version: int,
    worker: str,
) -> None:
    """Refuse an update after which a parameter that changed at the trainer is still the old one at the engine.

    For storage that cannot be read as it was sent (packed, quantised): all that is known of it is whether it changed.

    Args:
        sent, previous: digests of this version's cast bytes and of those of the version that the engine had.
        before: fingerprints at the engine before the update.
        fingerprint: gives them now.
        version, worker: for the error.

    Raises:
        VerificationError: names the parameters.
    """
    changed = [name for name in before if name in previous and sent[name] != previous[name]]
    still = [name for name in changed if fingerprint(name) == before[name]]
    if still:
        raise VerificationError(
            f"version {version} at {worker}: {_listed(still)} changed at the trainer and not at the engine: the update "
            "did not reach them"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown}, ..."
