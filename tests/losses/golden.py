"""The stored cases: inputs of every objective, with loss, per-token values and gradients computed in float64.

`cases/cases.json` lists the settings, `cases/cases.safetensors` holds the tensors under "<case>/<name>".
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from titan_opd.losses import Objective, TeacherScores

FOLDER = Path(__file__).parent / "cases"
SCORE_FIELDS = {
    "ids": "ids",
    "labels": "labels",
    "valid": "valid",
    "behavior_support": "behavior_support",
    "behavior_logprobs": "behavior_logprobs",
    "proximal_logprobs": "proximal_logprobs",
    "logprobs": "teacher_logprobs",
    "tail_logprobs": "teacher_tail_logprobs",
    "hidden": "teacher_hidden",
    "lm_head_weight": "teacher_lm_head_weight",
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    settings: dict
    tensors: dict[str, Tensor]

    @property
    def objective(self) -> Objective:
        names = {field.name for field in dataclasses.fields(Objective)}
        settings = {name: value for name, value in self.settings.items() if name in names}
        return Objective(kind=self.settings["objective"], **settings)

    @property
    def scores(self) -> TeacherScores:
        return TeacherScores(**{field: self.tensors.get(name) for field, name in SCORE_FIELDS.items()})

    def to(self, dtype: torch.dtype) -> Case:
        """The same case with its inputs in another precision; what is expected stays in float64."""
        tensors = {
            name: value.to(dtype) if value.is_floating_point() and not name.startswith("expected") else value
            for name, value in self.tensors.items()
        }
        return Case(self.name, self.settings, tensors)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Fresh hidden states and output projection that require gradients."""
        return tuple(self.tensors[name].clone().requires_grad_() for name in ("hidden", "lm_head_weight"))


@functools.cache
def load_cases() -> dict[str, Case]:
    tensors_of: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(FOLDER / "cases.safetensors").items():
        name, _, field = key.partition("/")
        tensors_of.setdefault(name, {})[field] = value
    listing = json.loads((FOLDER / "cases.json").read_text())
    return {settings["name"]: Case(settings["name"], settings, tensors_of[settings["name"]]) for settings in listing}


CASE_NAMES = tuple(settings["name"] for settings in json.loads((FOLDER / "cases.json").read_text()))
