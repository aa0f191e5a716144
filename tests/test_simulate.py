"""benchmarks/simulate.py: its bytes are those of deepsp's layouts, its steps those of published
runs, and docs/scale.md has its numbers."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import deepsp

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import published_steps
import simulate as simulator
from published_steps import ALST, COUNTED, FITTED, NEMO, REFUSED, ROWS, USP, predicted
from simulate import ALL, MACHINES, MODELS, NAMES, TODAY, Layout, Levers, simulate

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scale.md").read_text()
SMALL, LARGE = MODELS["8b"], MODELS["70b"]


def _error(row):
    return predicted(row) / row.measured - 1


def test_published_steps():
    alst, usp, (short, *nemo) = (
        [_error(row) for row in ROWS if (row.source, row.use) == (source, COUNTED)]
        for source in (ALST, USP, NEMO)
    )
    assert (len(alst), len(usp), len(nemo)) == (7, 3, 7)
    mean = sum(map(abs, alst)) / 7
    assert mean < 0.03 and max(map(abs, alst)) < 0.065, alst
    assert max(map(abs, usp)) < 0.05, usp
    assert max(map(abs, nemo)) < 0.065, nemo
    assert abs(short) < 0.09  # 4k tokens: hardly any attention
    rows = [row[2] for row in _rows("| source | what")]
    written = [[float(x) for x in re.findall(r"\d+\.\d", row)] for row in rows]
    expected = [[mean, max(map(abs, alst))], [max(map(abs, usp))]]
    expected += [[min(map(abs, nemo)), max(map(abs, nemo)), abs(short)]]
    assert written == [[round(100 * x, 1) for x in row] for row in expected]


def test_rows_that_are_not_counted():
    uses = [row.use for row in ROWS]
    assert [uses.count(x) for x in (COUNTED, FITTED, REFUSED)] == [18, 2, 2]
    for row in ROWS:
        if row.use == FITTED:
            assert abs(_error(row)) < 0.02
        if row.use == REFUSED:
            step = simulate(MODELS[row.model], row.tokens, row.ulysses, MACHINES[row.machines])
            assert step.parts["attention"] + row.optimizer > row.measured
            assert _error(row) > 0.2
    marks = {row[-1] for row in published_steps.table()}
    assert marks == {"", FITTED, REFUSED}


@pytest.mark.parametrize(
    "name, tokens, ranks",
    [
        *(("8b", 1009, ranks) for ranks in (1, 2, 3, 5, 8, 16, 24, 32, 33, 48)),
        ("8b", 512, 64),
        ("70b", 650, 64),
        ("70b", 2048, 96),
        ("llama2-7b", 100, 8),
    ],
)
def test_bytes(name, tokens, ranks):
    """Each rank sends and receives what the layout ops say."""
    model = MODELS[name]
    layout, element = Layout(model, tokens, ranks), model.head_dim * 2
    heads = model.heads, model.kv_heads
    lens = torch.ops.deepsp.token_split(tokens, ranks)
    assert [len(shard) for shard in layout.shards] == lens
    for rank in () if model.heads % ranks else range(ranks):
        split = [torch.ops.deepsp.head_split(*heads, ranks, r) for r in range(ranks)]
        counts = [(q_end - q, kv_end - kv) for q, q_end, kv, kv_end in split]
        there = lens[rank] * sum(q + 2 * kv for q, kv in counts[:rank] + counts[rank + 1 :])
        back = (tokens - lens[rank]) * counts[rank][0]
        assert layout.sent(rank) == (there * element, back * element)

    plan = deepsp.plan_attention(
        *heads,
        seq_len=tokens,
        ranks=ranks,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    total = 0
    for rank, share in enumerate(plan.ranks):
        assert (layout.kv_heads[rank].start, layout.kv_heads[rank].stop) == share.kv_heads
        to, received = layout.query_flows(rank)  # the output returns from where q went
        assert sum(to) + sum(received) + sum(layout.kv_flows(rank)[1]) == share.received
        total += sum(layout.sent(rank))
    assert total == sum(share.received for share in plan.ranks)


@pytest.mark.parametrize("name, ranks", [("8b", 16), ("8b", 64), ("70b", 96)])
def test_kv_once(name, ranks):
    """Every machine receives each kv head that its ranks read once, and each rank all it reads."""
    size, layout = 8, Layout(MODELS[name], 8 * ranks, ranks)
    far = 2 * MODELS[name].head_dim * 2 * 8 * (ranks - size)  # bytes of a head of others' tokens
    sent = received = 0
    for first in range(0, ranks, size):
        machine = range(first, first + size)
        flows = [layout.kv_flows(rank, size, once=True) for rank in machine]
        crossing = [
            sum(x[p] for x in way for p in range(ranks) if p not in machine)
            for way in list(zip(*flows, strict=True))[:2]
        ]
        heads = [layout.kv_heads[rank] for rank in machine]
        assert crossing[1] == len({head for own in heads for head in own}) * far
        # The rest of what a rank reads, 7 of 8 tokens, passes through the others.
        assert sum(x[2] for x in flows) == sum(map(len, heads)) * far * (size - 1) // size
        sent, received = sent + crossing[0], received + crossing[1]
        near = [layout.kv_flows(rank)[1][first : first + size] for rank in machine]
        assert near == [x[1][first : first + size] for x in flows]
    assert sent == received


@pytest.mark.parametrize(
    "tokens, ranks",
    [(2**15, 8), (2**15, 128), (2**17, 32), (2**17, 64), (2**17, 256), (2**20, 256)],
)
def test_levers_never_cost_time(tokens, ranks):
    for model in (SMALL, LARGE, MODELS["llama2-7b"]):
        for machines in ("h100", "h100-1nic", "h100-pcie"):
            case = model, tokens, ranks, MACHINES[machines]
            none, every = simulate(*case), simulate(*case, ALL)
            for name in NAMES:
                one = simulate(*case, Levers(**{name: True})).seconds
                assert every.seconds <= one * (1 + 1e-9) <= none.seconds * (1 + 2e-9), name
            assert none.seconds <= simulate(*case, Levers(chunks=1)).seconds * (1 + 1e-9)
            assert none.seconds < simulate(*case, Levers(offload=True)).seconds
            for step in (none, every):
                assert min(step.parts.values()) >= 0 and min(step.hidden.values()) > -1e-9
                assert 0 < step.mfu < 0.6


def test_one_rank_sends_nothing():
    for levers in (TODAY, ALL):
        step = simulate(SMALL, 2**17, 1, levers=levers)
        communication = [step.parts["exchange"], step.parts["weights"], *step.hidden.values()]
        assert communication == [0] * 4
    assert Layout(SMALL, 2**17, 1).sent(0) == (0, 0)


def test_parts():
    """What is waited for and what is hidden add up to the bytes over the link's rate, or more."""
    ranks, machines = 256, MACHINES["h100"]
    step = simulate(SMALL, 2**17, ranks)
    layout = Layout(SMALL, 2**17, ranks)
    flows = [*layout.query_flows(0), layout.kv_flows(0)[0]]
    wire = sum(sum(x[8:]) for x in flows) / machines.far  # of forward; backward, and once more
    latency = sum(x > 0 for flow in flows for x in flow) * machines.far_peer
    spent = (step.parts["exchange"] + step.hidden["exchange"]) / SMALL.layers
    assert 3 * wire < spent < 3 * (wire + latency) + 6 * machines.launch
    size = 2 * SMALL.layer_params
    spent = (step.parts["weights"] + step.hidden["weights"]) / SMALL.layers
    # Each machine receives the weights twice through 8 links; each rank sends the gradients.
    wire = 248 / 256 * size / machines.far * (2 / 8 + 1)
    assert wire < spent < 1.1 * wire + 248 * machines.far_peer
    attention = 2 * 2**34 * SMALL.heads * SMALL.head_dim * SMALL.layers / ranks
    expected = 2 * attention / machines.attend + 2.5 * attention / machines.attend_backward
    assert step.parts["attention"] == pytest.approx(expected)


