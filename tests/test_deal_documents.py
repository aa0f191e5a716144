"""Documents dealt out over ranks: each token once, within the limits, as well as by brute force."""

import itertools
import math
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepsp


def _blocks(deal):
    """Level, first rank and width of each block."""
    for level, width in enumerate(deal.widths):
        stride = next(n for n in (1, 2, 4, 8, 16) if n >= width)
        for first in [0] if width == deal.ranks else range(0, deal.ranks - width + 1, stride):
            yield level, first, width


def _bound(deal):
    """The largest cost of a rank that any plan may have: 3 % or one token above the mean."""
    mean = sum(deal.costs) / deal.ranks
    return max(1.03 * mean, mean + deal.cost[0]) * (1 + 1e-9)


def _check(deal, max_tokens):
    lengths, ranks = deal.lengths, deal.ranks
    starts = list(itertools.accumulate(lengths, initial=0))
    inside = {(level, first): [] for level, first, _ in _blocks(deal)}
    for d, place in enumerate(deal.places):
        inside[place].append(d)
    assert max(deal.seq_lens) <= max_tokens and min(map(min, deal.lens)) >= 0
    assert max(deal.costs) <= _bound(deal)

    tokens = [deal.tokens(r).tolist() for r in range(ranks)]
    positions = [deal.positions(r).tolist() for r in range(ranks)]
    assert [len(held) for held in tokens] == [len(held) for held in positions] == deal.seq_lens
    assert sorted(itertools.chain(*tokens)) == list(range(starts[-1]))
    read = [0] * ranks  # tokens of the levels before
    for level, first, width in _blocks(deal):
        held, places = [], []
        for r in range(first, first + width):
            end = read[r] + deal.lens[level][r]
            held += tokens[r][read[r] : end]
            places += positions[r][read[r] : end]
            read[r] = end
        own = [d for d in inside[level, first] if lengths[d] > 0]
        assert held == [starts[d] + i for d in own for i in range(lengths[d])]
        assert places == [i for d in own for i in range(lengths[d])]
        ends = list(itertools.accumulate((lengths[d] for d in own), initial=0))
        for r in range(first, first + width):
            assert deal.documents(r)[level].tolist() == [list(x) for x in itertools.pairwise(ends)]
    for r in range(ranks):  # beyond the last full block of a level
        blocks = [level for level, first, width in _blocks(deal) if first <= r < first + width]
        for level in set(range(len(deal.widths))) - set(blocks):
            assert deal.lens[level][r] == 0
            assert deal.documents(r)[level].shape == (0, 2)
    shared = sum(lengths[d] for d in range(len(lengths)) if deal.places[d][0] > 0)
    assert math.isclose(deal.shared * sum(lengths), shared, abs_tol=1e-6)


_lengths = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 300)), max_size=30)
_costs = st.tuples(st.sampled_from([1.0, 0.37, 1e-9, 1e6]), st.sampled_from([0.0, 2e-5, 0.01, 3.0]))


@given(
    ranks=st.integers(1, 9),
    lengths=_lengths,
    cost=_costs,
    spare=st.one_of(st.just(0), st.integers(0, 300)),
)
def test_every_token_is_on_one_rank(ranks, lengths, cost, spare):
    max_tokens = -(-sum(lengths) // ranks) + spare
    deal = deepsp.deal_documents(lengths, ranks, max_tokens, cost=cost)
    _check(deal, max_tokens)
    again = deepsp.deal_documents(torch.tensor(lengths), ranks, max_tokens, cost=cost)
    assert (again.places, again.lens) == (deal.places, deal.lens)
    # Memory full to the last token.
    full = [*lengths, ranks * max_tokens - sum(lengths)]
    deal = deepsp.deal_documents(full, ranks, max_tokens, cost=cost)
    _check(deal, max_tokens)
    assert deal.seq_lens == [max_tokens] * ranks


@pytest.mark.parametrize(
    "ranks, widths",
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (5, [1, 2, 3, 4, 5]),
        (6, [1, 2, 3, 4, 6]),
        (8, [1, 2, 3, 4, 6, 8]),
        (13, [1, 2, 3, 4, 6, 8, 12, 13]),
    ],
)
def test_levels(ranks, widths):
    # One document over all ranks; documents that fit stay; ranks without any.
    deal = deepsp.deal_documents([7 * ranks], ranks, 7)
    assert deal.widths == widths
    assert deal.places == [(len(widths) - 1, 0)]
    assert deal.lens[-1] == deal.seq_lens == [7] * ranks
    assert deal.imbalance < 1e-12 and deal.shared == (ranks > 1)
    deal = deepsp.deal_documents([5] * ranks, ranks)
    assert deal.shared == 0 and sorted(first for _, first in deal.places) == list(range(ranks))
    _check(deepsp.deal_documents([1], ranks), 1)
    _check(deepsp.deal_documents([], ranks), 0)
    assert deepsp.deal_documents([0, 0], ranks).imbalance == 0


