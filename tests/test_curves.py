"""Pictures show what runs reported, whatever state their files are in, and never half of a picture."""

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from short_runs import counting_config, train
from tianji_jax.cli import main
from tianji_jax.config import ConfigError
from tianji_jax.curves import COLOURS, GROUP_POINTS, MAX_POINTS, band, draw_run, group_figure, run_figure, save, thin
from tianji_jax.records import gather, read
from written_runs import report, write_run

PNG, END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


def panel(figure: Figure, words: str) -> Axes:
    """The panel whose title or y label begins so."""
    return next(a for a in figure.axes if (a.get_title(loc="left") or a.get_ylabel()).startswith(words))


def texts(figure: Figure) -> list[str]:
    legend = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return [text.get_text() for text in figure.texts] + legend


def points(axes: Axes, line: int = 0) -> list[tuple[float, float]]:
    return list(zip(*map(list, axes.lines[line].get_data()), strict=True))


def test_a_real_run_is_drawn_as_it_was_reported(tmp_path: Path) -> None:
    config = counting_config(tmp_path, {"run": {"name": "a", "environment_steps": 4000, "stop_at_return": 1e6}})
    result, reports = train(config)
    draw_run(result.path)
    assert (result.path / "curves.png").read_bytes().startswith(PNG)
    figure = run_figure(read(result.path))
    for words, name in (
        ("return", "episode_return"),
        ("environment steps/s", "environment_steps_per_second"),
        ("policy lag", "policy_lag_mean"),
        ("loss", "learner/loss"),
    ):
        expected = [(r["environment_steps"], r[name]) for r in reports if name in r]
        assert points(panel(figure, words)) == expected
    assert "a: tianji_jax.testing:TrivialAgent on tianji_jax.testing:CountingEnv" in texts(figure)
    assert [text.get_text() for text in panel(figure, "return").texts] == ["goal 1e+06"]


def test_the_lag_of_a_run_is_a_band_from_the_youngest_to_the_oldest(tmp_path: Path) -> None:
    lags = [(0, 0.5, 1), (1, 2.0, 4), (0, 1.0, 3)]
    reports = [
        report(10 * i, policy_lag_min=low, policy_lag_mean=mean, policy_lag_max=high)
        for i, (low, mean, high) in enumerate(lags, 1)
    ]
    # One that knows the mean only must not stand in the way.
    run = write_run(tmp_path / "run", [*reports, report(40, policy_lag_mean=1.5)])
    axes = panel(run_figure(read(run)), "policy lag")
    assert points(axes) == [(10, 0.5), (20, 2.0), (30, 1.0), (40, 1.5)]
    (shade,) = axes.collections
    outline = {tuple(vertex) for vertex in shade.get_paths()[0].vertices}
    assert outline == {(10, 0), (20, 1), (30, 0), (10, 1), (20, 4), (30, 3)}


def test_files_in_any_state_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [report(10, episode_return=1.0), report(20, episode_return=2.0)])
    with (run / "metrics.jsonl").open("ab") as file:
        lines = [b'{"environment_steps": 30, "episode_return": NaN}', b"", b"[1, 2]", b"7", b"\xff\xfe", b'{"a": tr']
        lines += [b'{"episode_return": 9.0}', b'{"environment_steps": 40, "episode_return": "high"}']
        lines += [b'{"environment_steps": 50, "episode_return": Infinity}']
        lines += [b'{"environment_steps": 60, "episode_return": 6.0}', b'{"environment_steps": 70, "episode_ret']
        file.write(b"\n".join(lines))
    record = read(run)
    assert record.line("environment_steps", "episode_return")[1].tolist() == [1.0, 2.0, 6.0]
    assert points(panel(run_figure(record), "return")) == [(10, 1.0), (20, 2.0), (60, 6.0)]
    draw_run(run)


