"""A whole attention layer on a sharded sequence, its exchanges hidden behind its own compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from deepsp import chunks as auto_chunks
from deepsp import local, rope
from deepsp.groups import Group, compare_calls, member_of
from deepsp.layout import lens_or_equal

_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


class SequenceParallelAttention(nn.Module):
    """Projections, rotary embedding, attention over the whole sequence and output projection, of
    which each rank holds a part of the tokens.

    With ``overlap`` every exchange travels during compute, in forward and backward: a rank's part
    of q, k and v while the next is projected; a chunk of heads while attention works on another;
    the output while the output projection adds up what is there; the gradient of the attention's
    output while the output weight's gradient is computed. No part of it needs streams or hooks.

    Args:
        hidden_size: features of the input and the output.
        num_heads: query heads, at least as many as the group has ranks.
        num_kv_heads: key and value heads; divides ``num_heads``. None: as many.
        head_dim: None: ``hidden_size // num_heads``.
        bias: of q, k and v.
        out_bias: of the output projection; None: as ``bias``.
        rope_theta: base of a rotary embedding of q and k; None: none.
        rope_interleaved: pairs are channels (2i, 2i + 1), not (i, i + D/2).
        q_norm, k_norm: modules applied to each head [..., head_dim] of q and k, before the
            embedding; their gradients are summed over the group like all others.
        local_attention: called as ``local_attention(q, k, v, *args, **kwargs)`` with
            q [B, S, h, D], k and v [B, S, h_kv, D], once a chunk, as by
            :class:`DistributedAttention`; it doesn't write to k and v, which chunks may share.
            ``head_indices`` if it declares that. None: ``scaled_dot_product_attention``.
        chunks: into how many parts each rank's heads are cut; at most as many as leave every rank
            a query head in each. "auto": measured on the first call with a shape, by forward and
            backward passes of this layer (forward alone without gradients) with 1, 2, 4, ...
            chunks; the same on every rank. Compiled code takes what was picked last.
        overlap: False: projections, one exchange, attention, one exchange, projection, one after
            another; for comparison.
        group: the sequence group.

    The rotary embedding (and the norms) come after the exchange: products can then be written
    straight into what is sent; it turns as many elements there as before, and runs while other
    chunks travel.

    Raises:
        ValueError: sizes that don't fit each other or the group.
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
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        local_attention: Callable[..., Tensor] | None = None,
        chunks: int | str = 1,
        overlap: bool = True,
        group: Group = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads is {num_heads}; at least 1 is right")
        if head_dim is None:
            if hidden_size % num_heads != 0:
                raise ValueError(
                    f"hidden_size is {hidden_size}, which num_heads, {num_heads}, doesn't divide; "
                    "pass head_dim"
                )
            head_dim = hidden_size // num_heads
        kv_size = (num_heads if num_kv_heads is None else num_kv_heads) * head_dim
        made = {"device": device, "dtype": dtype}
        if out_bias is None:
            out_bias = bias
        projections = (
            nn.Linear(hidden_size, num_heads * head_dim, bias=bias, **made),
            nn.Linear(hidden_size, kv_size, bias=bias, **made),
            nn.Linear(hidden_size, kv_size, bias=bias, **made),
            nn.Linear(num_heads * head_dim, hidden_size, bias=out_bias, **made),
        )
        self._set_up(
            projections,
            num_heads,
            True,
            rope_theta=rope_theta,
            rope_interleaved=rope_interleaved,
            q_norm=q_norm,
            k_norm=k_norm,
            local_attention=local_attention,
            chunks=chunks,
            overlap=overlap,
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
        """Takes over an existing layer's projections: the parameters are shared, not copied.

        Args:
            num_heads: query heads; the kv heads follow from ``k_proj``.
            register: True: the projections (and norms) become submodules ``q_proj``, ``k_proj``,
                ``v_proj``, ``o_proj`` (``q_norm``, ``k_norm``) of the new module. False: they stay
                the caller's alone, whose ``state_dict`` keys don't change.

            options: the constructor's, from ``rope_theta`` to ``group``.

        Raises:
            ValueError: a projection isn't a plain ``nn.Linear``, or has hooks (they would not run).
        """
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
        q_norm=None,
        k_norm=None,
        local_attention=None,
        chunks=1,
        overlap=True,
        group=None,
    ) -> None:
        projections = dict(zip(_NAMES, projections, strict=True))
        for name, linear in projections.items():
            _check_linear(name, linear)
        self.member = member_of(group)
        self.num_heads = num_heads
        self.head_dim, self.num_kv_heads, self.v_head_dim = _head_sizes(projections, num_heads)
        _, size, _ = self.member
        if num_heads < size:
            raise ValueError(
                f"num_heads is {num_heads}, fewer than the {size} ranks of the group; use a group "
                f"of at most {num_heads} ranks"
            )
        if rope_theta is not None and self.head_dim % 2 != 0:
            raise ValueError(
                f"head_dim is {self.head_dim}; a rotary embedding needs pairs of channels"
            )
        if chunks != "auto" and (not isinstance(chunks, int) or chunks < 1):
            raise ValueError(f'chunks is {chunks!r}; at least 1, or "auto", is right')
        self.rope_theta = rope_theta
        self.rope_interleaved = rope_interleaved
        self.local_attention = local_attention
        self._head_indices = local.wants_head_indices(local_attention)
        self._compared = False
        self.chunks = chunks
        self.picked: int | None = None  # what "auto" has found last
        self.overlap = overlap
        modules = {**projections, "q_norm": q_norm, "k_norm": k_norm}
        if register:
            for name, module in modules.items():
                self.register_module(name, module)
        self._modules_used = None if register else tuple(modules.values())

    def _used(self) -> tuple:
        """The four projections and two norms; a tuple keeps what isn't ours out of our state."""
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
        seq_lens: Sequence[int] | None = None,
        **kwargs,
    ) -> Tensor:
        """x [B, S_r, hidden_size] -> [B, S_r, hidden_size].

        Args:
            position_ids: [S] or [B, S], of the *whole* sequence, for the rotary embedding; None:
                0, 1, 2, ...
            seq_lens: tokens of each rank; None: all hold as many as this one.
            args, kwargs: for the local attention. For ``scaled_dot_product_attention``:
                ``attn_mask`` (global), ``dropout_p``, ``is_causal``, ``scale``.

        Raises:
            ValueError: arguments that don't fit each other or the group.
        """
        if x.dim() != 3:
            raise ValueError(
                f"x has {x.dim()} dimensions; three are right: [batch, sequence, hidden_size]"
            )
        for name, linear in zip(_NAMES, self._used()[:4], strict=True):
            _check_linear(name, linear)  # they may have changed
        lens = lens_or_equal(seq_lens, x.size(1), self.member[1])
        if self.local_attention is None:
            _check_sdpa(x, sum(lens), self.num_heads, *args, **kwargs)
        local.check_kwargs(self._head_indices, kwargs)
        turn = self._angles(x, lens, position_ids)
        if not self._compared and not torch.compiler.is_compiling():
            self._compare(x, lens)
        count = self.chunks
        if self.overlap and count == "auto":
            count = self._pick_chunks(x, lens, turn, args, kwargs)
        draws = self.local_attention is not None or _drops(*args, **kwargs)
        with local.randomness_of(self.member, x.device) if draws else nullcontext():
            if not self.overlap:
                return self._one_after_another(x, lens, turn, args, kwargs)
            return self._overlapped(x, lens, turn, count, args, kwargs)

    def _overlapped(self, x, lens, turn, chunks, args, kwargs) -> Tensor:
        rank, _, name = self.member
        ops = torch.ops.deepsp
        q_proj, k_proj, v_proj, o_proj, _, _ = self._used()
        projections = (q_proj, k_proj, v_proj)
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        dims = [self.head_dim, self.head_dim, self.v_head_dim]
        batch = x.size(0)
        arriving = ops.project_to_heads_start(
            x,
            [p.weight for p in projections],
            _biases(projections),
            heads,
            lens,
            chunks,
            False,
            rank,
            name,
        )
        chunks = len(arriving)  # as many as the heads allow
        leaving, ks, vs = [], [], []
        for chunk in range(chunks):
            q, k, v = ops.seq_to_heads_wait(
                arriving[chunk], heads, dims, batch, lens, chunk, chunks, rank, name
            )
            q, k = self._turned(q, k, turn)
            ks.append(k)
            vs.append(v)
            out = self._attend(q, ks, vs, chunk, chunks, args, kwargs)
            if _autocasts(out.device):  # as a linear layer would, but earlier
                out = out.to(torch.get_autocast_dtype(out.device.type))
            leaving.append(
                ops.heads_to_seq_start([out], heads[:1], lens, chunk, chunks, rank, name)
            )
        return ops.heads_to_output_wait(
            leaving, o_proj.weight, o_proj.bias, self.num_heads, batch, lens, rank, name
        )

    def _one_after_another(self, x, lens, turn, args, kwargs) -> Tensor:
        rank, _, name = self.member
        ops = torch.ops.deepsp
        q_proj, k_proj, v_proj, o_proj, _, _ = self._used()
        q, k, v = ops.seq_to_heads(
            [
                q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)),
                k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)),
                v_proj(x).unflatten(-1, (self.num_kv_heads, self.v_head_dim)),
            ],
            lens,
            rank,
            name,
        )
        q, k = self._turned(q, k, turn)
        out = self._attend(q, [k], [v], 0, 1, args, kwargs)
        (mine,) = ops.heads_to_seq([out], [self.num_heads], lens, rank, name)
        return o_proj(mine.flatten(2))

    def _angles(self, x, lens, position_ids) -> tuple | None:
        if self.rope_theta is None:
            if position_ids is not None:
                raise ValueError("position_ids is given, but rope_theta is None: nothing uses them")
            return None
        total = sum(lens)
        if position_ids is None:
            position_ids = torch.arange(total, device=x.device)
        elif (
            position_ids.dim() not in (1, 2)
            or position_ids.size(-1) != total
            or (position_ids.dim() == 2 and position_ids.size(0) not in (1, x.size(0)))
        ):
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; positions are those of the "
                f"whole sequence: [{total}] or [batch, {total}] is right "
                "(deepsp.unshard(position_ids, 1) makes them from each rank's)"
            )
        return rope.angles(position_ids, self.head_dim, self.rope_theta, x.dtype)

    def _turned(self, q, k, turn) -> tuple[Tensor, Tensor]:
        """Norms and rotary embedding of the heads of one chunk; k may have none."""
        q_norm, k_norm = self._used()[4:]

        def one(heads, norm):
            if norm is not None:
                heads = norm(heads)
            return heads if turn is None else rope.rotate(heads, *turn, self.rope_interleaved)

        return one(q, q_norm), one(k, k_norm) if k.size(2) > 0 else k

    def _attend(self, q, ks, vs, chunk, chunks, args, kwargs) -> Tensor:
        rank, size, _ = self.member
        k, v = (
            torch.ops.deepsp.kv_of_chunk(
                x, self.num_heads, self.num_kv_heads, chunk, chunks, rank, size
            )
            for x in (ks, vs)
        )
        if self.local_attention is None:
            return _sdpa(
                q, k, v, *args, **kwargs, where=(self.num_heads, chunk, chunks, rank, size)
            )
        out = local.attend(
            self.local_attention,
            (q, k, v),
            args,
            kwargs,
            head_indices=self._head_indices,
            num_heads=self.num_heads,
            chunk=chunk,
            chunks=chunks,
            member=self.member,
        )
        if out.size(3) != self.v_head_dim:
            raise ValueError(
                f"local_attention returned shape {tuple(out.shape)}; "
                f"{(*q.shape[:3], self.v_head_dim)} is right"
            )
        return out

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
            gradients=[trains and x.requires_grad, trains and of_parameters],
        )

    def _pick_chunks(self, x, lens, turn, args, kwargs) -> int:
        if torch.compiler.is_compiling():
            if self.picked is None:
                raise ValueError(
                    'chunks is "auto", and nothing was measured yet: call the module once before '
                    "it is compiled, or pass a number"
                )
            return self.picked
        _, size, name = self.member
        trains = torch.is_grad_enabled()
        autocast = _autocasts(x.device)
        key = (
            name, self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim,
            tuple(lens), x.size(0), x.size(2), x.dtype, x.device, trains, autocast,
        )  # fmt: skip
        most = torch.ops.deepsp.head_chunks(self.num_heads, size, self.num_heads)
        used = [p for m in self._used() if m is not None for p in m.parameters()]
        parameters = [p for p in used if p.requires_grad] if trains else []

        def run(chunks: int) -> None:
            mine = x.detach().requires_grad_(trains)
            # Hooks of our own, lest a checkpoint around us counts what is saved here.
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                y = self._overlapped(mine, lens, turn, chunks, args, kwargs)
            if trains:
                torch.autograd.grad(y, [mine, *parameters], torch.ones_like(y), allow_unused=True)

        self.picked = auto_chunks.pick(key, most, run, self.member, x.device)
        return self.picked


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _drops(attn_mask=None, dropout_p=0.0, *_, **__) -> bool:
    return dropout_p > 0