def test_shared_by_as_few_as_it_takes():
    # On 4 ranks of 100 tokens each: 150 need two of them; the others stay.
    deal = deepsp.deal_documents([50, 150, 90, 10, 100], 4, 100, cost=(1.0, 0.0))
    assert [level for level, _ in deal.places] == [0, 1, 0, 0, 0]
    assert deal.seq_lens == [100] * 4
    # What fills three ranks of four, or of eight, leaves the fourth alone.
    deal = deepsp.deal_documents([100, 300, 100, 300], 8, 100, cost=(1.0, 0.0))
    assert [deal.widths[level] for level, _ in deal.places] == [1, 3, 1, 3]
    assert [first for _, first in deal.places] == [7, 4, 3, 0]
    deal = deepsp.deal_documents([130, 270], 4, 100, cost=(1.0, 0.0))
    assert [deal.widths[level] for level, _ in deal.places] == [2, 4]
    deal = deepsp.deal_documents([600, 100, 100], 8, 100, cost=(1.0, 0.0))
    assert [deal.widths[level] for level, _ in deal.places] == [6, 1, 1]
    # One token more on some ranks is no reason to share.
    assert deepsp.deal_documents([1] * 5, 2, cost=(1.0, 0.0)).shared == 0
    # Twice the tokens have four times the attention: the long one has as much of it as all others.
    deal = deepsp.deal_documents([200, 100, 100, 100, 100], 4, cost=(1e-6, 1.0))
    assert [level for level, _ in deal.places] == [1, 0, 0, 0, 0] and deal.imbalance < 0.01


# ------------------------------------------------------------------------------ brute force


def _fits(deal, places, max_tokens, limit):
    """Whether a split of the tokens exists in which no rank exceeds the limits: no block's tokens,
    and those of the blocks within it, are more than its ranks have room for."""
    linear, quadratic = deal.cost
    attention, tokens = [0.0] * deal.ranks, dict.fromkeys(places, 0)
    for n, (level, first) in zip(deal.lengths, places, strict=True):
        width = deal.widths[level]
        tokens[level, first] += n
        for r in range(first, first + width):
            attention[r] += quadratic * n * n / width
    if max(attention) > limit:
        return False
    room = [min(max_tokens, math.floor((limit - a) / linear)) for a in attention]
    return all(
        sum(
            n
            for (within, start), n in tokens.items()
            if first <= start and start + deal.widths[within] <= first + width
        )
        <= sum(room[first : first + width])
        for _, first, width in _blocks(deal)
    )


def _least_shared(deal, max_tokens):
    """The fewest tokens that several ranks can share within the limits."""
    blocks = [(level, first) for level, first, _ in _blocks(deal)]

    def shared(places):
        return sum(n for n, (level, _) in zip(deal.lengths, places, strict=True) if level > 0)

    for places in sorted(itertools.product(blocks, repeat=len(deal.lengths)), key=shared):
        if _fits(deal, places, max_tokens, _bound(deal)):
            return shared(places)
    raise AssertionError("all documents shared by all ranks fit")


