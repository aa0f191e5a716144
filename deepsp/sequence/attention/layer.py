"""An attention layer on a sharded sequence that hides its exchanges behind its computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from deepsp.data.borders import ranges_of
from deepsp.ranks.agreement import compare_calls
from deepsp.ranks.groups import Group, member_of
from deepsp.ranks.lengths import lens_or_equal
from deepsp.sequence.attention import chunks as auto_chunks
from deepsp.sequence.attention import function as local
from deepsp.sequence.attention import parts, rope
from deepsp.sequence.attention.projections import biases, check_linears, head_sizes, is_wide
from deepsp.weights.partitioned import check_linears_here

_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


class SequenceParallelAttention(nn.Module):
    """An attention layer on a sharded sequence: projections, rotary embedding, attention over the
    full sequence and output projection.

    With ``overlap``, every exchange is in flight during compute, in forward and backward: a rank's
    part of q, k and v while the next is projected; a chunk of heads while attention works on
    another; the output while the output projection multiplies the parts received so far; the
    gradient of attention's output while that of the output weight is computed. It uses no streams
    and no hooks. The sharding is that of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509).

    Args:
        hidden_size: the number of features of the input and the output.
        num_heads: the number of query heads; any number, more or fewer than ranks.
        num_kv_heads: the number of key and value heads; divides ``num_heads``. None: ``num_heads``.
        head_dim: the number of features of a head; None: ``hidden_size // num_heads``.
        bias: whether the projections of q, k and v have a bias.
        out_bias: whether the output projection has one; None: as ``bias``.
        rope_theta: the base of a rotary embedding of q and k; None: no embedding, or ``rotary``.
        rope_interleaved: the pairs are channels (2i, 2i + 1) instead of (i, i + D/2).
        rotary: the rotary embedding of a model that scales it or rotates only some channels. Either
            a function ``rotary(x, position_ids)``, called with position_ids [1 or B, S] of the full
            sequence, that returns cos and sin as those of transformers do; or the pair (cos, sin)
            itself, for the full sequence: [S, R] or [1 or B, S, R]. The first R channels of a head
            are rotated, so both halves of R (or channels 2i and 2i + 1, interleaved) have the same
            cos and sin.
        q_norm: a module applied before the rotary embedding to each head of q, [..., head_dim], or,
            if it is that wide, to all heads together, [..., num_heads * head_dim]. Its gradients
            are partial like all others.
        k_norm: the same for k.
        local_attention: called as ``local_attention(q, k, v, *args, **kwargs)`` with q [B, S, h,
            D], k and v [B, S, h_kv, D], once for each chunk, as in :class:`DistributedAttention`;
            it must not write to k and v, which chunks may share. It gets ``head_indices`` and
            ``query_indices`` if it declares those arguments; with the latter, q is [B, n, h, D] if
            a head's queries are split. None: ``scaled_dot_product_attention``.
        chunks: the number of parts of each rank's heads; at most as many as leave every rank a
            query head in each. "auto": measured on the first call with a shape, by forward and
            backward passes of this layer (forward only without gradients) with 1, 2, 4, ... chunks,
            the same on every rank. Compiled code uses the last choice.
        overlap: False: projections, one exchange, attention, one exchange and projection, one after
            another; for comparison.
        query_parts: as in :func:`distributed_attention`, but "auto" is 1 if there are at least as
            many heads as ranks: with split queries, received blocks are put together before they
            are multiplied, so that less is hidden.
        group: the sequence group.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: sizes that don't fit each other or the group.

    The rotary embedding (and the norms of each head) come after the exchange: matrix products are
    then written straight into the send buffer, and the embedding runs while other chunks are in
    flight. Norms over all heads come before the exchange, so no product hides the exchange of q, k
    and v.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        rope_theta: float | None = None,
        rope_interleaved: bool = False,
        rotary: Callable | tuple[Tensor, Tensor] | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        local_attention: Callable[..., Tensor] | None = None,
        chunks: int | str = 1,
        overlap: bool = True,
        query_parts: int | str = "auto",
        group: Group = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"expected num_heads >= 1, got {num_heads}")
        if head_dim is None:
            if hidden_size % num_heads != 0:
                raise ValueError(
                    f"expected hidden_size to be a multiple of num_heads ({num_heads}), got "
                    f"{hidden_size}; pass head_dim"
                )
            head_dim = hidden_size // num_heads
        kv_size = (num_heads if num_kv_heads is None else num_kv_heads) * head_dim
        factory = {"device": device, "dtype": dtype}
        if out_bias is None:
            out_bias = bias
        projections = (
            nn.Linear(hidden_size, num_heads * head_dim, bias=bias, **factory),
            nn.Linear(hidden_size, kv_size, bias=bias, **factory),
            nn.Linear(hidden_size, kv_size, bias=bias, **factory),
            nn.Linear(num_heads * head_dim, hidden_size, bias=out_bias, **factory),
        )
        self._set_up(
            projections,
            num_heads,
            True,
            rope_theta=rope_theta,
            rope_interleaved=rope_interleaved,
            rotary=rotary,
            q_norm=q_norm,
            k_norm=k_norm,
            local_attention=local_attention,
            chunks=chunks,
            overlap=overlap,
            query_parts=query_parts,
            group=group,
        )

    @classmethod
    def from_projections(
        cls,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
        num_heads: int,
        *,
        register: bool = True,
        **options,
    ) -> SequenceParallelAttention:
        """Makes a layer from the projections of an existing one; the parameters are shared, not
        copied.

        Args:
            q_proj: an ``nn.Linear`` to ``num_heads * head_dim`` features.
            k_proj: an ``nn.Linear``, from whose size the number of kv heads follows.
            v_proj: an ``nn.Linear``, with as many heads as ``k_proj``.
            o_proj: an ``nn.Linear`` from all heads of v, one for each query head.
            num_heads: the number of query heads.
            register: True: the projections (and norms) become submodules ``q_proj``, ``k_proj``,
                ``v_proj``, ``o_proj`` (``q_norm``, ``k_norm``) of the new module. False: they stay
                the caller's, whose ``state_dict`` keys don't change.
            options: the constructor's arguments from ``rope_theta`` to ``group``. ``rope_theta`` or
                ``rotary`` is required, and may be None: projections don't show whether their layer
                has a rotary embedding.

        Returns:
            A :class:`SequenceParallelAttention`.

        Raises:
            ValueError: a projection isn't a plain ``nn.Linear``, or has hooks (which wouldn't run);
                neither ``rope_theta`` nor ``rotary`` is given; sizes that don't fit.
        """
        if "rope_theta" not in options and "rotary" not in options:
            raise ValueError(
                "expected rope_theta or rotary, got neither; projections don't show whether their "
                "layer has a rotary embedding. Pass rope_theta, rotary (the model's rotary "
                "embedding), or rope_theta=None if it has none"
            )
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_up((q_proj, k_proj, v_proj, o_proj), num_heads, register, **options)
        return layer

    def _set_up(
        self,
        projections,
        num_heads,
        register,
        *,
        rope_theta=None,
        rope_interleaved=False,
        rotary=None,
        q_norm=None,
        k_norm=None,
        local_attention=None,
        chunks=1,
        overlap=True,
        query_parts="auto",
        group=None,
    ) -> None:
        projections = dict(zip(_NAMES, projections, strict=True))
        check_linears(projections)
        self.member = member_of(group)
        self.num_heads = num_heads
        self.head_dim, self.num_kv_heads, self.v_head_dim = head_sizes(projections, num_heads)
        rope.check(rope_theta, rotary, self.head_dim)
        local.check_function(
            local_attention,
            "bshd",
            "no local_attention, which is scaled_dot_product_attention, or a function that "
            "transposes q, k, v and the output",
        )
        auto_chunks.check(chunks)
        self.rope_theta = rope_theta
        self.rope_interleaved = rope_interleaved
        self.local_attention = local_attention
        self._indices = local.indices_wanted(local_attention)
        self._watch = local.Watch(local_attention)
        self.query_parts = parts.validate(query_parts, group)
        size = self.member[1]
        self._parts = 1
        if self.query_parts != "auto" or num_heads < size:  # whole heads hide more
            reason = local.why_whole(local_attention, self._indices)
            self._parts = parts.resolve(self.query_parts, num_heads, size, why_whole=reason)
        self._compared = False
        self.chunks = chunks
        self.picked: int | None = None  # the last choice of "auto"
        self.overlap = overlap
        self._wide = (
            is_wide("q_norm", q_norm, num_heads, self.head_dim),
            is_wide("k_norm", k_norm, self.num_kv_heads, self.head_dim),
        )
        modules = {**projections, "q_norm": q_norm, "k_norm": k_norm}
        # A tuple keeps a rotary module out of this module's state: it belongs to the model.
        self._rotary = (rotary,)
        if register:
            for name, module in modules.items():
                self.register_module(name, module)
        self._modules_used = None if register else tuple(modules.values())

    def _used(self) -> tuple:
        """The four projections and two norms. A tuple keeps unregistered ones out of the state."""
        if self._modules_used is not None:
            return self._modules_used
        return self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.q_norm, self.k_norm

    def extra_repr(self) -> str:
        rank, size, _ = self.member
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, chunks={self.chunks!r}, overlap={self.overlap}, "
            f"rank={rank}, size={size}"
        )

    def forward(
        self,
        x: Tensor,
        *args,
        position_ids: Tensor | None = None,
        rotary: Callable | tuple[Tensor, Tensor] | None = None,
        seq_lens: Sequence[int] | None = None,
        **kwargs,
    ) -> Tensor:
        """The layer's output for this rank's tokens.

        Args:
            x: [B, S_r, hidden_size], in the dtype of the parameters (or under autocast).
            args: passed to the local attention. For ``scaled_dot_product_attention``, positional or
                by name: ``attn_mask`` (of the full sequence), ``dropout_p``, ``is_causal``,
                ``scale``; and by name ``documents``, ``window_size``, ``softcap``, ``sinks``, as in
                :func:`distributed_attention`.
            position_ids: [S] or [B, S], of the full sequence, for the rotary embedding; None: 0, 1,
                2, ..., or those of ``documents`` that are :class:`Segments`.
            rotary: in place of the constructor's, such as the (cos, sin) that a model computes once
                for all of its layers, for the full sequence.
            seq_lens: the number of tokens of each rank; None: all ranks have as many as this one.
            kwargs: passed to the local attention.

        Returns:
            [B, S_r, hidden_size].

        Raises:
            ValueError: arguments that don't fit each other or the group; DeepSpeed's ZeRO 3 has
                partitioned the parameters, and this isn't the forward of an engine.
        """
        if x.dim() != 3:
            raise ValueError(
                f"expected x to have 3 dimensions [batch, sequence, hidden_size], got {x.dim()}"
            )
        projections = dict(zip(_NAMES, self._used()[:4], strict=True))
        check_linears(projections)  # they may have changed
        if not torch.compiler.is_compiling():
            called = _NAMES if not self.overlap else _NAMES[:3] if any(self._wide) else ()
            check_linears_here(projections, called)
        lens = lens_or_equal(seq_lens, x.size(1), self.member[1])
        documents = kwargs.get("documents")
        if self.local_attention is None:
            local.check_sdpa_arguments(
                args, kwargs, ("attn_mask", "dropout_p", "is_causal", "scale")
            )
            if documents is not None:
                kwargs |= {"documents": ranges_of(documents, x.size(0), sum(lens), tree=True)}
            local.check_sdpa(x, sum(lens), self.num_heads, *args, **kwargs)
        local.check_kwargs(self._indices, kwargs)
        turn = rope.angles_of(
            x,
            sum(lens),
            position_ids,
            self._rotary[0] if rotary is None else rotary,
            theta=self.rope_theta,
            head_dim=self.head_dim,
            interleaved=self.rope_interleaved,
            look=not self._compared and not torch.compiler.is_compiling(),
            documents=None if self.local_attention else documents,
        )
        if not self._compared and not torch.compiler.is_compiling():
            self._compare(x, lens)
        count = self.chunks if self.overlap else 1
        if count == "auto":
            count = self._pick_chunks(x, lens, turn, args, kwargs)
        draws = self.local_attention is not None or local.drops(*args, **kwargs)
        with local.randomness_of(self.member, x.device) if draws else nullcontext():
            return self._run(x, lens, turn, count, args, kwargs)

    def _run(self, x, lens, turn, chunks, args, kwargs) -> Tensor:
        rank, _, name = self.member
        ops, query_parts = torch.ops.deepsp, self._parts
        q_proj, k_proj, v_proj, o_proj, _, _ = self._used()
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        dims = [self.head_dim, self.head_dim, self.v_head_dim]
        projects = self.overlap and not any(self._wide)
        if projects:
            projections = (q_proj, k_proj, v_proj)
            weights = [p.weight for p in projections]
            biased, how = biases(projections), {"query_parts": query_parts}
            arriving = ops._project_to_heads_start(
                x, weights, biased, heads, lens, chunks, False, rank, name, **how
            )
        else:
            arriving = ops.seq_to_heads_start(
                self._projected(x), lens, chunks, False, rank, name, query_parts=query_parts
            )

        def attend(part: parts.CellInputs) -> Tensor:
            out = self._attend(part, args, kwargs)
            if self.overlap and local.autocasts(out.device):  # cast early, as a linear layer would
                out = out.to(torch.get_autocast_dtype(out.device.type))
            return out

        leaving, dim = parts.attend(
            arriving,
            attend,
            (heads, dims, x.size(0)),
            lens,
            self.member,
            query_parts,
            tokens_first=None if projects else False,
            merged=not self.overlap,
            on_arrival=lambda heads, which, tokens: self._turned(heads, which, turn, tokens),
        )
        if self.overlap:
            output, how = (o_proj.weight, o_proj.bias), {"query_parts": query_parts}
            return ops._heads_to_output_wait(
                leaving, *output, self.num_heads, x.size(0), lens, rank, name, **how
            )
        (x,) = ops.heads_to_seq_wait(
            leaving, heads[:1], [dim], x.size(0), lens, rank, name, query_parts=query_parts
        )
        return o_proj(x.flatten(2))

    def _projected(self, x: Tensor) -> list[Tensor]:
        """q, k and v [B, S_r, h, D] of this rank's tokens, with the norms over all heads."""
        q_proj, k_proj, v_proj, _, q_norm, k_norm = self._used()
        q, k, v = q_proj(x), k_proj(x), v_proj(x)
        # Under autocast a norm's result may be wider than v, with which it is sent.
        q = q_norm(q).to(v.dtype) if self._wide[0] else q
        k = k_norm(k).to(v.dtype) if self._wide[1] else k
        return [
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            v.unflatten(-1, (self.num_kv_heads, self.v_head_dim)),
        ]

    def _turned(self, x: Tensor, which: int, turn, tokens) -> Tensor:
        """Applies norm and rotary embedding to heads of q or k (0 or 1), for ranges of tokens. v,
        and a tensor without heads, stay as they are."""
        if which == 2 or x.size(2) == 0:
            return x
        norm = self._used()[4 + which]
        if norm is not None and not self._wide[which]:
            x = norm(x)
        if turn is None:
            return x
        if self._parts != 1 and which == 0:  # only some tokens of the full sequence
            turn = [
                torch.cat([t.narrow(-3, begin, end - begin) for begin, end in tokens], -3)
                for t in turn
            ]
        return rope.rotate(x, *turn, self.rope_interleaved)

    def _attend(self, part: parts.CellInputs, args, kwargs) -> Tensor:
        qkv = (part.q, part.k, part.v)
        if self.local_attention is None:
            return local.sdpa(*qkv, *args, **kwargs, where=(self.num_heads, *part.where))
        indices = local.indices(self._indices, part.q, part.cell)
        return local.attend(
            self.local_attention, qkv, args, kwargs | indices, self._watch, head_dim=self.v_head_dim
        )

    def _compare(self, x: Tensor, lens: list[int]) -> None:
        trains = torch.is_grad_enabled()
        of_parameters = [
            [p.requires_grad for p in m.parameters()] for m in self._used() if m is not None
        ]
        self._compared = compare_calls(
            "SequenceParallelAttention",
            self.member,
            x,
            seq_lens=lens,
            shape=[x.size(0), x.size(2)],
            heads=[self.num_heads, self.num_kv_heads],
            head_dims=[self.head_dim, self.v_head_dim],
            dtype=x.dtype,
            chunks=self.chunks,
            overlap=self.overlap,
            query_parts=self.query_parts,
            gradients=[trains and x.requires_grad, trains and of_parameters],
        )

    def _pick_chunks(self, x, lens, turn, args, kwargs) -> int:
        if torch.compiler.is_compiling():
            return auto_chunks.picked_before(self.picked)
        _, _, name = self.member
        trains = torch.is_grad_enabled()
        autocast = local.autocasts(x.device)
        heads = (self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        mode = (x.size(0), x.size(2), x.dtype, x.device, trains, autocast)
        used = [p for m in self._used() if m is not None for p in m.parameters()]
        parameters = [p for p in used if p.requires_grad] if trains else []
        self.picked = auto_chunks.pick(
            (name, *heads, tuple(lens), *mode),
            lambda chunks, inputs: self._run(*inputs, lens, turn, chunks, args, kwargs),
            [x],
            parameters,
            self.member,
            num_heads=self.num_heads,
            query_parts=self._parts,
            trains=trains,
        )
        return self.picked