def test_a_run_that_has_nothing_to_show_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [report(10, learner_steps=0)], stop_at_return=5.0)
    figure = run_figure(read(run))
    assert [text.get_text() for text in panel(figure, "return").texts] == ["no episode has finished"]
    assert [text.get_text() for text in panel(figure, "policy lag").texts] == ["no update yet"]
    group = group_figure(gather([run]))
    assert [text.get_text() for text in panel(group, "return").texts] == ["no episode has finished"]
    assert "ppo on envpool:Pong-v5 (1 seed, no finished episode)" in texts(group)
    # The only point there is can be seen.
    (line,) = panel(group, "steps/s").lines
    assert line.get_marker() == "o"
    save(group, tmp_path / "a.png")


def test_nothing_is_drawn_before_the_first_report(tmp_path: Path) -> None:
    draw_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"environment_st')
    draw_run(tmp_path)
    assert not (tmp_path / "curves.png").exists()


def test_of_a_very_long_run_few_reports_are_read_and_its_whole_length_is_drawn(tmp_path: Path) -> None:
    reports = [report(step, episode_return=float(step), padding="x" * 1500) for step in range(20_000)]
    run = write_run(tmp_path / "run", reports)
    record = read(run, 2000)
    assert 1900 <= record.reports <= 2000
    x, y = record.line("environment_steps", "episode_return")
    np.testing.assert_array_equal(x, y)
    assert x[0] == 0
    assert np.diff(x).min() > 0
    assert np.diff(x).max() <= 25
    assert x[-1] > 19_975
    assert len(panel(run_figure(record), "return").lines[0].get_xdata()) == MAX_POINTS
    assert read(run).reports == 20_000


def test_thinned_lines_keep_ends_means_and_extremes() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(2357.0), rng.normal(size=2357)
    assert thin((x, y), 2357)[1] is y
    thinned, means = thin((x, y), 100)
    _, low = thin((x, y), 100, np.minimum)
    _, high = thin((x, y), 100, np.maximum)
    assert len(thinned) == 100
    assert thinned[-1] == x[-1]
    first = 0
    for index, last in enumerate(thinned.astype(int)):
        part = y[first : last + 1]
        assert means[index] == pytest.approx(part.mean())
        assert (low[index], high[index]) == (part.min(), part.max())
        first = last + 1