def test_against_all_places():
    # Balance needs no search to compare with: _check holds it to 3 % or one token above the mean,
    # and no plan is below the mean.
    draw = random.Random(0)
    ours, best, equal, cases = 0, 0, 0, 60
    for _ in range(cases):
        ranks = draw.choice([2, 3])
        count = draw.randint(1, 5 if ranks == 2 else 4)
        lengths = [1 + int(draw.lognormvariate(4, 1.2)) for _ in range(count)]
        needed = -(-sum(lengths) // ranks)
        max_tokens = draw.choice([needed, needed + draw.randint(0, max(lengths)), sum(lengths)])
        cost = 1.0, draw.choice([0.0, 1e-3, 1e-2, 1.0])
        deal = deepsp.deal_documents(lengths, ranks, max_tokens, cost=cost)
        _check(deal, max_tokens)
        found, least = round(deal.shared * sum(lengths)), _least_shared(deal, max_tokens)
        assert found >= least
        ours, best, equal = ours + found, best + least, equal + (found == least)
    assert equal >= 0.9 * cases and ours <= 1.05 * best, (equal, ours, best)


def _splits(total, parts):
    """All ways to split a number into parts."""
    if parts == 1:
        return [[total]]
    return [[n, *rest] for n in range(total + 1) for rest in _splits(total - n, parts - 1)]


@given(
    ranks=st.integers(2, 3),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    quadratic=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    spare=st.integers(0, 3),
)
def test_no_split_costs_less(ranks, lengths, quadratic, spare):
    max_tokens = -(-sum(lengths) // ranks) + spare
    deal = deepsp.deal_documents(lengths, ranks, max_tokens, cost=(1.0, quadratic))
    attention = [c - n for c, n in zip(deal.costs, deal.seq_lens, strict=True)]
    options = []
    for level, first, width in _blocks(deal):
        total = sum(deal.lens[level][first : first + width])
        before, after = [0] * first, [0] * (ranks - first - width)
        options.append([[*before, *split, *after] for split in _splits(total, width)])
    least = math.inf
    for parts in itertools.product(*options):
        held = [sum(n) for n in zip(*parts, strict=True)]
        if max(held) <= max_tokens:
            least = min(least, max(a + n for a, n in zip(attention, held, strict=True)))
    assert max(deal.costs) <= least + 1e-9


# ------------------------------------------------------------------------------ real batches


def _drawn(total, sigma, seed):
    """Lengths of fine-tuning data: a median of 665 tokens and a heavy tail."""
    draw, lengths = random.Random(seed), []
    while total > 0:
        lengths.append(min(int(draw.lognormvariate(math.log(665), sigma)) + 1, total))
        total -= lengths[-1]
    return lengths


@pytest.mark.parametrize("total, shared", [(131072, 0.26), (524288, 0.08)])
def test_fine_tuning_mix(total, shared):
    deals = [deepsp.deal_documents(_drawn(total, 1.5, seed), 8) for seed in range(20)]
    for deal in deals:
        assert deal.imbalance <= 0.03
    assert sum(deal.imbalance for deal in deals) / len(deals) < 0.01
    assert sum(deal.shared for deal in deals) / len(deals) < shared
    _check(deals[0], total)


def test_microseconds_a_document():
    lengths = _drawn(20_000_000, 1.4, 0)[:10_000]
    assert len(lengths) == 10_000
    args = lengths, 64, int(sum(lengths) / 64 * 1.05), 1.0, 2e-5
    begin = time.perf_counter()
    torch.ops.deepsp.deal_documents(*args)
    assert time.perf_counter() - begin < 0.5


# ------------------------------------------------------------------------------ errors


def test_refusals():
    deal = deepsp.deal_documents
    for call, text in [
        (lambda: deal([5, 4], 2, 4), r"got 9; use max_tokens >= 5, or leave out documents"),
        (lambda: deal([5], 2, -1), r"expected max_tokens >= 0, got -1"),
        (lambda: deal([3, -1], 2), r"expected the length of document 1 >= 0, got -1"),
        (lambda: deal([2**44, 1], 2), r"at most 17592186044416 tokens in all, got more, at docu"),
        (lambda: deal([3], 0), r"expected 1 <= ranks <= 4096, got 0"),
        (lambda: deal([3], 4097), r"expected 1 <= ranks <= 4096, got 4097"),
        (lambda: deal([3], 2, cost=(0.0, 1.0)), r"linear > 0 and quadratic >= 0, got 0 and 1"),
        (lambda: deal([3], 2, cost=(1.0, -1.0)), r"got 1 and -1"),
        (lambda: deal([3], 2, cost=(math.nan, 1.0)), r"got nan and 1"),
        (lambda: deal([], 2, cost=(math.inf, 1.0)), r"expected finite costs, .* got inf and 1"),
        (lambda: deal([], 2, cost=(1.0, math.inf)), r"got 1 and inf"),
        (lambda: deal([3], 2, cost=(1.0, 1e308)), r"to cost less than 1e300, got inf"),
        (lambda: deal([3], 2, cost=3), r"expected cost to be two numbers, got 3"),
        (lambda: deal([3], 2, cost=("a", 1)), r"expected cost to be two numbers, got \('a', 1\)"),
        (lambda: deal([2.5], 2), r"lengths to be a sequence of ints, .*, got \[2.5\], 2 and None"),
        (lambda: deal(None, 2), r"lengths to be a sequence of ints, .*, got None, 2 and None"),
        (lambda: deal([3], "2"), r"ranks an int, .*, got \[3\], '2' and None"),
        (lambda: deal([3], 2, 1.5), r"max_tokens an int or None, got \[3\], 2 and 1.5"),
        (lambda: deal([2**63], 2), r"fewer than 2\^62 tokens, got 9223372036854775808"),
        (lambda: deal([3], 2).tokens(2), r"expected 0 <= rank < 2, got 2"),
        (lambda: deal([3], 2).documents(-1), r"expected 0 <= rank < 2, got -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
