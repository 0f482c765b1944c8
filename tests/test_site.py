"""The documentation: its site builds without a warning, and what it says of the program is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from short_runs import cartpole_config, counting_config, train
from test_your_own_agent import files_of
from tianji_jax.config import validate
from tianji_jax.limits import advice

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = [page for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] for page in entry.values()]
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))
    for page in pages:
        folder = tmp_path / "site" / ("" if page == "index.md" else page.removesuffix(".md"))
        html = (folder / "index.html").read_text()
        # Nothing is fetched from elsewhere.
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://(?!.*rel="canonical")', html), page


@pytest.mark.parametrize("agent", ["ppo", "impala"])
def test_every_figure_of_a_report_is_explained(tmp_path: Path, agent: str) -> None:
    text = (DOCS / "metrics.md").read_text()
    known = set(re.findall(r"`([\w/]+)`", text))
    settings = {"name": agent, "network": {"hidden_sizes": [16]}}
    config = counting_config(tmp_path, {"environment": {"name": "envpool:CartPole-v1", "options": {}}})
    config = validate({**config.model_dump(mode="json"), "agent": settings})
    for report in train(config)[1]:
        for key in report:
            worker, _, stage = key.partition("_time/")
            if stage:
                row = re.search(rf"^\| `{worker}_time/...` \| (.*) \|$", text, re.M)
                assert row is not None, key
                assert f"`{stage}`" in row[1], key
            else:
                assert key in known, key


def test_every_limiting_stage_is_explained_and_has_advice(tmp_path: Path) -> None:
    table = (DOCS / "metrics.md").read_text().partition("| `limited_by` |")[2].partition("\n\n")[0]
    stages = [stage for row in table.splitlines()[2:] for stage in re.findall(r"`(\w+)`", row.split("|")[1])]
    source = (ROOT / "tianji_jax" / "limits.py").read_text()
    listed = re.findall(r"`(\w+)`", source.partition("One of ")[2].partition('"""')[0])
    assert sorted(stages) == sorted(listed)
    config = cartpole_config(tmp_path)
    for stage in stages:
        sentence = advice({"limited_by": stage}, config)
        assert sentence is not None
        assert sentence.startswith(f"{stage}: ")


def test_messages_are_quoted_as_the_program_writes_them() -> None:
    paths = [*(ROOT / "tianji_jax").rglob("*.py"), *(ROOT / "agents").rglob("*.py")]
    # Messages run over several lines of source, and have placeholders.
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in paths))
    quoted = re.findall(r'"`([^`]+)`"', (DOCS / "troubleshooting.md").read_text())
    assert len(quoted) > 15
    for message in quoted:
        for part in filter(None, (part.strip(" .") for part in message.split("..."))):
            assert part in source, message


def test_the_environment_of_the_document_is_learned(tmp_path: Path) -> None:
    files = files_of(DOCS / "your_own_environment.md")
    assert list(files) == ["sticks.py", "sticks.yaml"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "tianji_jax.cli", "train", "sticks.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "solved: return 0.9" in done.stdout
