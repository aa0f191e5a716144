"""A module around a recurrence: a function whose output at a token depends on the tokens before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepsp.data.borders import ranges_of
from deepsp.ranks.agreement import compare_calls
from deepsp.ranks.groups import Group, Member, member_of
from deepsp.ranks.lengths import lens_or_equal
from deepsp.sequence.attention.function import declared_by
from deepsp.sequence.attention.parts import local_heads
from deepsp.sequence.recurrence.run import Recurrence, name_of, pieces_of
from deepsp.sequence.recurrence.state import Decay, by_state, state_shape

_STATES = ("heads", "pass", "auto")


class DistributedRecurrence(nn.Module):
    """Makes a recurrence over a sequence exact where each rank holds consecutive tokens of it: the
    twin of :class:`DistributedAttention` for linear attention, gated delta rules, state space
    models.

    There are two ways. By heads, the function sees all tokens of some heads: heads are split over
    the ranks like ``torch.tensor_split``, as in :func:`seq_to_heads`. By state, each rank runs its
    own tokens of all heads, and only the state travels, whose size doesn't depend on the tokens
    (as in fla's context parallelism and LASP-2, arXiv:2502.07563).

    Args:
        function: called with the arguments of the module, by name, of some heads or tokens; returns
            the output [B, S, h, V], or a tuple that begins with it. If it declares ``cu_seqlens``
            (by name), packed documents are one call with B = 1; else each of them is a call.
        group: the sequence group.
        value: the name of the argument [B, S_r, H, V] whose heads are split. Other tensors of 3 or
            4 dimensions are [B, S_r, H_i] or [B, S_r, H_i, D_i]; H_i divides H, and head j of
            ``value`` reads head ``j // (H // H_i)``. The function gets a number of heads that
            divides h.
        per_head: names of arguments [H, ...], such as decays, of which the function gets those of
            its heads. Their gradients are a rank's share, as those of all parameters.
        state: "heads"; "pass"; or "auto": the one that sends fewer bytes, the same on every rank.
            "heads" needs a head for each rank. "pass" needs a function that takes
            ``initial_state`` [B, H, K, V] and ``output_final_state=True``, returns ``(output, final
            state)``, and is affine in ``value`` and the state: output and final state are the sum
            of those with no initial state and of those where ``value`` is zero.
        decay: where the state only decays by a number a head: called with the same arguments,
            returns the logarithm of the decay at each token, [B, S, H]. None: the decay is a matrix
            (delta rules), which a second run of ``function`` finds: with the identity as its
            initial state, and zeros in the place of ``value``.
        read: with ``decay``, what reads the state at each token: called with the same arguments,
            returns [B, S, H, K]. What the state adds to the output is their product, decayed.

    Raises:
        ValueError: ``state`` isn't one of these, ``decay`` without ``read``, or ``function`` lacks
            what ``state`` needs; when called, arguments that don't fit each other or the group, or
            what ``function`` returns.

    By heads, tensors of each dtype travel in one exchange there, and the output in one back. The
    first call compares shapes, dtypes and lengths across the group.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        group: Group = None,
        *,
        value: str = "value",
        per_head: Sequence[str] = (),
        state: str = "heads",
        decay: Callable[..., Tensor] | None = None,
        read: Callable[..., Tensor] | None = None,
    ):
        super().__init__()
        if state not in _STATES:
            raise ValueError(f"expected state to be 'heads', 'pass' or 'auto', got {state!r}")
        if (decay is None) != (read is None):
            raise ValueError(
                "expected decay and read together, got one of them; pass both, or neither: then "
                "the function is run once more"
            )
        declared = declared_by(function)
        self._passes = {"initial_state", "output_final_state"} <= declared
        if state == "pass" and not self._passes:
            raise ValueError(
                "expected, with state='pass', a function that declares the arguments "
                f"initial_state and output_final_state, got {name_of(function)} with "
                f"{', '.join(sorted(declared)) or 'none'}; use state='heads', or wrap it"
            )
        self.function = function
        self.member = member_of(group)
        self.value = value
        self.per_head = tuple(per_head)
        self.state = state
        self.decay = None if decay is None else Decay(decay, read)
        self.chosen: str | None = None
        """What the last call did: "heads" or "pass"."""
        self._compared = False
        self._state_shapes: dict[tuple, tuple[int, int]] = {}

    def extra_repr(self) -> str:
        rank, size, _ = self.member
        chosen = f" ({self.chosen})" if self.state == "auto" and self.chosen else ""
        return f"{name_of(self.function)}, rank={rank}, size={size}, state={self.state!r}{chosen}"

    def forward(
        self,
        *,
        documents: Tensor | None = None,
        seq_lens: Sequence[int] | None = None,
        **arguments: Any,
    ) -> Tensor:
        """The output of this rank's tokens.

        Args:
            documents: as in :func:`distributed_attention`: the state is zero at the first token of
                each document. Tokens that are in none are as many documents as there are gaps.
            seq_lens: the number of tokens of each rank; None: all ranks have as many as this one.
            arguments: those of the function. Tensors of 3 or 4 dimensions are this rank's tokens;
                those in ``per_head`` are those of all heads; others are passed as they are.

        Returns:
            [B, S_r, H, V].

        Raises:
            ValueError: arguments that don't fit each other or the group, or what the function
                returns.
        """
        tokens, per_head, rest = self.sort(arguments)
        value = tokens[self.value]
        lens = lens_or_equal(seq_lens, value.size(1), self.member[1])
        if value.size(1) != lens[self.member[0]]:
            raise ValueError(
                f"expected {self.value!r} to have the {lens[self.member[0]]} tokens that seq_lens "
                f"says for rank {self.member[0]}, got {value.size(1)}"
            )
        batch, total = value.size(0), sum(lens)
        if documents is not None:
            documents = ranges_of(documents, batch, total)
        if not self._compared and not torch.compiler.is_compiling():
            self._compared = compare_calls(
                "DistributedRecurrence",
                self.member,
                value,
                seq_lens=lens,
                shapes=[[n, *x.shape[:1], *x.shape[2:]] for n, x in tokens.items()],
                dtypes=[x.dtype for x in tokens.values()],
                state=self.state,
                gradients=[x.requires_grad for x in tokens.values()],
            )
        call = Recurrence(self.function, tokens, per_head | rest, self.value)
        self.chosen = self._choose(call, lens)
        if self.chosen == "pass":
            first = sum(lens[: self.member[0]])
            pieces = pieces_of(documents, batch, total, first, first + value.size(1))
            return by_state(call, pieces, self.member, self.decay)
        by_heads = _to_heads(tokens, self.value, lens, self.member)
        mine = local_heads(value.size(2), self.member)
        run = Recurrence(
            self.function,
            {n: _of_heads(x, by_heads[n], value.size(2), mine) for n, x in tokens.items()},
            {n: None if x is None else x[mine.start : mine.stop] for n, x in per_head.items()}
            | rest,
            self.value,
        )
        out = run.documents(pieces_of(documents, batch, total, 0, total))
        rank, _, name = self.member
        return torch.ops.deepsp.heads_to_seq([out], [value.size(2)], lens, rank, name)[0]

    def sort(self, arguments: dict[str, Any]) -> tuple[dict, dict, dict]:
        """Checks the arguments of a call, and sorts them.

        Args:
            arguments: by name, as in :meth:`forward`.

        Returns:
            Those with tokens, those in ``per_head``, and the rest.

        Raises:
            ValueError: they don't fit each other.
        """
        value = arguments.get(self.value)
        if not isinstance(value, Tensor) or value.dim() != 4:
            got = f"{value.dim()} dimensions" if isinstance(value, Tensor) else value
            raise ValueError(
                f"expected {self.value!r} to be a tensor [batch, sequence, heads, head_dim], got "
                f"{got}; name the argument whose heads are split: value=..."
            )
        heads = value.size(2)
        tokens, per_head, rest = {}, {}, {}
        for name, x in arguments.items():
            if name in self.per_head:
                per_head[name] = x
                if x is not None and x.size(0) != heads:
                    raise ValueError(
                        f"expected {name!r} to begin with the {heads} heads of {self.value!r}, got "
                        f"shape {tuple(x.shape)}"
                    )
            elif not isinstance(x, Tensor) or x.dim() not in (3, 4):
                rest[name] = x
            elif x.shape[:2] != value.shape[:2] or x.size(2) == 0 or heads % x.size(2):
                raise ValueError(
                    f"expected {name!r} to have shape [{value.size(0)}, {value.size(1)}, heads, "
                    f"...] with a number of heads that divides the {heads} of {self.value!r}, got "
                    f"{tuple(x.shape)}; name it in per_head if it has no tokens"
                )
            else:
                tokens[name] = x
        return tokens, per_head, rest

    def _choose(self, call: Recurrence, lens: list[int]) -> str:
        _, size, _ = self.member
        value = call.tokens[self.value]
        if self.state == "heads" or not self._passes or size == 1:
            if value.size(2) < size:
                raise ValueError(
                    f"expected {self.value!r} to have a head for each of the {size} ranks, got "
                    f"{value.size(2)}; pass state='pass' with a function that takes and returns "
                    "its state"
                )
            return "heads"
        if self.state == "pass" or value.size(2) < size:
            return "pass"
        shapes = tuple(x.shape[2:] for x in call.tokens.values())
        if shapes not in self._state_shapes:
            self._state_shapes[shapes] = state_shape(call)
        keys, values = self._state_shapes[shapes]
        maps = (1 if self.decay else keys * keys) + keys * values
        maps *= 2 if value.is_complex() else 1
        passed = bytes_by_state(value.size(0), value.size(2), maps, size)
        return (
            "heads" if bytes_by_heads(call.tokens, self.value, values, lens) <= passed else "pass"
        )


