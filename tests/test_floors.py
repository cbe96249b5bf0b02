"""The house rule: a file imports only from its own floor or below, and floors 1 to 3 know no transformers."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "kvkeep"

FLOORS = {
    1: ("budget", "lifetimes", "attention_mass", "slots", "sparse_attention", "kernels"),
    2: ("scorers",),
    3: ("policies",),
    4: ("runtime",),
    5: ("training", "evaluation", "inspection", "benchmark"),
    6: ("serving", "cli"),
}
ROOT_FLOOR = 4  # the package root hands on floors 1 to 4, so the floors above may go through it
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}


def room_of(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").parts[0]


def imported_modules(path: Path, root: Path):
    """Every dotted name that `path` imports, with its line; relative imports are resolved against the package."""
    package = ("kvkeep", *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            for alias in node.names:  # `from kvkeep import slots` imports the module kvkeep.slots
                yield f"{module}.{alias.name}", node.lineno


def violations(root: Path) -> list[str]:
    """One line per import that breaks the house rule in the package folder `root`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        room, where = room_of(path, root), path.relative_to(root)
        if where == Path("__init__.py"):
            continue
        if room not in FLOOR_OF:
            found.append(f"{where}: belongs to no floor")
            continue
        floor = FLOOR_OF[room]
        for name, line in imported_modules(path, root):
            parts = name.split(".")
            if parts[0] == "transformers" and floor <= 3:
                found.append(f"{where}:{line}: floor {floor} imports {name}")
            if parts[0] != "kvkeep":
                continue
            target = FLOOR_OF.get(parts[1]) if len(parts) > 1 else None
            if target is None and floor <= ROOT_FLOOR:
                found.append(f"{where}:{line}: floor {floor} imports {name} through the package root")
            elif target is not None and target > floor:
                found.append(f"{where}:{line}: floor {floor} imports {name} of floor {target}")
    return found


def test_every_import_goes_down_or_stays():
    assert violations(SOURCE) == []


def test_the_house_is_not_empty():
    rooms = {room_of(path, SOURCE) for path in SOURCE.rglob("*.py")}
    assert {"budget", "lifetimes", "attention_mass", "slots", "policies", "runtime", "evaluation", "cli"} <= rooms


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("slots.py", "from kvkeep.policies import registry", "floor 1 imports kvkeep.policies.registry of floor 3"),
        ("policies/a.py", "from ..runtime import cache", "floor 3 imports kvkeep.runtime.cache of floor 4"),
        ("policies/a.py", "from .. import runtime", "floor 3 imports kvkeep.runtime of floor 4"),
        ("policies/a.py", "def f():\n    import transformers.cache_utils", "floor 3 imports transformers.cache_utils"),
        ("runtime/a.py", "import kvkeep", "floor 4 imports kvkeep through the package root"),
        ("runtime/a.py", "from kvkeep import Budget", "floor 4 imports kvkeep.Budget through the package root"),
        ("evaluation/a.py", "from kvkeep.cli import common", "floor 5 imports kvkeep.cli.common of floor 6"),
        ("utils.py", "import os", "belongs to no floor"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, file, line, complaint):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    assert len(violations(tmp_path)) == 1
    assert complaint in violations(tmp_path)[0]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("policies/a.py", "from ..slots import Slots\nfrom . import base\nfrom kvkeep.budget import Budget"),
        ("runtime/a.py", "import transformers\nfrom kvkeep.policies import create"),
        ("benchmark/a.py", "import kvkeep\nfrom kvkeep.evaluation import documents"),
        ("cli/a.py", "import kvkeep\nfrom kvkeep import Budget"),
    ],
)
def test_a_kept_rule_is_not(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    assert violations(tmp_path) == []