def test_where_levers_count():
    """The reasons to build them."""

    def ratio(model, tokens, ranks, **levers):
        step = simulate(model, tokens, ranks, levers=Levers(**levers))
        return step.seconds / simulate(model, tokens, ranks).seconds

    assert ratio(SMALL, 2**20, 8, keep_attention=True) < 0.83
    assert ratio(LARGE, 2**17, 256, two_level_sums=True) < 0.5
    assert ratio(SMALL, 2**17, 64, kv_once=True) < 0.92
    assert ratio(SMALL, 2**17, 32, query_chunks=True) < 0.97
    # On one machine there is nothing to sum in two levels or to send once.
    assert ratio(LARGE, 2**17, 8, two_level_sums=True, kv_once=True) == 1
    assert ratio(SMALL, 2**17, 8, chunks=1) > 1


def test_streams():
    """One chunk: all is waited for. Two: the first arrives, the last leaves, and the rest hides."""
    assert simulator.waited([2], 4, [2]) == 4
    assert simulator.waited([1, 1], 4, [1, 1]) == 2
    assert simulator.waited([3, 3], 4, [1, 1]) == 5  # attention waits for the second chunk
    assert simulator.waited([1, 1], 0, [1, 1]) == 4


def test_machines_that_are_not_full():
    with pytest.raises(ValueError, match="expected ranks that fill all machines of 8, got 12"):
        simulate(SMALL, 2**17, 12)