def _sdpa(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *, where: tuple
) -> Tensor:
    sharded = torch.compiler.is_compiling()
    return torch.ops.deepsp.attention_of_chunk(
        q, k, v, attn_mask, dropout_p, is_causal, scale, *where, sharded_randomness=sharded
    )


def _check_sdpa(
    x, tokens, num_heads, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None
) -> None:
    """Raises before anything is sent."""
    dtype = x.dtype
    if attn_mask is not None and _autocasts(x.device):
        dtype = attn_mask.dtype  # it will be cast
    torch.ops.deepsp.check_attention(
        attn_mask, dropout_p, is_causal, dtype, x.size(0), num_heads, tokens
    )


def _biases(projections: Sequence[nn.Linear]) -> list[Tensor]:
    if all(p.bias is None for p in projections):
        return []
    return [p.weight.new_zeros(p.weight.size(0)) if p.bias is None else p.bias for p in projections]


def _check_linear(name: str, linear: nn.Module) -> None:
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise ValueError(
            f"{name} is a {type(linear).__name__}; an nn.Linear is right (its weight is used, its "
            "forward isn't called)"
        )
    if "forward" in vars(linear):
        raise ValueError(f"{name} has a forward of its own, which would not be called")
    if (
        linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
    ):
        raise ValueError(
            f"{name} has hooks, which would not run: its weight is used, its forward isn't called"
        )


