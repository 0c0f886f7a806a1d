"""The report: bytes that the model says, the profiler's list read back, and a page that leaves nothing out."""

import csv
import io
import re
import subprocess
from html.parser import HTMLParser

import pytest

from perf import contents, figures, memory, page, points, records, report, traffic

WALK = points.point(64, "full", 4096, batch=1, heads_q=1, heads_kv=1)  # one head of the papers' walkthrough
CAUSAL = points.point(64, "causal", 4096, batch=1, heads_q=1, heads_kv=1)
MB = 1e6


def row(point, contestant, median, **more):
    fields = dict.fromkeys(records.COLUMNS, "")
    fields |= {"gpu": "some GPU", "uuid": "u", "date": "2026-01-02T03:04:05Z", "commit": "c1", "clock_mhz": "1500"}
    fields |= {**point.columns(), "contestant": contestant, "median_us": str(median), "rel_err": "2.0e-03"}
    return fields | {"tflops": f"{point.flops / median * 1e-6:.4g}"} | more


# ------------------------------------------------------------------------------------------------------------- model


def test_the_model_has_the_papers_numbers():
    ours, standard = traffic.tiled(WALK, 128, 128), traffic.standard(WALK)
    assert ours.sm_read - 2**19 == 32 * 2**20  # 32 query tiles read K and V, 1 MiB each time; and Q once, half a MiB
    assert ours.sm_written == 2**19 and ours.hbm == 4 * 2**19
    scores = standard.hbm - ours.hbm
    assert scores == pytest.approx(134 * MB, rel=2e-3)
    assert traffic.tiled(CAUSAL, 128, 128).sm_read - 2**19 == pytest.approx(17 * MB, rel=2e-2)