def test_rates_of_ones_own(tmp_path):
    (tmp_path / "one.toml").write_text('[a]\nlike = "a800"\nsize = 4\n[b]\nproducts = 1e14\n')
    read = simulator.read_machines(tmp_path / "one.toml", MACHINES)
    assert read["a"] == replace(MACHINES["a800"], size=4)
    assert list(read)[-1] == "b" and read["b"] == replace(MACHINES["h100"], products=1e14)


def test_results_are_current(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/simulate.py", "--results", str(tmp_path)])
    simulator.main()
    written, committed = (
        (folder / "simulate.md").read_text().splitlines()[3:]  # without the command
        for folder in (tmp_path, ROOT / "benchmarks" / "results")
    )
    assert written == committed, "make simulate writes them"
    assert "Published steps" in capsys.readouterr().out


def _rows(start):
    table = PAGE[PAGE.index(start) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def _case(model, tokens, ranks):
    return MODELS[model.lower()], {"128k": 2**17, "1M": 2**20}[tokens], int(ranks)


def test_page():
    rows = _rows("| model, tokens | P |")
    assert len(rows) == 16
    for label, ranks, *numbers in rows:
        case = _case(*label.split(", "), ranks)
        step, base = simulate(*case), simulate(*case[:2], 8)
        shares = [base.seconds * 8 / case[2] / step.seconds]
        shares += [step.parts[x] / step.seconds for x in ("exchange", "weights")]
        assert numbers[1:4] == [f"{100 * x:.0f} %" for x in shares], (label, ranks)
        for written, levers in ((numbers[0], TODAY), (numbers[4], ALL)):
            value = simulate(*case, levers=levers).seconds
            assert float(written) == pytest.approx(value, rel=0.006), (label, ranks)

    rows = _rows("| model, tokens, P | keep")
    assert len(rows) == 4
    for label, *ratios in rows:
        case = _case(*re.fullmatch(r"(\w+), (\w+), P = (\d+)", label).groups())
        ways = [*(Levers(**{x: True}) for x in NAMES), ALL]
        found = [simulate(*case, levers=x).seconds / simulate(*case).seconds for x in ways]
        assert ratios == [f"{x:.2f}" for x in found], label

    rows = _rows("| P | a rank sends q, k and v")
    assert len(rows) == 4
    for ranks, there, back, far in rows:
        layout = Layout(SMALL, 2**17, int(ranks))
        assert [int(there), int(back)] == pytest.approx(
            [x / 2**20 for x in layout.sent(0)], abs=0.5
        )
        flows = [*layout.query_flows(0), layout.kv_flows(0)[0]]
        assert far == f"{100 * sum(sum(x[8:]) for x in flows) / sum(map(sum, flows)):.0f} %"


def _speed(model, tokens, ranks, machines="h100", levers=TODAY):
    """The work of a rank in a second, over that of a rank of one machine."""
    one, many = (
        simulate(model, tokens, p, MACHINES[machines], levers).seconds * p for p in (8, ranks)
    )
    return one / many


def test_how_to_choose():
    """The page's advice: 2,000 tokens a rank, 1,000 with all levers; one NIC a machine."""
    for tokens, ranks in ((2**17, 64), (2**18, 128), (2**20, 512)):
        assert _speed(SMALL, tokens, ranks) == pytest.approx(0.8, abs=0.015)
        assert _speed(LARGE, tokens, ranks) == pytest.approx(0.88, abs=0.01)
        for model in (SMALL, LARGE):
            assert _speed(model, tokens, 2 * ranks, levers=ALL) > 0.84
    assert _speed(SMALL, 2**20, 32, "h100-1nic") == pytest.approx(0.85, abs=0.005)
    assert _speed(SMALL, 2**20, 128, "h100-1nic") == pytest.approx(0.64, abs=0.005)
    for model in (SMALL, LARGE):
        few, many = (simulate(model, 2**17, ranks).seconds for ranks in (128, 256))
        assert many == pytest.approx(few, rel=0.05)
        for tokens, ranks in ((2**17, 64), (2**20, 1024)):
            assert simulate(model, tokens, ranks).parts["weights"] == 0
        assert simulate(model, 2**17, 128).parts["weights"] > 0


def test_it_needs_no_torch():
    program = "import sys, published_steps; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT / "benchmarks", check=True)
