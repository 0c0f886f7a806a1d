"""The measuring scripts without a GPU: the check that gates numbers, slices that resume, a worker that breaks."""

import csv
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_flash.spec.plan import Tile
from perf import baselines, bench, check, host_cost, points, records, report, series, supervise, train
from scripts import sass, tune
from tests import oracle
from tests.cases import OWN_KERNELS

FACTS = {"gpu": "none", "uuid": "u1", "commit": "c1"}
POINT = points.point(64, "causal", 128, batch=1, heads_q=4, heads_kv=2)


def row(point: points.Point, contestant: str, median: float | None, **more: str) -> dict[str, str]:
    fields = dict.fromkeys(records.COLUMNS, "")
    fields |= {**FACTS, **point.columns(), "contestant": contestant}
    if median is not None:
        fields |= {"median_us": str(median), "tflops": f"{point.flops / median * 1e-6:.4g}"}
    return fields | more


# ----------------------------------------------------------------------------------------------------------- points


def test_flops_are_the_papers():
    full, causal = points.point(128, "full", 4096), points.point(128, "causal", 4096)
    assert full.flops == 4.0 * 4 * 16 * 4096**2 * 128
    assert causal.flops == full.flops / 2
    assert replace(causal, direction="bwd").flops == causal.flops * 2.5
    window = points.point(128, "window1024", 16384)
    assert window.flops == 4.0 * 16 * (1024 * 16384 - 1024 * 1023 / 2) * 128
    assert points.point(128, "window9000", 8192, batch=1).flops == 4.0 * 16 * (8192 * 8193 / 2) * 128
    assert (window.causal, window.left) == (True, 1023)
    assert points.point(192, "full", 4096, 128).flops == 2.0 * 4 * 10 * 4096**2 * (192 + 128)


def test_tables_have_every_point_once():
    for name, size in (("hopper-forward", 97), ("hopper-backward", 97)):
        keys = [records.key_of(point) for point in points.SETS[name]]
        assert len(keys) == len(set(keys)) == size
    lengths = {p.seqlen_q for p in points.SETS["hopper-forward"] if "flex" not in p.without}
    assert lengths == set(points.FLEX_SEQLENS)


def test_points_are_spelled_and_selected():
    (point,) = points.parse("d=192,dv=128,mask=causal,S=1000,B=2,H=6,Hkv=2,dtype=fp16,pass=bwd")
    assert (point.head_dim, point.head_dim_v, point.heads_q, point.heads_kv, point.batch) == (192, 128, 6, 2, 2)
    assert points.matches(point, "S=1000,pass=bwd") and not points.matches(point, "S=1000,mask=full")
    with pytest.raises(ValueError, match="nothing=1"):
        points.parse("nothing=1")