def _head_sizes(projections: dict[str, nn.Linear], num_heads: int) -> tuple[int, int, int]:
    """head_dim, number of kv heads, head_dim of v."""
    q, k, v, o = (projections[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    if num_heads < 1 or q.out_features % num_heads != 0:
        raise ValueError(
            f"num_heads is {num_heads}, which doesn't divide the {q.out_features} features of "
            "q_proj"
        )
    head_dim = q.out_features // num_heads
    kv_heads, rest = divmod(k.out_features, head_dim)
    if rest != 0 or kv_heads == 0 or num_heads % kv_heads != 0:
        raise ValueError(
            f"k_proj has {k.out_features} features; a number of heads of {head_dim} that divides "
            f"num_heads, {num_heads}, is right"
        )
    if v.out_features % kv_heads != 0:
        raise ValueError(
            f"v_proj has {v.out_features} features, which the {kv_heads} heads of k_proj don't "
            "divide"
        )
    v_head_dim = v.out_features // kv_heads
    if o.in_features != num_heads * v_head_dim:
        raise ValueError(
            f"o_proj takes {o.in_features} features; {num_heads * v_head_dim}, {num_heads} heads "
            f"of {v_head_dim}, is right"
        )
    for name, p in (("k_proj", k), ("v_proj", v)):
        if p.in_features != q.in_features:
            raise ValueError(
                f"{name} takes {p.in_features} features, but q_proj takes {q.in_features}; they "
                "must be the same"
            )
    return head_dim, kv_heads, v_head_dim
