"""Classifiers of decoders: of sequences, such as reward models, and of tokens.

The decoder runs on this rank's tokens, and the head's outputs are gathered for all tokens. So the
model's own code pools the last token of each row, wherever it is, and computes its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepsp.data.roles import table_of
from deepsp.integrations.proof.cut import TOKENS, densest
from deepsp.integrations.transformers.steps import Compute, FullStep


def cut_rows(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A cut of a batch of full rows that belong together, as :meth:`FullStep.cuts` returns it: the
    last tokens of prompts, and the first ones of completions."""
    batch = dict(inputs)
    for prefix in ("KL_", "prompt_", "completion_", ""):
        ids = next((inputs[n] for n in (f"{prefix}input_ids", f"{prefix}ids") if n in inputs), None)
        if ids is None or "pixel_values" in inputs:
            continue
        first = 0
        if prefix == "prompt_":
            first = max(0, ids.size(1) - TOKENS)
        elif (mask := inputs.get(f"{prefix}completion_mask")) is not None:
            first = densest((mask != 0).sum(0).cpu(), min(TOKENS, ids.size(1)))
        for name, x in inputs.items():
            of_tokens = isinstance(x, Tensor) and x.dim() >= 2 and x.size(1) == ids.size(1)
            if of_tokens and (name.startswith(prefix) or prefix == "completion_"):
                batch[name] = x[:, first : first + TOKENS]
    return batch, batch, table_of(batch)


class ClassifierStep(FullStep):
    """A step of a classifier, which takes full rows and computes its loss itself."""

    evaluates_all_groups = False

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        return compute(model, inputs, return_outputs, count)

    def cuts(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        return cut_rows(inputs)

    def shortened(self, inputs: Mapping[str, Any], is_alone: bool) -> dict[str, Any]:
        return cut_rows(inputs)[0]