# ----------------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize("lengths", [(37, 37), (20, 50), (50, 20)])
@pytest.mark.parametrize("mask", ["full", "causal", "window7", "window1"])
def test_the_gate_agrees_with_the_oracle(lengths, mask, monkeypatch):
    monkeypatch.setattr(check, "CHUNK_BYTES", 4096)  # several chunks of rows
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, lengths[0], 4, 16), (2, lengths[1], 2, 16), (2, lengths[1], 2, 24), (2, lengths[0], 4, 24))
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    point = points.point(16, mask, 64)
    exact = check.reference(q, k, v, check.Band(point.causal, point.left), 0.25, dout)
    options = {"causal": mask != "full", "scale": 0.25}
    if mask.startswith("window"):
        options["window"] = (int(mask.removeprefix("window")) - 1, 0)
    want = oracle.forward(q, k, v, **options)
    torch.testing.assert_close(exact.out, want.out)
    torch.testing.assert_close(exact.lse, want.lse)
    grads = oracle.backward(q, k, v, dout, **options)
    for ours, theirs in zip(exact.grads, (grads.dq, grads.dk, grads.dv), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_number_on_a_wrong_answer():
    exact = check.Reference(torch.randn(1, 4096, 8, 64), torch.zeros(1, 8, 4096))
    good = exact.out.to(torch.bfloat16)
    assert check.verdict(good, (), exact)[1] == ""
    tile, one_row, hole = good.clone(), good.clone(), good.clone()
    tile[:, :128, 0] = 0
    one_row[0, 77, 3] *= 1.5
    hole[0, 5, 5, 5] = float("nan")
    for wrong in (tile, one_row, hole):
        assert "wrong" in check.verdict(wrong, (), exact)[1]


# ----------------------------------------------------------------------------------------------------------- series


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)], ids=str)
def test_ours_is_named_where_the_gpu_has_kernels_of_its_own(monkeypatch, capability, direction):
    """Else a fallback would be timed as them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    point = replace(points.parse("d=64,mask=full,S=64")[0], direction=direction)
    attend = baselines.ours(None)(point, torch.device("cuda", 0))
    assert attend.keywords.get("backend") == OWN_KERNELS.get(capability)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", [POINT.mask, "window1024"])
def test_a_contestant_is_run_and_checked(direction, mask):
    point = replace(POINT, direction=direction, mask=mask).shrunk(40)
    inputs = series.Inputs.draw(point, torch.device("cpu"), seed=3)
    exact = inputs.reference(point)
    contestant = baselines.CONTESTANTS["ours"]
    runner = series.Runner(contestant, contestant.build(point, torch.device("cpu")), inputs)
    error, wrong = runner.checked(exact)
    assert wrong == "" and 0 < error < 1e-2
    assert "reference" in runner.plan
    times = series.interleave({"a": runner.run, "b": runner.run}, torch.device("cpu"), 0.0)
    assert len(times["a"]) == len(times["b"]) > 0


# ---------------------------------------------------------------------------------------------------- slices


def test_a_table_is_taken_in_slices(tmp_path: Path, capsys):
    arguments = ["--points", "smoke", "--dry", "--contestants", "ours,fa3", "--commit", "c", "--where", "pass=fwd"]
    args = bench.arguments([*arguments, "--out", str(tmp_path / "a.csv")])
    bench.Worker(args).run()
    rows = records.read([args.out])
    assert {r["contestant"] for r in rows if r["median_us"]} == {"ours"}
    assert all("CUDA" in r["note"] for r in rows if r["contestant"] == "fa3")
    bench.Worker(args).run()
    assert records.read([args.out]) == rows, "a second run takes nothing again"
    other = bench.arguments([*arguments, "--out", str(tmp_path / "b.csv"), "--seen", str(args.out)])
    bench.Worker(other).run()
    assert not other.out.exists(), "what another file has is not taken again"


def test_scopes_of_what_counts_as_taken():
    rows = [row(POINT, "ours", 5.0)]
    key = records.key_of(POINT)
    runs = {("u1", "c1"): "machine commit any", ("u2", "c1"): "commit any", ("u2", "c2"): "any"}
    for (uuid, commit), taken in runs.items():
        for scope in ("machine", "commit", "any"):
            found = records.done(rows, {"uuid": uuid, "commit": commit}, scope)
            assert (key in found) == (scope in taken.split())
    assert not records.done([row(POINT, "ours", None, note=records.BROKEN + "hung")], FACTS, "machine")


WORKER = """
    import json, os, sys, time
    path, mode = sys.argv[sys.argv.index("--worker") + 1], sys.argv[1]
    word = {"uuid": "u1", "commit": "c1", "contestant": "ours"}
    first = not os.path.exists(path.replace("status1", "status0")) or "status0" in path
    with open(path, "w") as file:
        json.dump(word if first else {"finished": "yes"}, file)
    if first and mode == "crash":
        os._exit(9)
    if first and mode == "hang":
        time.sleep(60)
"""


@pytest.mark.parametrize(("mode", "note"), [("crash", "ended with 9"), ("hang", "no progress")])
def test_a_broken_contestant_is_named_and_the_table_goes_on(tmp_path: Path, mode, note):
    script, out = tmp_path / "worker.py", tmp_path / "out.csv"
    script.write_text(textwrap.dedent(WORKER))
    outcome = supervise.run([sys.executable, str(script), mode], out, stall=2.0, time_limit=0.0)
    assert outcome == "finished"
    (only,) = records.read([out])
    assert only["contestant"] == "ours" and only["note"].startswith(records.BROKEN) and note in only["note"]


# ----------------------------------------------------------------------------------------------------------- report


def test_ratios_are_taken_within_a_point(tmp_path: Path):
    longer = replace(POINT, seqlen_q=4096, seqlen_k=4096)
    rows = [row(POINT, "ours", 10.0), row(POINT, "fa4", 8.0), row(POINT, "fa3", 9.0), row(longer, "ours", 10.0)]
    rows += [row(longer, "fa4", 20.0), row(longer, "cudnn", None, note="refused")]
    text = report.markdown(rows)
    assert "geometric mean 1.265 of 2 points, worst 0.800" in text
    assert "ours / fa4: geometric mean 1.265" in report.summary(rows, {records.key_of(POINT), records.key_of(longer)})
    again = row(POINT, "fa4", 40.0, date="later")
    assert list(records.measured([*rows, again])[records.key_of(POINT)]) == ["fa4"], "runs are never mixed"
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- results:x -->\nold\n<!-- /results -->\nb\n")
    report.put_between_marks(page, "x", "new")
    assert page.read_text() == "a\n<!-- results:x -->\nnew\n<!-- /results -->\nb\n"


# ------------------------------------------------------------------------------------------------------------- SASS

LISTING = """
\t.section\t.text.kernel,"ax",@progbits
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/               @P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   MUFU.EX2 R3, R4 ;
        /*0040*/                   STL [R1], R3 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   SYNCS.PHASECHK.TRANS64 P0, [UR4], R5 ;
        /*0080*/               @P0 BRA `(.L_x_3) ;
        /*0090*/                   BRA `(.L_x_2) ;
