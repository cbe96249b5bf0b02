"""The benchmark's tables, marks and picture, from rows made by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from kvkeep.benchmark import plot, report
from kvkeep.benchmark.marks import marks
from kvkeep.benchmark.timing import row

SETTINGS = {
    "model": "some/model",
    "dtype": "bfloat16",
    "budget": 512,
    "threads": 1,
    "clock": "processor time of the thread",
    "device": "cpu",
    "processor": "x86_64, AVX512",
    "load_average": 1.5,
    "load_average_after": 2.5,
    "python": "3.11",
    "torch": "2.13",
    "transformers": "5.24",
    "numba": "0.6",
    "weight_bytes": 269_000_000,
    "bandwidth_gb_per_s": 14.5,
    "bandwidth_by": "sum",
}


def decoded(policy, context, median, batch=1, **more):
    budget = None if policy.startswith(("full", "static")) else 512
    common = {"context": context, "batch": batch, "ratio": 1.0, "kv_bytes": 1000 * context, "floor_ms": 10.0}
    return row("decode", policy, "bfloat16", [median, median, median / 2], budget=budget, **common | more)


DECODED = [
    decoded("full", 1024, 90.0),
    decoded("streaming", 1024, 80.0),
    decoded("kvpop", 1024, 1.0),
    decoded("full", 32_768, 336.0),
    decoded("full_preallocated", 32_768, 84.0),
    decoded("static", 32_768, 90.0),
    decoded("streaming", 32_768, 84.0),
    decoded("kvpop", 32_768, 1000.0),
]


def found(rows):
    return {mark.demand: (mark.found, mark.reached) for mark in marks(rows)}


def test_marks_of_decoding_are_against_the_first_policy_that_evicts():
    told = found(DECODED)
    assert told == {
        "streaming 512, batch 1: a step at 32768 tokens at most 1.05 times one at 1024": ("1.050 (best 1.050)", True),
        "full over streaming at 32768 tokens, batch 1: at least 4.0 (bfloat16)": ("4.00 (best 4.00)", True),
        "full_preallocated over streaming at 32768 tokens, batch 1: at least 1.5 (bfloat16)": (
            "1.00 (best 1.00)",
            False,
        ),
    }


def test_other_marks_are_reached_or_not():
    for made, reached in (
        (row("overhead", "kvpop_mlp", "float32", [1], part="step", reference_ms_best=1.0, ratio=1.031), False),
        (row("overhead", "kvpop_mlp", "float32", [1], part="step", reference_ms_best=1.0, ratio=1.029), True),
        (row("overhead", "foresightkv", "float32", [1], part="step", reference_ms_best=1.0, ratio=1.031), False),
        (row("overhead", "kvpop", "float32", [1], part="step", reference_ms_best=1.0, ratio=1.049), True),
        (row("prefill", "kvpop", "float32", [1], budget=512, context=4096, ratio=0.49), True),
        (row("prefill", "kvpop", "float32", [1], budget=512, context=8192, ratio=0.49), False),
        (row("labels", "row blocks", "float32", [1], part="golden", context=8192, ratio=0.24), True),
        (row("labels", "row blocks", "float32", [1], part="golden", context=8192, ratio=0.26), False),
        (row("running_topk", "numba", "float32", [999.0], batch=288, context=16_384), True),
        (row("running_topk", "numba", "float32", [1001.0], batch=288, context=16_384), False),
        (row("memory", "kvpop", "float32", context=4000, grown_bytes=0), True),
        (row("memory", "kvpop", "float32", context=4000, grown_bytes=1), False),
    ):
        assert [mark.reached for mark in marks([made])] == [reached], made
    for silent in (
        row("overhead", "h2o", "float32", [1], part="step", reference_ms_best=1.0, ratio=2),
        row("overhead", "kvpop", "float32", [1], part="evicting step", ratio=9),
        row("prefill", "sdpa", "float32", [1], context=8192, ratio=1),
        row("labels", "dense", "float32", [1], part="golden", context=8192, ratio=1),
        row("labels", "row blocks", "float32", [1], part="golden", context=4096, ratio=0.9),
        decoded("full", 8192, 1.0),
    ):
        assert marks([silent]) == []


def test_tables_show_what_was_measured_and_no_empty_column():
    (table,) = report.tables(DECODED)
    assert table.head[:6] == ["policy", "budget", "context", "batch", "best ms", "median ms"]
    assert "peak MB" not in table.head
    assert table.cells[3][:6] == ["full", "", "32768", "1", "168.0", "336.0"]
    assert table.cells[3][table.head.index("x floor")] == "33.6"
    sections = report.tables(
        [
            row(
                "overhead",
                "kvpop",
                "float32",
                [80.0],
                part="step",
                ratio=1.034,
                reference_ms=77.4,
                reference_ms_best=78.0,
            ),
            row("overhead", "kvpop", "float32", [0.0123], part="score", budget=512),
            row("prefill", "kvpop", "float32", [5.0], budget=512, context=4096, ratio=0.2, peak_rss=300_000_000),
        ]
    )
    assert [table.title for table in sections] == ["overhead", "parts", "prefill"]
    assert {"+3.4%", "+2.6%"} < set(sections[0].cells[0])
    assert "12.3" in sections[1].cells[0]
    assert sections[2].cells[0][-2:] == ["5.00", "300"]


def test_the_page_has_marks_tables_and_circumstances(tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"rows": DECODED, "settings": SETTINGS}))
    report.main([str(path), str(path)])
    page = capsys.readouterr().out
    assert page.count("### decode, bfloat16") == 2
    assert (
        "| full over streaming at 32768 tokens, batch 1: at least 4.0 (bfloat16) | 4.00 (best 4.00) | reached |" in page
    )
    assert "| 1.00 (best 1.00) | not reached |" in page
    assert "1 thread, processor time of the thread; load average 1.5 before and 2.5 after" in page
    assert "weights 269 MB, read bandwidth 14.5 GB/s (sum)" in page


@pytest.mark.parametrize("text", ["", "{}", '{"rows": [{"what": "decode"}], "settings": {}}'])
def test_what_is_no_benchmark_is_no_report(tmp_path, capsys, text):
    path = tmp_path / "out.json"
    path.write_text(text)
    for arguments in ([str(path)], [], [str(tmp_path / "nowhere.json")]):
        with pytest.raises(SystemExit) as stopped:
            report.main(arguments)
        assert stopped.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_the_picture_has_a_line_of_every_policy_in_every_panel():
    rows = DECODED + [decoded("full", context, 9.0, batch=4) for context in (1024, 32_768)]
    picture = plot.svg({"rows": rows, "settings": SETTINGS | {"model": "a <b> & c"}})
    root = ElementTree.fromstring(picture)
    spaces = {"svg": "http://www.w3.org/2000/svg"}
    assert any("a <b> & c" in (text.text or "") for text in root.iter("{http://www.w3.org/2000/svg}text"))
    panels = [group for group in root.findall("svg:g", spaces) if group.find("svg:rect", spaces) is not None]
    assert [panel.find("svg:text", spaces).text for panel in panels] == [
        *("ms per step, batch 1", "cache, MB, batch 1", "ms per step, batch 4", "cache, MB, batch 4")
    ]
    points = [line.get("points").split() for line in panels[0].findall("svg:polyline", spaces)]
    assert [len(line) for line in points] == [2, 2, 2, 1, 1]  # full, streaming, kvpop, full_preallocated, static
    for line in points:
        for point in line:
            x, y = map(float, point.split(","))
            assert 0 <= x <= plot.WIDTH
            assert 0 <= y <= plot.HEIGHT
    first, last = (tuple(map(float, point.split(","))) for point in points[0])
    assert first[0] < last[0]
    assert first[1] > last[1]  # slower is higher


def test_a_plot_of_nothing_or_in_another_format_is_refused(tmp_path):
    for arguments, words in (
        ((tmp_path / "a.png", ["decode"], [1, 2]), "ends with .svg"),
        ((tmp_path / "a.svg", ["labels"], [1, 2]), "two lengths or more"),
        ((tmp_path / "a.svg", ["decode"], [1]), "two lengths or more"),
    ):
        with pytest.raises(ValueError, match=words):
            plot.check(*arguments)
    plot.check(tmp_path / "a.SVG", ["decode"], [1, 2])
