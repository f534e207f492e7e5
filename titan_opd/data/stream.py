"""Prompts as one endless stream of samples across epochs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_opd.data.records import Prompt, Sample


class PromptStream:
    """Samples in the order in which the run asks for them.

    A sample's number decides everything about it: numbers count from 0, each prompt's `samples_per_prompt` samples
    follow each other, and an epoch passes over all prompts once, in an order drawn from (seed, epoch). So the state
    of a stream is one number, and two streams of equal settings agree whatever was taken from them in whatever bites.

    Args:
        prompts: at least one.
        shuffle: a new order in each epoch; otherwise the order of `prompts` in all of them.
        seed: of the order.
        samples_per_prompt: samples of a prompt in each epoch.

    Raises:
        ValueError: there is no prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, samples_per_prompt: int) -> None:
        if not prompts:
            raise ValueError("there are no training prompts; set data.train to a file that has some")
        assert samples_per_prompt >= 1
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._samples_per_prompt = samples_per_prompt
        self._next_number = 0
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, its order), of the epoch that was asked for last

    def take(self, count: int) -> list[Sample]:
        """The next `count` samples."""
        first = self._next_number
        self._next_number += count
        return [self._sample(number) for number in range(first, first + count)]

    def _sample(self, number: int) -> Sample:
        position, repeat = divmod(number, self._samples_per_prompt)
        epoch, place = divmod(position, len(self._prompts))
        prompt = self._prompts[int(self._epoch_order(epoch)[place])]
        return Sample(number=number, epoch=epoch, repeat=repeat, prompt=prompt)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            count = len(self._prompts)
            if self._shuffle:
                order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(count)
            else:
                order = np.arange(count)
            self._order = (epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and the settings that make it this stream."""
        return {"next_number": self._next_number, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises:
            ValueError: when the settings or the prompts are not those of the stream that `state` was taken from.
        """
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(
                    f"cannot resume the stream of prompts: {name} was {state[name]!r} and is now {value!r}; resume "
                    "with the data and the settings the run began with, or begin a new run"
                )
        self._next_number = state["next_number"]

    def _settings(self) -> dict[str, Any]:
        return {
            "shuffle": self._shuffle,
            "seed": self._seed,
            "samples_per_prompt": self._samples_per_prompt,
            "num_prompts": len(self._prompts),
            "prompts_digest": prompts_digest(self._prompts),
        }


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A digest of the prompts' names and tokens, in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}\n{len(prompt.token_ids)}\n".encode())
        digest.update(prompt.token_ids.numpy().tobytes())
    return digest.hexdigest()
