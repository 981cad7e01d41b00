"""The schedule of a launch line as text and as a picture."""

import pytest

from megatron.core.pipeline_parallel.actions import PlanShape
from megatron.core.pipeline_parallel.plans import build_plans
from megatron.core.pipeline_parallel.timeline import make_timeline
from tools import show_schedule

SMALL = "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 3"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")  # so that what the tool sets is undone
    monkeypatch.delenv("WORLD_SIZE")


def run(capsys, line):
    status = show_schedule.main(line.split())
    output = capsys.readouterr()
    return status, output.out, output.err


def test_lists_peaks_and_bubble_are_printed(capsys):
    status, text, _ = run(capsys, SMALL)
    assert status == 0
    assert text.splitlines() == [
        "1f1b: 2 ranks, 1 chunks each, 3 microbatches",
        "rank 0: layers 0 1; at most 2 in flight (declared 2)",
        "  F0.0 send(F0.0,1) F0.1 send(F0.1,1) recv(B0.0,1) B0.0 F0.2 send(F0.2,1) recv(B0.1,1) B0.1 recv(B0.2,1) B0.2",
        "rank 1: layers 2 3; at most 1 in flight (declared 1)",
        "  recv(F0.0,0) F0.0 recv(F0.1,0) B0.0 send(B0.0,0) F0.1 B0.1 recv(F0.2,0) send(B0.1,0) F0.2 B0.2 send(B0.2,0)",
        "end after 12 forwards' time, bubble 25.0%",
    ]


def test_world_size_sets_the_microbatches_of_a_rank(capsys):
    _, text, _ = run(capsys, f"{SMALL.replace('3', '8')} --world-size 4")
    assert text.startswith("1f1b: 2 ranks, 1 chunks each, 4 microbatches")


def test_chunks_show_their_layers_and_a_picture_is_drawn(capsys, tmp_path):
    line = f"--pipeline-model-parallel-layout Et|t|t|tL {SMALL.replace('3', '4')} --png {tmp_path}/schedule.png"
    status, text, _ = run(capsys, line)
    assert status == 0
    assert "rank 1: layers 1, 3; at most 3 in flight (declared 3)" in text
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_that_cannot_run_is_refused_with_one_that_can(capsys):
    status, text, error = run(capsys, f"{SMALL} --num-virtual-stages-per-pipeline-rank 2")
    assert (status, text) == (2, "")
    assert "the last group has 1 microbatches" in error
    assert "use 2 or 4 microbatches" in error


def test_picture_without_a_folder_is_refused(capsys, tmp_path):
    status, _, message = run(capsys, f"{SMALL} --png {tmp_path}/none/schedule.png")
    assert status == 2
    assert "name a file in a folder that exists" in message


class Canvas:
    """Takes boxes and texts in place of a picture."""

    def __init__(self):
        self.boxes, self.texts = [], []

    def broken_barh(self, spans, rows, **_):
        self.boxes += [(*span, *rows) for span in spans]

    def text(self, x, y, text, **_):
        self.texts.append((x, y, text))


def test_every_box_has_a_size_and_deferred_weight_gradients_hide_no_number():
    shape = PlanShape(4, num_chunks=2, pp_size=2, delays_wgrad=True)
    spans = make_timeline(build_plans("interleaved_overlap", shape), shape)
    strips, texts = Canvas(), Canvas()
    for rank, timed in enumerate(spans):
        for span in timed:
            canvas = strips if span.end == span.start else texts
            show_schedule._draw_span(canvas, rank, span, shape)
    assert len(strips.boxes) == 2 * 2 * 4
    assert strips.texts == []
    assert all(width > 0 and height > 0 for _, width, _, height in strips.boxes + texts.boxes)
    for x, y, text in texts.texts:
        covering = [b for b in strips.boxes if b[0] < x < b[0] + b[1] and b[2] < y < b[2] + b[3]]
        assert covering == [], text
