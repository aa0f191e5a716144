"""Classifiers of decoders: of sequences, such as reward models, and of tokens.

The decoder runs on this rank's tokens, and the head's outputs are gathered for all tokens. So the
model's own code pools the last token of each row, wherever it is, and computes its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepsp.integrations.proof.cut import cut_rows
from deepsp.integrations.transformers.steps import Compute, FullStep


class ClassifierStep(FullStep):
    """A step of a classifier, which takes full rows and computes its loss itself."""

    evaluates_all_groups = False

    def loss(self, compute: Compute, model, inputs, return_outputs: bool, count) -> Any:
        return compute(model, inputs, return_outputs, count)

    def cuts(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        return cut_rows(inputs)

    def shortened(self, inputs: Mapping[str, Any], is_alone: bool) -> dict[str, Any]:
        return cut_rows(inputs)[0]
