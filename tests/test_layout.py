"""The shape of the code: imports run downwards only, files and functions stay short, what is public says what it is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS: tuple[tuple[str, ...], ...] = (
    # Know nobody of the package.
    (
        "types",
        "explain",
        "flops",
        "hlo",
        "interrupts",
        "startup",
        "losses",
        "groups_config",
        "outer",
        "replay_config",
        "returns",
        "staleness",
        "worker",
    ),
    (
        "chips",
        "config",
        "rate_limiter",
        "roll",
        "timeline",
        "usage",
        "world",
        "transport.peers",
        "transport.sockets",
        "environments.memory",
    ),
    # The nouns put to use.
    (
        "agent",
        "distributions",
        "normalisation",
        "environments.base",
        "estimate",
        "metrics",
        "parallel",
        "profile",
        "transport.codec",
    ),
    ("attendance", "checkpoint", "limits", "stopwatch", "run_folder", "testing", "transport.events", "transport.keys"),
    (
        "environments.envpool",
        "environments.gymnasium",
        "console",
        "records",
        "sinks",
        "transport.router",
        "transport.trajectory_client",
    ),
    (
        "environments",
        "comparison",
        "curves",
        "transport.groups",
        "transport.meeting",
        "transport.parameters",
        "transport.trajectories",
    ),
    ("transport",),
    ("balance", "device_queue", "replay_frames"),
    ("lock_step", "replay"),
    # Those who act and those who learn.
    ("actor", "receiver"),
    ("blueprint", "learner"),
    ("ballot", "group", "replay_learner"),
    # Whole runs.
    ("actor_process", "agreement", "keeper", "off_policy", "saved_policy"),
    ("learning",),
    ("compilation", "evaluation", "export", "remote_actor", "run", "watch"),
    ("compile_command", "launch", "root"),
    ("video",),
    ("commands",),
    ("__init__", "cli"),
    ("learner_process",),
)
"""Every module of tianji_jax, from the bottom up. A module imports from lower lines only, never from its own."""

FOR_AGENTS = {"types", "agent", "returns", "losses", "distributions", "normalisation"}
"""What agents/ may import of tianji_jax."""

OF_OTHERS = {"reset", "step"}
"""Methods that gymnasium documents."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}


def module_name(path: Path) -> str:
    """The name within its package: `transport.codec`; a package's own for its `__init__`."""
    name = ".".join(path.relative_to(ROOT / path.relative_to(ROOT).parts[0]).with_suffix("").parts)
    return name.removesuffix(".__init__")


SYSTEM = {module_name(path): path for path in sorted((ROOT / "tianji_jax").rglob("*.py"))}
AGENTS = {module_name(path): path for path in sorted((ROOT / "agents").rglob("*.py"))}
SOURCES = [*SYSTEM.values(), *AGENTS.values()]
EVERYTHING = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[str]:
    """What a file imports of tianji_jax, wherever in the file: `transport.codec`; `__init__` for the package itself.

    Relative imports are left out: only agents use them, among each other.
    """
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "agents" or rest.split(".")[0] == "agents":
                yield "agents"
            elif top == "tianji_jax":
                # Of `transport.codec.Codec` the module is `transport.codec`.
                while rest and rest not in SYSTEM:
                    rest = rest.rpartition(".")[0]
                yield rest or "__init__"


def test_every_module_has_its_layer() -> None:
    for module in SYSTEM.keys() - LEVEL.keys():
        levels = [LEVEL[name] for name in imports(SYSTEM[module]) if name in LEVEL]
        at = max(levels, default=-1) + 1
        where = f"the line with {LAYERS[at]} or a higher one" if at < len(LAYERS) else "a new line at the end"
        pytest.fail(
            f"tianji_jax/{module} is in no layer: put it into LAYERS in tests/test_layout.py, above all that it "
            f"imports and below all that import it, which is {where}"
        )
    assert not LEVEL.keys() - SYSTEM.keys(), "these modules are gone: take them out of LAYERS in tests/test_layout.py"


@pytest.mark.parametrize("module", sorted(SYSTEM.keys() & LEVEL.keys()))
def test_imports_run_downwards(module: str) -> None:
    for name in imports(SYSTEM[module]):
        assert name != "agents", f"tianji_jax/{module} imports agents; it may only name them in the configuration"
        assert LEVEL.get(name, -1) < LEVEL[module], (
            f"tianji_jax/{module} imports {name}, which is not below it in LAYERS of tests/test_layout.py"
        )


@pytest.mark.parametrize("module", sorted(SYSTEM))
def test_the_system_imports_by_full_names(module: str) -> None:
    for node in ast.walk(parse(SYSTEM[module])):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"tianji_jax/{module}, line {node.lineno}"


@pytest.mark.parametrize("module", sorted(SYSTEM))
def test_packages_are_entered_by_the_front_door(module: str) -> None:
    for name in imports(SYSTEM[module]):
        package, inside, _ = name.partition(".")
        assert not inside or module.split(".")[0] == package, f"tianji_jax/{module} imports {name}, not {package}"


@pytest.mark.parametrize("module", sorted(AGENTS))
def test_agents_know_little(module: str) -> None:
    beyond = set(imports(AGENTS[module])) - FOR_AGENTS
    assert not beyond, f"agents/{module} imports {beyond}; allowed are {FOR_AGENTS} and, by a dot, other agents"


@pytest.mark.parametrize("path", EVERYTHING, ids=shown)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{shown(path)} has {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=shown)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, Function):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{shown(path)}: {node.name} has {lines} lines"


def classes() -> dict[str, ast.ClassDef]:
    """All classes of the system and its agents by name."""
    nodes = (node for path in SOURCES for node in ast.walk(parse(path)))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


CLASSES = classes()


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


def documented(node: ast.ClassDef) -> set[str]:
    """Methods that say what they do, here or in a class that this one derives from."""
    own = {child.name for child in node.body if isinstance(child, Function) and ast.get_docstring(child)}
    return own.union(*(documented(CLASSES[base]) for base in bases(node) if base in CLASSES))


PROMISED = OF_OTHERS.union(*(documented(node) for node in CLASSES.values() if "Protocol" in bases(node)))
"""Methods of protocols, which say what any class's method of that name does."""


def undocumented(node: ast.Module | ast.ClassDef, inherited: set[str]) -> Iterator[str]:
    """Public functions and classes without a docstring; those of functions are private to them."""
    for child in node.body:
        if not isinstance(child, Function | ast.ClassDef) or child.name.startswith("_") or child.name in inherited:
            continue
        if not ast.get_docstring(child):
            yield f"{child.name} (line {child.lineno})"
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child, documented(child) | PROMISED)


@pytest.mark.parametrize("path", SOURCES, ids=shown)
def test_public_names_say_what_they_are(path: Path) -> None:
    tree = parse(path)
    assert ast.get_docstring(tree), f"{shown(path)} does not say what it is"
    assert not list(undocumented(tree, set())), f"{shown(path)}: without a docstring"
