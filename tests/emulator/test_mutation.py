"""The mutation score of our kernels: what the script finds, and that each survivor in its tables is explained."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch

from scripts import mutate
from tests import oracle

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"mbarrier wait", "mbarrier arrive", "arrive.expect_tx", "named barrier"}  # every kernel has them
BLACKWELL = {"tcgen05 commit", "tcgen05 wait", "cluster barrier"}
OWN_KINDS = {"sm90": {"wgmma wait"}, "sm100": BLACKWELL, "sm100_backward": BLACKWELL}  # some kernel
PRESENT = {  # kernels of the tables
    "sm90": ("d=128,mask=causal",),
    "sm100": ("d=128,mask=causal",),
    "sm100_backward": tuple(
        f"pass=bwd,{point},key tiles={tiles}{more}"
        for point, tiles, more in (
            ("d=64,mask=causal", 4, ""),
            ("d=64,mask=causal,deterministic", 4, ""),
            ("d=128,mask=full", 1, ""),
            ("d=128,mask=full", 2, ""),
            ("d=128,mask=full,deterministic", 6, ""),
            ("d=256,mask=full", 1, ""),
            ("d=256,mask=full", 1, ",launch=2"),
        )
    ),
}
CHEAP = ("mbarrier init fence", "wgmma fence", "wgmma wait", "proxy fence", "bulk wait")  # these fail at once


@pytest.fixture(scope="module", params=OWN_KINDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def rows(backend) -> list[dict[str, str]]:
    with (ROOT / "perf" / "results" / f"mutation_{backend}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_dropped_synchronisation_is_noticed():
    subject = mutate.prepare(mutate.arguments(["--points", "d=64,mask=full", "--key-tiles", "3", "--query-tiles", "2"]))
    outcomes = list(mutate.judge(subject, CHEAP))
    survivors = Counter(outcome.site.kind for outcome in outcomes if not outcome.noticed)
    assert survivors == {"wgmma fence": 2}  # of P V, right behind those of Q K^T: see docs/mutation.md
    assert {outcome.site.kind for outcome in outcomes} == set(CHEAP)


def test_shared_keys_and_blackwell_are_right_before_anything_is_dropped():
    for words in (["--points", "d=64,mask=full", "--split"], ["--backend", "sm100", "--points", "d=64,mask=causal"]):
        subject = mutate.prepare(mutate.arguments([*words, "--query-tiles", "1"]))
        right, counters = subject.attempt(subject.note, mutate.KNOBS[0])
        assert right and counters.lines, words


def test_a_kernel_that_is_wrong_already_is_not_scored():
    subject = mutate.prepare(mutate.arguments(["--points", "d=64,mask=full", "--key-tiles", "1", "--query-tiles", "1"]))
    subject.exact = (subject.exact[0] + 1, subject.exact[1])
    with pytest.raises(RuntimeError, match="wrong before anything is dropped"):
        next(mutate.judge(subject))


def test_rows_that_see_no_key_have_a_right_answer():
    q, k, v = (torch.randn(1, n, 1, 8) for n in (5, 3, 3))
    out, lse = mutate.dense(q, k, v, causal=True)
    exact = oracle.forward(q, k, v, causal=True)
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -torch.inf).all()
    torch.testing.assert_close((out, lse), (exact.out, exact.lse))


def test_every_kernel_of_the_table_is_scored_whole(rows, backend):
    for kernel in {row["kernel"] for row in rows}:
        kinds = {row["kind"] for row in rows if row["kernel"] == kernel}
        assert kinds >= KINDS, kernel
    assert {row["kind"] for row in rows} >= OWN_KINDS[backend]
    assert {row["kernel"] for row in rows} >= set(PRESENT[backend])


def test_every_survivor_is_explained(rows):
    text = (ROOT / "docs" / "mutation.md").read_text()
    missing = {row["python"] for row in rows if row["noticed"] == "0" and f"`{row['python']}`" not in text}
    assert not missing


def test_the_backward_is_scored_and_not_the_kernel_before_it():
    words = ["--backend", "sm100", "--points", "pass=bwd,d=64,mask=causal", "--query-tiles", "1", "--key-tiles", "1"]
    subject = mutate.prepare(mutate.arguments(words))
    assert subject.attempt(subject.note, mutate.KNOBS[0])[0]
    kinds = {}
    for launch in (0, subject.main):
        ran = mutate.entry_lines(subject.texts[0], subject.kernels[launch])
        kinds[launch] = {site.kind for site in mutate.find_sites(subject.texts[0]) if site.line in ran}
    assert not kinds[0] and kinds[subject.main] >= KINDS


@pytest.mark.slow
def test_a_turn_that_is_not_waited_for_or_not_passed_on_is_noticed():
    """Sums in another order are wrong by a few bits of float32: dQ, rounded, shows nothing."""
    words = ["--backend", "sm100", "--points", "pass=bwd,d=64,mask=causal", "--query-tiles", "4", "--key-tiles", "4"]
    subject = mutate.prepare(mutate.arguments([*words, "--deterministic"]))
    found = {o.site.kind: o.how for o in mutate.judge(subject, ("poll", "release"))}
    assert found == {"poll": "wrong result", "release": "Deadlock"}


def test_kernels_of_a_table_have_names_of_their_own():
    names = {
        mutate.name_of(mutate.arguments(words))
        for words in (
            [],
            ["--split"],
            ["--points", "pass=bwd"],
            ["--points", "pass=bwd", "--deterministic"],
            ["--points", "pass=bwd", "--key-tiles", "1"],
        )
    }
    assert len(names) == 5 and "d=128,mask=causal" in names


def test_only_the_kernel_that_ran_is_scored():
    """A Plan may hold two kernels, of which the sizes of a call choose one."""
    words = ["--backend", "sm100", "--points", "d=128,mask=full", "--query-tiles", "1", "--key-tiles", "1"]
    subject = mutate.prepare(mutate.arguments(words))
    subject.attempt(subject.note, mutate.KNOBS[0])
    sites = mutate.find_sites(subject.texts[0], ("tcgen05 commit",))
    ran = mutate.entry_lines(subject.texts[0], subject.kernels[0])
    assert {("cta_group::2" in site.text) == (site.line not in ran) for site in sites} == {True}
    assert {site.line in ran for site in sites} == {False, True}
