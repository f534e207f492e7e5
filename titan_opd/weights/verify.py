"""Whether an engine holds what the trainer sent: digests of bytes, and what they tell when they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from titan_opd.ops import multi_digest
from titan_opd.weights.errors import LayoutError, VerificationError
from titan_opd.weights.pieces import WeightSpec

_MOST_NAMED = 5


def digest(tensor: Tensor) -> int:
    """64 bits of a tensor's bytes (`titan_opd.ops.multi_digest`), as a signed integer; equal on every device."""
    return multi_digest([tensor])[0]


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