def bytes_by_heads(tokens: dict[str, Tensor], value: str, values: int, lens: list[int]) -> int:
    """What all ranks receive in forward, by heads; ``values``: V of the output."""
    (batch, _, heads, _), size, total = tokens[value].shape, len(lens), sum(lens)
    received = 0
    for rank, length in enumerate(lens):
        for x in tokens.values():
            begin, end, first, last = torch.ops.deepsp.head_split(heads, x.size(2), size, rank)
            columns = (last - first) * x[0, :0].flatten(1).size(1) // x.size(2)
            received += batch * (total - length) * columns * x.element_size()
        received += batch * length * (heads - (end - begin)) * values * tokens[value].element_size()
    return received


def bytes_by_state(batch: int, heads: int, maps: int, size: int) -> int:
    """The same by state, of float32; ``maps``: the numbers of a head's transition and update."""
    return size * (size - 1) * batch * heads * maps * 4


def _to_heads(
    tokens: dict[str, Tensor], value: str, lens: list[int], member: Member
) -> dict[str, Tensor]:
    """All tokens of this rank's heads: an exchange for each dtype."""
    rank, _, name = member
    heads = tokens[value].size(2)
    pending = []
    for dtype in dict.fromkeys(x.dtype for x in tokens.values()):
        names: list[str] = [n for n, x in tokens.items() if x.dtype == dtype]
        names.sort(key=lambda n: -tokens[n].size(2))
        inputs = [x if x.dim() == 4 else x.unsqueeze(3) for x in map(tokens.__getitem__, names)]
        if dtype.is_complex:  # no kernel sums complex gradients
            inputs = [torch.view_as_real(x).flatten(3) for x in inputs]
        if inputs[0].size(2) != heads:  # the first one's heads are dealt out
            inputs.insert(0, inputs[0].new_zeros(*inputs[0].shape[:2], heads, 1))
            names.insert(0, "")
        (buffer,) = torch.ops.deepsp.seq_to_heads_start(inputs, lens, 1, False, rank, name)
        shape = [x.size(2) for x in inputs], [x.size(3) for x in inputs], inputs[0].size(0)
        pending.append((names, buffer, shape))
    by_heads = {}
    for names, buffer, shape in pending:
        received = torch.ops.deepsp.seq_to_heads_wait(
            buffer, *shape, lens, 0, 1, rank, name, tokens_first=False
        )
        by_heads |= dict(zip(names, received, strict=True))
    for name, x in tokens.items():
        if x.is_complex():
            by_heads[name] = torch.view_as_complex(
                by_heads[name].unflatten(3, (-1, 2)).contiguous()
            )
    return by_heads


def _of_heads(full: Tensor, part: Tensor, heads: int, mine: range) -> Tensor:
    """Heads as the function takes them: a number that divides this rank's."""
    readers = heads // full.size(2)
    if part.size(2) > 1 and (mine.start % readers or mine.stop % readers):
        index = torch.arange(mine.start, mine.stop, device=part.device) // readers
        part = part[:, :, index - mine.start // readers]
    return part if full.dim() == 4 else part.squeeze(3)
