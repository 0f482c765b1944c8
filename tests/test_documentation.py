"""Documents agree with the code: settings that exist, links that lead somewhere."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tianji_jax.config import AGENTS, Config, agent_class, load

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "document_configuration", ROOT / "scripts" / "document_configuration.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # NamedTuple looks for its module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_configuration_is_up_to_date(script: ModuleType) -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == script.document(), "run python scripts/document_configuration.py"


def test_configuration_has_every_setting() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.M)
    for section, field in Config.model_fields.items():
        if section != "agent":
            assert set(field.annotation.model_fields) <= set(rows), section  # type: ignore[union-attr]
    for name in AGENTS:
        config = load(ROOT / "configs" / "cartpole_ppo.yaml", [f"agent={{name: {name}}}"])
        for key in agent_class(config).Config.model_fields:
            assert any(row == key or row.startswith(f"{key}.") for row in rows), f"{name}: {key}"


def local_links(text: str) -> Iterator[str]:
    """Targets of Markdown's links and images that are not on the web, code left out."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(path: Path) -> set[str]:
    """Headings of a document as links name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_local_links_lead_somewhere(path: Path) -> None:
    for target in local_links(path.read_text()):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{shown(path)}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{shown(path)}: {target}"


def test_links_of_every_form_are_found() -> None:
    text = "[a](b.md) ![c](d.svg) [e](https://f.g) [h](#i) `[j](k.md)`\n```\n[l](m.md)\n```\n[n](o.md#p)"
    assert list(local_links(text)) == ["b.md", "d.svg", "#i", "o.md#p"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_named_files_exist(path: Path) -> None:
    for name in re.findall(r"\b(?:configs|scripts|tests|agents|docs)/[\w/]+\.\w+", path.read_text()):
        assert (ROOT / name).exists() or (path.parent / name).exists(), f"{shown(path)}: {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_named_settings_exist(path: Path, script: ModuleType) -> None:
    known = {"agent.name"}
    for section, field in Config.model_fields.items():
        if section != "agent":
            known |= {f"{section}.{row.key}" for row in script.settings(field.annotation)}
    for target in AGENTS.values():
        known |= {f"agent.{row.key}" for row in script.settings(script.agent_config(target))}
    sections = "|".join(Config.model_fields)
    # In code only, and as a setting: alone, or with a value.
    for setting in re.findall(rf"(?<=[`\s])((?:{sections})\.[a-z_.]+[a-z_])(?=[=`])", path.read_text()):
        if not setting.endswith((".jsonl", ".yaml", ".md")):
            assert setting in known, f"{shown(path)}: {setting}"


def module_map() -> list[list[str]]:
    """The modules that docs/how_it_works.md names, line by line."""
    _, _, table = (ROOT / "docs" / "how_it_works.md").read_text().partition("## Modules")
    return [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.*?) \|", table, re.M)]


def test_module_map_is_whole() -> None:
    package = ROOT / "tianji_jax"
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    named = sorted(name for row in module_map() for name in row)
    assert named == sorted(modules - {"__init__"}), "the module map in docs/how_it_works.md names others"


def test_module_map_runs_upwards() -> None:
    above: set[str] = set()
    for row in module_map():
        above |= set(row)
        for name in row:
            package = ROOT / "tianji_jax" / name
            for path in package.rglob("*.py") if package.is_dir() else [package.with_suffix(".py")]:
                imported = set(re.findall(r"^(?:from|import) tianji_jax\.(\w+)", path.read_text(), re.M))
                assert imported <= above, f"the module map in docs/how_it_works.md has {name} before what it imports"