"""


def test_a_wait_out_of_line_belongs_to_its_loop():
    code = sass.functions(LISTING)["kernel"]
    assert len(code) == 10
    ((size, body),) = sass.main_loops(code)
    assert size == 8 and body["SYNCS"] == 1 and body["STL"] == 1 and body["HGMMA.64x128x16 SS"] == 1


def test_exponentials_ahead_of_the_last_wait_are_counted():
    opcodes = ("MUFU.EX2", "WARPGROUP.DEPBAR.LE", "MUFU.EX2", "MUFU.RCP", "WARPGROUP.DEPBAR.LE", "MUFU.EX2")
    body = [sass.Instruction(frozenset(), False, opcode, "") for opcode in opcodes]
    assert [sass.ahead_of_wait(body[:end]) for end in (1, 4, 6)] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------ tuning rows


def test_tuning_sweeps_tiles_and_schedules():
    words = "--backend sm90 --tile-m 128 --tile-n 112,128 --stages 2 --votes 0,1 --ahead 0,16 --draws 0,1 --dry"
    bench_ = tune.Bench.open(tune.arguments(words.split()), points.point(128, "full", 4096).shrunk())
    plans = tune.candidates(tune.arguments(words.split()), bench_.plan)
    assert len(plans) == len(set(plans)) == 16
    assert {(p.tile.tile_n, p.tile.votes, p.tile.ahead, p.draws) for p in plans} >= {(112, True, 16, False)}
    assert {p.tile.late for p in plans} == {bench_.plan.tile.late}, "what is not named stays"
    assert all(eval(tune.spelled(p.tile), {"Tile": Tile}) == p.tile for p in plans), "a row can be pasted"


# ----------------------------------------------------------------------------------------------------------- training


def test_models_that_differ_by_their_attention_learn_alike(tmp_path: Path):
    out = tmp_path / "train.csv"
    words = ["--dry", "--steps", "12", "--contestants", "ours,fa2", "--commit", "c", "--out", str(out)]
    assert train.main(words) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves = {name: [float(r["loss"]) for r in rows if r["contestant"] == name] for name in ("ours", "fa2")}
    assert all(len(curve) == 12 and sum(curve[-3:]) / 3 < curve[0] - 0.3 for curve in curves.values())
    assert max(abs(a - b) for a, b in zip(*curves.values(), strict=True)) < 0.02
    assert all(float(row["ms"]) > 0 and row["commit"] == "c" for row in rows)
    with pytest.raises(SystemExit):
        train.arguments(["--width", "200"])


def test_a_case_that_does_not_come_back_leaves_the_others_their_figures(monkeypatch):
    """Neither while it gets ready nor in a batch; and nothing is begun once the time is over."""

    def prepare(case, device, calls):
        if case.grad:
            time.sleep(20)
        return (lambda: time.sleep(20)) if case.contestant == "fa2" else lambda: 1.5

    monkeypatch.setattr(host_cost, "prepare_case", prepare)
    args = host_cost.arguments(["--patience", "1", "--time-limit", "9", "--batches", "3"])
    start = time.perf_counter()
    rows = host_cost.measure_calls(["ours", "fa2"], torch.device("cpu"), args)
    assert time.perf_counter() - start < 13
    notes = [row["note"] for row in rows if "note" in row]
    assert len(rows) == 8 and len(notes) == 6
    assert {row["median_us"] for row in rows if "note" not in row} == {1.5}
    args = host_cost.arguments(["--time-limit", "0.001"])
    assert all("no time left" in row["note"] for row in host_cost.measure_calls(["ours"], torch.device("cpu"), args))


def test_host_cost_is_appended_case_by_case(tmp_path):
    facts = {
        "gpu": "some GPU",
        "uuid": "u",
        "date": "2026-01-02",
        "commit": "c1",
        "torch": "t",
        "dsl": "d",
        "cuda": "13",
    }
    timed = {"case": "ours-compiled   no grad   one shape", "median_us": 9.876, "p20": 9.0, "p80": 11.0, "of_fa2": 0.5}
    failed = {"case": "fa2  no grad  one shape", "note": "not ready in 3 s"}
    for _ in range(2):
        host_cost.append_calls(tmp_path / "host_cost.csv", facts, [timed, failed])
    head, first, second = (tmp_path / "host_cost.csv").read_text().splitlines()
    assert head == "gpu,uuid,date,commit,torch,dsl,what,case,median_us,p20_us,p80_us,of_fa2"
    assert first == second == "some GPU,u,2026-01-02,c1,t,d,call,ours-compiled no grad one shape,9.88,9.00,11.00,0.500"