@pytest.mark.parametrize("lengths", [(100, 300), (300, 100), (257, 257), (1, 5)])
@pytest.mark.parametrize("tile", [(64, 48), (192, 128)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_keys_are_counted_tile_by_tile(lengths, tile, mask):
    """Against the mask itself: a key tile is read, up to the last key, where a row of the query tile sees it."""
    seqlen_q, seqlen_k = lengths
    point = points.Point(64, 64, mask, 1, 1, 1, seqlen_q, seqlen_k)
    expected = 0
    for first in range(0, seqlen_q, tile[0]):
        for key in range(0, seqlen_k, tile[1]):
            rows = range(first, first + tile[0])  # a tile's rows past the end read as the others do
            if mask == "full" or any(key <= row + seqlen_k - seqlen_q for row in rows):
                expected += min(tile[1], seqlen_k - key)
    assert traffic.keys_read(point, *tile) == expected


def test_a_window_is_refused_by_the_model():
    with pytest.raises(ValueError, match="window100"):
        traffic.tiled(points.point(64, "window100", 1024), 128, 128)


def test_our_tiles_come_from_the_dispatcher():
    for point in traffic.POINTS:
        ours, standard, plan = traffic.modelled(point)
        assert plan.startswith("sm90 forward") and ours.hbm < ours.sm_read < standard.hbm


# ---------------------------------------------------------------------------------------------------------- profiler


def listing(*kernels):
    """As ncu writes raw pages: words of its own, a head, a row of units, numbers with separators."""
    metrics = [metric for metric, _ in traffic.METRICS.values()]
    text = io.StringIO()
    text.write("==PROF== Connected to process 7\n")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", *metrics])
    writer.writerow(["", "", *("byte", "byte", "sector", "sector", "byte", "byte", "ns")])
    for number, (name, *values) in enumerate(kernels):
        writer.writerow([number, name, *(f"{value:,}" for value in values)])
    return text.getvalue()


def test_kernels_between_marks_are_one_contestants():
    mark = ("void at::cuda::spin_kernel(long)", 9, 9, 9, 9, 9, 9, 9)
    text = listing(
        mark,
        ("ours", 7_777, 7_700, 1000, 10, 5_000, 600, 70),
        mark,
        ("a", 6, 5, 1, 2, 3, 4, 5),
        ("b", 60, 50, 10, 20, 30, 40, 50),
    )
    found = traffic.parse(text, [(0, "ours"), (0, "standard")])
    counts = (1, 7_777, 7_700, 32_000, 320, 5_000, 600, 70)  # sectors of 32 bytes in two of them
    assert found[0, "ours"] == dict(zip(("kernels", *traffic.METRICS), counts, strict=True))
    assert found[0, "standard"]["kernels"] == 2 and found[0, "standard"]["l2_read_bytes"] == 11 * 32
    with pytest.raises(ValueError, match="lists 2 runs, and there were 1"):
        traffic.parse(text, [(0, "ours")])


def test_a_metric_that_the_profiler_does_not_know_is_said_and_left_out(monkeypatch, capsys):
    names = [metric.rsplit(".", 1)[0] for metric, _ in traffic.METRICS.values()]
    known = "".join(f"{name}  what it counts\n" for name in names if not name.endswith("tma_ld"))
    ran = subprocess.CompletedProcess([], 0, stdout=known)
    monkeypatch.setattr(traffic.subprocess, "run", lambda *args, **kwargs: ran)
    assert len(traffic.known_metrics().split(",")) == len(names) - 1
    assert (
        "not known to this profiler: l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum" in capsys.readouterr().err
    )


# -------------------------------------------------------------------------------------------------------------- page


class Reader(HTMLParser):
    """Open tags, as they close: a page that a browser has to mend fails."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.images, self.links, self.ids, self.text = [], 0, [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.images += tag == "img"
        self.links += [attributes.get("href") or attributes["src"]] if tag in ("a", "img", "script", "link") else []
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


@pytest.fixture
def results(tmp_path):
    longer = points.point(64, "causal", 8192, batch=1, heads_q=1, heads_kv=1)
    rows = [row(CAUSAL, "ours", 10.0), row(CAUSAL, "fa4", 8.0), row(longer, "ours", 20.0), row(longer, "fa4", 40.0)]
    records.append(tmp_path / "hopper_forward.csv", rows)
    return tmp_path


def test_a_page_of_what_was_measured_says_what_was_not(results):
    reader = read(page.page(results))
    words = " ".join(reader.text)
    assert "geometric mean 1.265 of 2 points, worst 0.800" in words and "1.265x" in reader.text
    assert words.count("Not measured yet") == 3  # caches, memory and host cost
    assert "No profiler has counted these yet" in words and "Not yet run on silicon" in words
    assert {link[1:] for link in reader.links if link.startswith("#")} == set(reader.ids) == {"speed", "accuracy",
            "serving", "memory", "bytes", "host", "blackwell"}  # fmt: skip
    assert all(link.startswith(("#", "data:image/png")) for link in reader.links), "the page needs no other file"


def test_an_empty_folder_has_a_page_too(tmp_path):
    assert " ".join(read(page.page(tmp_path)).text).count("Not measured yet") == 5


def test_caches_and_packed_sequences_are_shown(results):
    place = {"B": "4", "Hq": "32", "Hkv": "8", "Sq": "1", "Sk": "1000", "d": "128", "dv": "64", "dtype": "bf16"}
    decode = [row(CAUSAL, name, us) | place | {"pass": "decode"} for name, us in (("ours", 2.0), ("cudnn", 1.0))]
    records.append(results / "decode.csv", decode)
    packed = [row(CAUSAL, name, 3.0) | {"pass": "varlen-bwd", "B": "5"} for name in ("ours", "torch")]
    records.append(results / "varlen.csv", packed)
    text = read(page.page(results)).text
    gigabytes = 4 * 8 * 1000 * (128 + 64) * 2 / 1e3  # in a microsecond
    assert {"4 x 1000 keys", f"{gigabytes / 2:.0f}", f"{gigabytes:.0f}", "0.500"} <= set(text)
    assert {"backward, 5 sequences, longest 4096", "PyTorch's varlen_attn", "1.000"} <= set(text)


def test_memory_and_counted_bytes_are_shown(results):
    facts = {"gpu": "some GPU", "uuid": "u", "date": "2026-01-02", "commit": "c1", "torch": "t", "dsl": "d"}
    with (results / "memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, memory.COLUMNS)
        writer.writeheader()
        for seqlen in (1024, 4096):
            for direction in memory.PASSES:
                place = {"contestant": "ours", "pass": direction, "d": 128, "B": 1, "H": 16, "S": seqlen}
                writer.writerow({**facts, **place, "peak_bytes": 3 * 2**20 * seqlen // 1024})
    counts = dict(zip(("kernels", *traffic.METRICS), (1, "", "", 123_400_000, 1, 1_000_000, 500_000, 1), strict=True))
    place = {"contestant": "ours", "plan": "", "d": 64, "mask": "causal", "B": 1, "H": 32, "S": 4096}
    traffic.write(results / "traffic.csv", [{**facts, "cuda": "", "driver": "", **place, **counts}])
    text = read(page.page(results)).text
    assert {"3.0", "12.0", "123.4", "1.5"} <= set(text)
    assert "No profiler" not in " ".join(text)


def test_the_worst_of_three_gradients_is_shown(results):
    head = "shape,yardstick,dq,dk,dv,dq_yardstick,dk_yardstick,dv_yardstick"
    lines = [head, "d64-full-b1,fa4,1e-3,3e-3,1e-3,1e-3,2e-3,1e-3", "d64-full-b9,fa4,1e-3,1e-3,1e-3,1e-3,1e-3,1e-3"]
    (results / "gradient_errors.csv").write_text("\n".join(lines))
    text = read(page.page(results)).text
    assert "1.500" in text and "fa4" in text and "error ratios of gradients on a GPU" in text


def test_without_matplotlib_there_are_tables(results, monkeypatch):
    def missing():
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(figures, "_pyplot", missing)
    reader = read(page.page(results))
    assert reader.images == 0 and figures.MISSING in reader.text and "1.265x" in reader.text


def test_a_page_and_figures_are_small_files(results, tmp_path):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "out.html", tmp_path / "figures" / "plot.png"
    assert report.main([str(results / "hopper_forward.csv"), "--plot", str(plot), "--page", str(out)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG") and 1000 < plot.stat().st_size < 300_000
    assert read(out.read_text()).images >= 2
    with pytest.raises(ValueError, match="nothing to plot"):
        figures.throughput([])
    with pytest.raises(SystemExit):
        report.main([])


# ------------------------------------------------------------------------------------------------------------- notes


def test_entries_are_listed_by_subject():
    notes = """# Notes

```
## a heading in an example
```

## 2026-01-03  Hopper forward: twice (lost)
## 2026-01-02  Hopper backward, d=128: once
## 2026-01-03  Hopper forward: twice (lost)
## 2026-01-01  Clocks
"""
    assert contents.contents(notes).splitlines() == [
        "**Hopper forward**",
        "",
        "- [Hopper forward: twice (lost)](#2026-01-03--hopper-forward-twice-lost)",
        "- [Hopper forward: twice (lost)](#2026-01-03--hopper-forward-twice-lost-1)",
        "",
        "**Hopper backward**",
        "",
        "- [Hopper backward, d=128: once](#2026-01-02--hopper-backward-d128-once)",
        "",
        "**Everything else**",
        "",
        "- [Clocks](#2026-01-01--clocks)",
    ]


def test_every_link_in_the_notes_leads_to_an_entry():
    text = contents.NOTES.read_text()
    links = re.findall(r"\]\(#(.+)\)$", text, flags=re.MULTILINE)
    assert len(links) > 50 and set(links) <= set(contents.anchors(contents.entries(text)))
