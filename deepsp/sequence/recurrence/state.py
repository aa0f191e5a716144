"""Recurrences by state: each rank runs its own tokens, and adds to their output what the state does
that the ranks before have left.

The state after some tokens is ``transition @ state + update``, and their output is that without a
state plus ``response @ state``. Both follow from two runs of the function; the ranks exchange
transitions and updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsp.ranks.groups import Member
from deepsp.sequence.recurrence.run import Piece, Recurrence


class Decay(NamedTuple):
    """How a state decays by a number a head: the logarithm of the decay [B, S, H], and what reads
    the state [B, S, H, K], as functions of the recurrence's arguments."""

    log: Callable[..., Tensor]
    read: Callable[..., Tensor]


def _respond(run: Recurrence, tokens: dict[str, Tensor], final: Tensor, decay: Decay | None):
    """Response [B, S, H, K] and transition of some tokens; ``final``: the state that they leave."""
    if decay is not None:
        log = decay.log(**tokens, **run.fixed).to(final.dtype).cumsum(1)
        read = decay.read(**tokens, **run.fixed).to(final.dtype)
        return read * log.exp().unsqueeze(3), log[:, -1].exp()
    keys = final.size(2)
    value = tokens[run.value]
    nothing = value.new_zeros(*value.shape[:3], keys)
    identity = torch.eye(keys, dtype=final.dtype, device=final.device)
    return run(
        tokens | {run.value: nothing},
        initial_state=identity.expand(*final.shape[:2], -1, -1).contiguous(),
        output_final_state=True,
    )


def state_shape(run: Recurrence) -> tuple[int, int]:
    """K and V of the state: of one token of zeros."""
    with torch.no_grad():
        one = {n: x.new_zeros(1, 1, *x.shape[2:]) for n, x in run.tokens.items()}
        _, state = run(one, initial_state=None, output_final_state=True)
    return state.size(2), state.size(3)


def by_state(
    run: Recurrence, pieces: list[list[Piece]], member: Member, decay: Decay | None
) -> Tensor:
    """The output of this rank's tokens, of all heads."""
    rank, size, name = member
    empty = run.tokens[run.value].size(1) == 0
    if empty:  # a token of zeros, so that it takes part in what the others do
        run.tokens = {n: F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1)) for n, x in run.tokens.items()}
        pieces = [[Piece(slice(0, run.tokens[run.value].size(0)), 0, 1, True)]]
    outputs, transitions, updates, responses = [], [], [], []
    for row in pieces:
        parts = []
        for piece in row:
            tokens = run.of(piece)
            out, final = run(tokens, initial_state=None, output_final_state=True)
            parts.append(out)
            if piece.begin == 0:
                # What is known of them without a second run: that nothing passes a border.
                response = None
                transition = final.new_zeros(
                    final.shape[:2] if decay else (*final.shape[:3], final.size(2))
                )
                if piece.continues:
                    response, through = _respond(run, tokens, final, decay)
                    transition = through if len(row) == 1 else transition
        outputs.append(torch.cat(parts, 1))
        transitions.append(transition)
        updates.append(final)
        responses.append(response)
    transition, update = torch.cat(transitions), torch.cat(updates)
    if empty:
        identity = torch.eye(update.size(2), dtype=update.dtype, device=update.device)
        transition = torch.zeros_like(transition) + (1 if decay else identity)
        update = update * 0
    state = torch.ops.deepsp._fold_states(transition, update, [update.size(0)] * size, rank, name)
    begin = 0
    for n, (out, response) in enumerate(zip(outputs, responses, strict=True)):
        of_row = state[begin : begin + out.size(0)]
        begin += out.size(0)
        # All ranks use the state, so that all take part in backward.
        added = of_row[:0].sum()
        if response is not None:
            added = torch.einsum("bshk,bhkv->bshv", response.to(state.dtype), of_row) + added
            added = F.pad(added, (0, 0, 0, 0, 0, out.size(1) - added.size(1)))
        outputs[n] = (out + added).to(out.dtype)
    out = torch.cat(outputs)
    return out[:, :0] if empty else out