def test_seeds_are_a_mean_and_a_band_where_all_have_points_and_thin_lines_beyond(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ends = {0: 1000, 1: 800, 2: 1200}
    for seed, end in ends.items():
        steps = np.unique(rng.integers(10 * (seed + 1), end, 50)).tolist()
        steps.append(end)
        returns = rng.normal(size=len(steps)).tolist()
        reports = [report(step, episode_return=value) for step, value in zip(steps, returns, strict=True)]
        write_run(tmp_path / f"run-{seed}", reports, seed=seed)
    (group,) = gather([tmp_path])
    lines = [record.line("environment_steps", "episode_return") for record in group.records]
    start, end = max(x[0] for x, _ in lines), 800

    def value(line: Sequence[np.ndarray], at: float) -> float:
        """By the definition of a straight line between two points."""
        x, y = line
        after = max(1, int(np.searchsorted(x, at)))
        weight = (at - x[after - 1]) / (x[after] - x[after - 1])
        return float(y[after - 1] * (1 - weight) + y[after] * weight)

    axes = panel(group_figure([group]), "return")
    mean, *beyond = axes.lines
    grid = mean.get_xdata()
    assert (grid[0], grid[-1], len(grid)) == (start, end, GROUP_POINTS)
    expected = np.array([[value(line, at) for line in lines] for at in grid])
    np.testing.assert_allclose(mean.get_ydata(), expected.mean(axis=1), atol=1e-9)
    (shade,) = axes.collections
    vertices = shade.get_paths()[0].vertices
    for column, at in enumerate(grid[1:-1], 1):
        at_grid = vertices[np.isclose(vertices[:, 0], at), 1]
        assert at_grid.min() == pytest.approx(expected[column].min())
        assert at_grid.max() == pytest.approx(expected[column].max())
    # Those of seeds 0 and 2 that go on, and of those that begin before the last.
    assert sorted(line.get_xdata()[-1] for line in beyond) == [start, start, 1000, 1200]
    assert all(line.get_linewidth() < mean.get_linewidth() for line in beyond)
    assert all(line.get_color() == mean.get_color() == COLOURS[0] for line in beyond)
    assert "line: mean, band: min to max, thin: single runs" in texts(group_figure([group]))


def test_time_that_goes_back_where_a_run_was_resumed_does_not_bend_the_line(tmp_path: Path) -> None:
    seconds = [1.0, 5.0, 4.0, 6.0]
    reports = [report(step, wall_seconds=at, episode_return=1.0 * step) for step, at in enumerate(seconds)]
    figure = group_figure(gather([write_run(tmp_path / "run", reports)]), "seconds")
    assert points(panel(figure, "return")) == [(1.0, 0.0), (5.0, 1.0), (5.0, 2.0), (6.0, 3.0)]


def test_runs_that_never_overlap_are_single_lines(tmp_path: Path) -> None:
    for seed in (0, 1):
        reports = [report(step, episode_return=1.0) for step in (100 * seed + 10, 100 * seed + 50)]
        write_run(tmp_path / f"run-{seed}", reports, seed=seed)
    (group,) = gather([tmp_path])
    axes = panel(group_figure([group]), "return")
    assert [line.get_xdata().tolist() for line in axes.lines] == [[10, 50], [110, 150]]
    assert not axes.collections
    assert band([(np.array([0.0, 1.0]), np.zeros(2)), (np.array([1.0, 2.0]), np.zeros(2))]) is None


@pytest.mark.parametrize(
    ("across", "seconds", "name", "last"),
    [
        ("steps", 100.0, "environment steps", 10.0),
        ("frames", 100.0, "frames", 40.0),
        ("seconds", 100.0, "seconds", 100.0),
        ("seconds", 6000.0, "minutes", 100.0),
        ("seconds", 36_000.0, "hours", 10.0),
    ],
)
def test_what_it_is_drawn_against(tmp_path: Path, across: Any, seconds: float, name: str, last: float) -> None:
    run = write_run(tmp_path / "run", [report(10, wall_seconds=seconds, episode_return=1.0)])
    figure = group_figure(gather([run]), across)
    assert panel(figure, "steps/s").get_xlabel() == name
    assert points(panel(figure, "return")) == [(last, 1.0)]


def written(figure: Figure) -> list[Text]:
    """All that can be read once it is drawn; ticks beyond the limits are not."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title]
        for axis, at, limits in ((axes.xaxis, 0, axes.get_xlim()), (axes.yaxis, 1, axes.get_ylim())):
            labels = [tick.label1 for tick in axis.get_major_ticks() if tick.label1.get_visible()]
            found += [label for label in labels if limits[0] <= label.get_position()[at] <= limits[1]]
    return [text for text in found if text.get_text()]


def test_all_words_are_inside_the_picture_and_beside_the_curves(tmp_path: Path) -> None:
    reports = [report(step, episode_return=-12345.678 * step) for step in (100_000, 300_001)]
    runs = [write_run(tmp_path / f"run-{index}-{'name_' * 25}", reports, seed=index) for index in range(4)]
    labels = ["x" * 130, "a few words each of which is short " * 4, "_short", r"$\frac$"]
    for figure in (group_figure(gather(runs, labels), title="A title", goal=1.0), run_figure(read(runs[0]))):
        figure.canvas.draw()
        assert len(written(figure)) > 20
        for text in written(figure):
            box = text.get_window_extent()
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert not any(box.overlaps(axes.bbox) for axes in figure.axes)
            assert not any(box.overlaps(text.get_window_extent()) for text in figure.texts)
    assert r"$\frac$ (1 seed)" in texts(group_figure(gather(runs, labels)))


def test_it_is_drawn_while_reports_are_written_and_nobody_sees_half_a_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [report(1, episode_return=1.0)])
    ended, errors, seen = threading.Event(), [], 0

    def write() -> None:
        # In pieces, as a file system shows them.
        with (run / "metrics.jsonl").open("ab", buffering=0) as file:
            step = 1
            while not ended.is_set():
                step += 1
                line = json.dumps(report(step, episode_return=float(step))).encode() + b"\n"
                file.write(line[:40])
                file.write(line[40:])
                time.sleep(1e-3)

    def draw() -> None:
        try:
            for _ in range(3):
                draw_run(run)
        except BaseException as error:
            errors.append(error)

    writer, *drawers = (threading.Thread(target=target) for target in (write, draw, draw))
    for thread in (writer, *drawers):
        thread.start()
    while any(drawer.is_alive() for drawer in drawers):
        if (run / "curves.png").exists():
            data = (run / "curves.png").read_bytes()
            assert data.startswith(PNG)
            assert data.endswith(END)
            seen += 1
        time.sleep(1e-2)  # reading all the time would leave little to those who draw
    ended.set()
    writer.join()
    assert not errors
    assert seen > 10
    x, y = read(run).line("environment_steps", "episode_return")
    np.testing.assert_array_equal(x, y)
    assert x.tolist() == list(range(1, len(x) + 1))
    assert {path.name for path in run.iterdir()} == {"config.yaml", "metrics.jsonl", "curves.png"}


def test_a_picture_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [report(1)])
    (run / "curves.png").mkdir()
    with pytest.raises(OSError, match="directory"):
        draw_run(run)
    assert {path.name for path in run.iterdir()} == {"config.yaml", "metrics.jsonl", "curves.png"}


def test_a_drawing_leaves_no_memory_behind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [report(1, episode_return=1.0)])
    draw_run(run)
    gc.collect()
    gc.disable()
    try:
        draw_run(run)
        assert not any(isinstance(thing, Figure) for thing in gc.get_objects())
    finally:
        gc.enable()


def test_matplotlib_is_loaded_by_those_who_draw_and_pyplot_by_nobody(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [report(1)])
    code = (
        "import sys, pathlib\n"
        "from tianji_jax.curves import draw_run\n"
        "assert 'matplotlib' not in sys.modules and 'jax' not in sys.modules\n"
        f"draw_run(pathlib.Path({str(run)!r}))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (run / "curves.png").exists()


@pytest.mark.parametrize(("name", "begins"), [("a.png", PNG), ("deep/er/a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
def test_plot_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, begins: bytes) -> None:
    runs = [write_run(tmp_path / f"run-{seed}", [report(1), report(2)], seed=seed) for seed in (0, 1)]
    assert main(["plot", *map(str, runs), "--output", str(tmp_path / name), "--goal", "-3", "--x", "seconds"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / name}\n"
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_plot_refuses_in_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run", [report(1)]))
    empty = write_run(tmp_path / "empty", [])
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "a.png"
    for arguments, words in (
        ([run, str(tmp_path / "nowhere")], [f"{tmp_path / 'nowhere'}: no such folder"]),
        ([run, str(empty), str(tmp_path / "file")], [f"{empty}: the run has no report yet", "file: no such folder"]),
        ([run, "--output", str(tmp_path / "a.jpg")], ["should end in .png, .pdf or .svg"]),
        ([run, "--output", str(inside)], [f"--output: cannot write {inside}"]),
        ([run, run, run, "--label", "a", "b"], ["--label: got 2 for 3 folders"]),
    ):
        assert main(["plot", *arguments]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("tianji: ")
        assert len(errors.splitlines()) == len(words)
        for word in words:
            assert word in errors
    with pytest.raises(SystemExit):
        main(["plot", run, "--goal", "nan"])
    assert "--goal: 'nan' is not a finite number" in capsys.readouterr().err


def test_an_unreadable_configuration_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [report(1)])
    for text, words in (("a: [", "cannot be read"), ("7", "must hold a mapping"), ("", "must hold a mapping")):
        (run / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            gather([run])
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml is missing"):
        gather([run])
    draw_run(run)  # needs none
    assert (run / "curves.png").exists()
