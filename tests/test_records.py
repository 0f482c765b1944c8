"""Runs are gathered by what they have in common, and compared by what they took to reach a return."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from short_runs import counting_config, train
from tianji_jax.cli import main
from tianji_jax.comparison import choose_goal, compare, reached
from tianji_jax.records import compact, gather, read
from tianji_jax.run_folder import held
from written_runs import report, write_run


def labels(*paths: Path) -> list[tuple[str, str]]:
    return [(group.label, group.size) for group in gather(paths)]


def test_real_runs_that_differ_in_their_seed_are_one_group(tmp_path: Path) -> None:
    for seed, max_lag in ((0, 1), (1, 1), (2, 1), (0, 4)):
        train(counting_config(tmp_path / "runs", {"run": {"seed": seed}, "staleness": {"max_lag": max_lag}}))
    assert labels(tmp_path / "runs") == [("staleness.max_lag=1", "3 seeds"), ("staleness.max_lag=4", "1 seed")]


def test_names_tell_groups_apart_and_what_they_bring_with_them_does_not(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [report(1)])
    write_run(tmp_path / "b", [report(1)], agent={"name": "impala", "learning_rate": 1e-3, "rho": 1.0})
    assert labels(tmp_path) == [("agent.name=ppo", "1 seed"), ("agent.name=impala", "1 seed")]
    # What differs under the same names is told as well.
    write_run(tmp_path / "c", [report(1)], agent={"name": "impala", "learning_rate": 1e-4, "rho": 1.0})
    assert [label for label, _ in labels(tmp_path)] == [
        "agent.name=ppo, agent.learning_rate=0.0003",
        "agent.name=impala, agent.learning_rate=0.001",
        "agent.name=impala, agent.learning_rate=0.0001",
    ]


def test_settings_that_are_not_there_tell_groups_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [report(1)])
    write_run(tmp_path / "b", [report(1)], environment={"name": "envpool:Pong-v5", "options": {"frame_skip": 2}})
    write_run(tmp_path / "c", [report(1)], environment={"name": "envpool:Pong-v5", "options": {"frame_skip": None}})
    name = "environment.options.frame_skip"
    assert [label for label, _ in labels(tmp_path)] == [f"{name} not set", f"{name}=2", f"{name}=null"]


def test_one_group_is_called_after_what_it_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, [report(1)])
    assert labels(tmp_path) == [("ppo on envpool:Pong-v5", "2 runs")]  # of one seed


def test_labels_make_groups(tmp_path: Path) -> None:
    a, b, c = (write_run(tmp_path / name, [report(1)], seed=seed) for seed, name in enumerate("abc"))
    groups = gather([a, b, c], ["x", "y", "x"])
    assert [(group.label, [record.folder for record in group.records]) for group in groups] == [
        ("x", [a, c]),
        ("y", [b]),
    ]
    assert [(group.label, group.size) for group in gather([tmp_path], ["all"])] == [("all", "3 seeds")]
    assert [(group.label, group.size) for group in gather([a, b], [""])] == [("", "2 seeds")]


def test_a_run_that_is_met_twice_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [report(1)])
    (tmp_path / "link").symlink_to("a")
    assert labels(tmp_path / "a", tmp_path, tmp_path / "link") == [("ppo on envpool:Pong-v5", "1 seed")]


def test_what_has_no_report_is_left_out_of_a_folder_of_runs_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "a", [report(1)])
    write_run(tmp_path / "b", [])
    (tmp_path / "notes").mkdir()
    assert labels(tmp_path) == [("ppo on envpool:Pong-v5", "1 seed")]
    assert [record.message for record in caplog.records] == [f"{tmp_path / 'b'} is left out: it has no report yet"]


def test_numbers_are_short() -> None:
    assert [compact(value) for value in (0, 0.951, 475, 999.4, 1e-5)] == ["0", "0.951", "475", "999", "1e-05"]
    assert [compact(value) for value in (999.6, 74_345, -12_345)] == ["1k", "74.3k", "-12.3k"]
    assert [compact(value) for value in (999_999, 3.13e6, 2e9, 5e12)] == ["1M", "3.13M", "2G", "5T"]
    assert compact(10_050, 6) == "10.05k"


def climb(*points: tuple[int, float, int]) -> list[dict[str, float]]:
    """Reports of (environment steps, return, episodes)."""
    return [report(step, episode_return=value, episodes=episodes) for step, value, episodes in points]


def test_reached_is_the_first_report_with_a_full_window(tmp_path: Path) -> None:
    reports = climb((100, 9.0, 99), (200, 4.9, 100), (300, 5.0, 150), (400, 1.0, 200), (500, 8.0, 250))
    reports.insert(0, report(50, episodes=300))  # no return
    record = read(write_run(tmp_path / "a", reports))
    for goal, step in ((5.0, 300), (5.1, 500), (1.0, 200), (8.1, None)):
        index = reached(record, goal)
        assert (None if index is None else record.figures["environment_steps"][index]) == step


def test_the_return_to_reach(tmp_path: Path) -> None:
    low = read(write_run(tmp_path / "a", climb((100, 999.0, 99), (200, 200.0, 100)), stop_at_return=475.0))
    high = read(write_run(tmp_path / "b", climb((200, 400.0, 100), (300, 100.0, 200))))
    bad = read(write_run(tmp_path / "c", climb((200, -80.0, 100)), stop_at_return=18.0))
    none = read(write_run(tmp_path / "d", climb((200, 7.0, 99))))
    assert choose_goal([low, high], 3.0) == (3.0, "--return")
    assert choose_goal([low, high]) == (475.0, "run.stop_at_return")
    assert choose_goal([high]) == (360.0, "within 10% of the best, 400")
    assert choose_goal([low, high, bad]) == (360.0, "within 10% of the best, 400")  # they stop at different returns
    assert choose_goal([read(write_run(tmp_path / "e", climb((200, -80.0, 100))))])[0] == pytest.approx(-88.0)
    assert choose_goal([none])[0] == math.inf
    assert reached(none, math.inf) is None


def printed(width: int, *paths: Path, goal: float | None = None) -> list[str]:
    output = io.StringIO()
    compare(gather(paths), goal, Console(file=output, width=width))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def cells(lines: list[str], label: str) -> list[str]:
    """Those of the rows that begin with a label, two spaces or more between them."""
    rows = [line for line in lines if line.strip().startswith(label)]
    return [cell for row in rows for cell in row.strip().split("  ") if cell.strip()]


def test_runs_that_did_not_reach_it_count(tmp_path: Path) -> None:
    for seed, (step, value) in enumerate([(10_000, 5.0), (30_000, 6.0), (50_000, 5.5), (70_000, 4.0)]):
        write_run(tmp_path / f"a{seed}", climb((step, value, 100)), seed=seed, stop_at_return=5.0)
    a = printed(160, tmp_path)
    assert [cell.strip() for cell in cells(a, "ppo on")] == [
        "ppo on envpool:Pong-v5",
        "0-3",
        "3 of 4",
        "40k (10k to never)",
        "160k (40k to never)",
        "400 (100 to never)",
        "5.25 (4.00 to 6.00)",
        "100",
        "-",
        "-",
    ]
    assert "reached: a return of 5.00 (run.stop_at_return), the mean of 100 episodes" in a
    # Half of them do not make a median.
    assert "never (30k to never)" in "".join(printed(160, tmp_path, goal=5.4))
    none = printed(160, tmp_path, goal=99.0)
    assert [cell.strip() for cell in cells(none, "ppo on")][2:6] == ["0 of 4", "never", "never", "never"]
    assert "nan" not in "".join(none).lower()


def test_lag_and_drops_are_of_the_group(tmp_path: Path) -> None:
    for seed, (lags, received, dropped) in enumerate([((1.0, 2.0), 100, 10), ((3.0,), 300, 10)]):
        counts = {"trajectories_received": received, "trajectories_dropped": dropped}
        reports = [report(100 * (i + 1), policy_lag_mean=lag, **counts) for i, lag in enumerate(lags)]
        write_run(tmp_path / f"a{seed}", reports, seed=seed)
    lines = printed(160, tmp_path)
    assert [cell.strip() for cell in cells(lines, "ppo on")][-3:] == ["100", "2.0", "5.0%"]
    assert "reached: nothing, as no run has finished 100 episodes" in lines


def test_a_narrow_terminal_gets_two_tables_with_the_same_figures(tmp_path: Path) -> None:
    for agent in ("ppo", "impala"):
        for seed in range(3):
            reports = climb((1_234_567 * (seed + 1), 123.4 * (seed + 1), 1000))
            write_run(tmp_path / f"{agent}-{seed}", reports, seed=seed, agent={"name": agent})
    wide, narrow = printed(160, tmp_path, goal=100), printed(80, tmp_path, goal=100)
    assert len([line for line in wide if "───" in line]) == 1
    assert len([line for line in narrow if "───" in line]) == 2
    last = "247 (123 to 370)"
    steps, frames, seconds = "2.47M (1.23M to 3.7M)", "9.88M (4.94M to 14.8M)", "24,691 (12,346 to 37,037)"
    ppo = cells(wide, "agent.name=ppo")
    assert [cell.strip() for cell in ppo[1:7]] == ["0-2", "3 of 3", steps, frames, seconds, last]
    index = next(index for index, line in enumerate(narrow) if "agent.name=ppo" in line)
    rows = [narrow[index].split(), narrow[index + 1].split("  ")]
    assert rows[0] == ["agent.name=ppo", "3", "of", "3", "2.47M", "9.88M", "24,691"]
    ranges = [cell.strip() for cell in rows[1] if cell.strip()]
    assert ranges == ["1.23M to 3.7M", "4.94M to 14.8M", "12,346 to 37,037"]
    assert cells(narrow[index + 2 :], "agent.name=ppo")[-4].strip() == last


def test_long_labels_are_folded_and_figures_are_not(tmp_path: Path) -> None:
    agent = "a.module.with.a.very.long.name:AndAnAgentWithALongName"
    write_run(tmp_path / "a", climb((1_234_567, 1.0, 100)), agent={"name": agent})
    write_run(tmp_path / "b", climb((7_654_321, 2.0, 100)), stop_at_return=1.5)
    lines = printed(80, tmp_path)
    tables = "\n".join(lines).split("reached: ")[0]
    folded = [line.split("  ")[0].strip() for line in tables.splitlines()]
    assert "".join(folded).count(agent) == 2
    assert "1 of 1        7.65M   30.6M   76,543" in tables


def test_what_else_differs_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [report(1)])
    impala = write_run(tmp_path / "b", [report(1)], agent={"name": "impala", "learning_rate": 1e-3, "rho": 1.0})
    assert "these differ as well: agent.learning_rate" in printed(160, tmp_path)
    write_run(tmp_path / "c", [report(1)], environment={"name": "envpool:CartPole-v1", "options": {}})
    with held(impala):
        lines = printed(160, tmp_path)
    assert "the groups play different environments: their returns do not compare" in lines
    assert f"still training: {impala}" in "".join(lines)


def test_compare_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, reports = train(counting_config(tmp_path, {"run": {"environment_steps": 4000}}))
    assert main(["compare", str(result.path), "--return", "15", "--label", "counting"]) == 0
    first = next(r for r in reports if r["episodes"] >= 100 and r["episode_return"] >= 15)
    output = capsys.readouterr().out
    assert "1 of 1" in output
    assert compact(first["environment_steps"]) in output
    assert "counting" in output
    assert main(["compare", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"tianji: {tmp_path / 'nowhere'}: no such folder\n"
