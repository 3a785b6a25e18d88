"""A picture of every kind is a PNG that has something drawn on it."""

import pytest
from matplotlib.image import imread

from hal_attn.bench import pictures
from hal_attn.bench.kernels import view as kernels
from hal_attn.bench.views import KINDS, view_of
from tests.bench import reports


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_written(kind, tmp_path):
    report = reports.ALL[kind]()
    file = tmp_path / "picture.png"
    view_of(report).plot(report, file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = imread(file)
    assert pixels.shape[0] > 200
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, pixels.shape[2]).tolist()}) > 3


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """Draws a report and gives the figure instead of writing it."""
    kept = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: kept.append(figure))

    def draw(report):
        view_of(report).plot(report, tmp_path / "none.png")
        return kept.pop()

    return draw


def texts(figure):
    return [text.get_text() for text in figure.findobj() if hasattr(text, "get_text")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_says_where_it_was_measured(kind, figure):
    assert any("cpu, a processor" in text and "torch 2.13.0" in text for text in texts(figure(reports.ALL[kind]())))


def test_kernels_have_a_bar_each_and_marks_on_what_is_chosen(figure):
    drawn = figure(reports.of_kernels())
    axes = drawn.axes[0]
    heights = sorted(bar.get_height() for bar in axes.patches if bar.get_height())
    assert heights == [400.0, 500.0, 500.0]
    marks = [line for line in axes.lines if len(line.get_xdata())]
    assert sorted(line.get_marker() for line in marks) == ["*", "*", "v", "v"]
    assert any("chosen 0.80" in text for text in texts(drawn))


def test_dispatch_has_the_mark_as_a_line(figure):
    axes = figure(reports.of_dispatch()).axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[2.0, 2.0]]
    assert [bar.get_width() for bar in axes.patches] == [3.5, 1.0]


def test_packed_has_the_mark_at_a_multiple_of_the_best_other_way(figure):
    time, memory = figure(reports.of_packed()).axes
    assert list(time.lines[0].get_xdata()) == pytest.approx([4.4, 4.4])
    assert [bar.get_width() for bar in time.patches] == [5.0, 4.0]
    assert len(memory.patches) == 2


def test_part_of_the_best_leaves_out_what_is_wrong():
    rows = kernels._groups(reports.of_kernels())[0]
    assert [kernels.part_of_best(row, rows) for row in rows] == [1.0, 0.8, None]
