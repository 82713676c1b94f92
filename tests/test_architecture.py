"""House rules as facts: which stage may import which, what planning needs, how long code gets."""

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import harts

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "harts"

# The names `import harts` promises. A change here is a change of the public interface: say so in
# CHANGELOG.md.
PUBLIC_NAMES = (
    "CallPlan",
    "CompactLayout",
    "HartsError",
    "InputError",
    "Microbatch",
    "PlanError",
    "PrefixForest",
    "StepPlan",
    "TrajectoryBatch",
    "UnsupportedError",
    "build_layout",
    "plan_calls",
    "plan_step",
    "read_trajectories",
    "write_trajectories",
)

# Stages in the order data flows through them; a module imports only from its own stage and earlier
# ones. A module's stage is the first part of its name below `harts`.
STAGES = [
    {"errors", "files"},
    {"trajectories", "synth"},
    {"forest", "excerpts"},
    {"planning"},
    {"layout"},
    {"ops"},
    {"models"},
    {"objectives"},
    {"training", "fidelity", "checking"},
    {"megatron"},
    {"bench", "inspection", "integrations"},
    {"cli"},
]
LEVELS = {name: level for level, names in enumerate(STAGES) for name in names}

# These run beside a rollout server: the standard library, NumPy, and Arrow for files.
LIGHT_STAGES = set().union(*STAGES[: LEVELS["layout"] + 1])
LIGHT_PACKAGES = {"harts", "numpy", "pyarrow"}

MODULE_LINES = 400
MODULE_LINES_HARD = 450
FUNCTION_LINES = 60


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def stage(module: str) -> str:
    """The stage of `harts.<stage>...`; "" for the package root itself."""
    return [*module.split("."), ""][1]


LIGHT_MODULES = [m for m in MODULES if stage(m) in LIGHT_STAGES | {""}]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported anywhere in a module, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = len(parents) - node.level + is_package
                base = ".".join([*parents[:kept], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def internal(name: str) -> str | None:
    """The module of this package that an imported name lies in."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (candidate := ".".join(parts[:length])) in MODULES:
            return candidate
    return None


def misplaced_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that go against the flow of stages."""
    own = LEVELS.get(stage(module), len(STAGES))
    found = []
    for line, name in imports(ast.parse(source), module, is_package):
        target = internal(name)
        if target is None or name == "harts.__version__":
            continue
        if target == "harts" or LEVELS.get(stage(target), -1) > own:
            found.append(f"{module}:{line} imports {name}")
    return found


def foreign_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of packages that planning must do without."""
    allowed = LIGHT_PACKAGES | sys.stdlib_module_names
    names = imports(ast.parse(source), module, is_package)
    return [f"{module}:{line} imports {n}" for line, n in names if n.split(".")[0] not in allowed]


def import_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: everything but bodies of functions."""
    yield node
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from import_time_nodes(child)


def environment_reads(source: str) -> list[int]:
    """Lines that read the environment while the module is being imported."""
    names = {"environ", "environb", "getenv"}
    return [
        node.lineno
        for node in import_time_nodes(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.Name) and node.id in names)
    ]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel: it is one launch, and cannot be cut into functions at will."""
    return any("triton.jit" in ast.unparse(d) for d in function.decorator_list)


def long_functions(source: str, limit: int) -> list[str]:
    return [
        f"{node.name} ({length} lines)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not is_kernel(node)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > limit
    ]


def silent_handlers(source: str) -> list[int]:
    """Lines of handlers that catch every exception and do nothing about it."""

    def catches_all(handler: ast.ExceptHandler) -> bool:
        return handler.type is None or any(
            isinstance(n, ast.Name) and n.id in {"Exception", "BaseException"}
            for n in ast.walk(handler.type)
        )

    def does_nothing(body: list[ast.stmt]) -> bool:
        return all(
            isinstance(s, ast.Pass | ast.Continue)
            or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            for s in body
        )

    handlers = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ExceptHandler)]
    return [h.lineno for h in handlers if catches_all(h) and does_nothing(h.body)]


# Spelled in halves, so that this file does not hold what it forbids.
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}>])/(?:tmp|work|home|root|Users|mnt|scratch)/[\w.]")


def text_files() -> list[Path]:
    folders = ("harts", "tests", "benchmarks", "docs", "examples")
    suffixes = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ""}
    files = [p for f in folders for p in (ROOT / f).rglob("*")]
    files += [*ROOT.iterdir(), ROOT / ".ci" / "run"]
    skipped = {"CHANGELOG.md", ".git"}  # .git is a file in a worktree
    return [p for p in files if p.is_file() and p.suffix in suffixes and p.name not in skipped]


def python_files() -> list[Path]:
    return [p for f in ("harts", "tests", "benchmarks") for p in sorted((ROOT / f).rglob("*.py"))]


def test_every_module_belongs_to_a_stage():
    homeless = [m for m in MODULES if stage(m) and stage(m) not in LEVELS]
    assert not homeless, f"place {homeless} in STAGES, where the flow of data has them"


def test_a_stage_imports_only_from_stages_before_it():
    found = [
        line
        for module, path in MODULES.items()
        if stage(module)
        for line in misplaced_imports(path.read_text(), module, path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_the_package_root_imports_only_light_stages():
    targets = imports(ast.parse((PACKAGE / "__init__.py").read_text()), "harts", True)
    found = [n for _, n in targets if (m := internal(n)) and stage(m) not in LIGHT_STAGES]
    assert not found, f"harts/__init__.py imports {found}; `import harts` must stay light"


def test_modules_do_not_import_each_other_in_circles():
    edges = {
        module: {
            target
            for _, name in imports(ast.parse(path.read_text()), module, path.name == "__init__.py")
            if (target := internal(name)) and target != module
        }
        for module, path in MODULES.items()
    }
    # Packages re-export their modules and modules import their siblings: only cycles between
    # modules count, so an edge to or from a package's __init__ is left to Python's own check.
    plain = {m for m, path in MODULES.items() if path.name != "__init__.py"}
    left = {m: edges[m] & plain for m in plain}
    while free := {m for m, targets in left.items() if not targets & left.keys()}:
        left = {m: targets for m, targets in left.items() if m not in free}
    assert not left, f"import cycle among {sorted(left)}"


def test_planning_code_names_only_numpy_and_arrow():
    found = [
        line
        for module in LIGHT_MODULES
        for line in foreign_imports(
            MODULES[module].read_text(), module, MODULES[module].name == "__init__.py"
        )
    ]
    assert not found, "\n".join(found)


def test_importing_the_package_and_planning_loads_no_torch():
    program = (
        "import importlib, sys\n"
        f"for name in {LIGHT_MODULES!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'omegaconf', 'tensorboard', 'typer'}\n"
        "sys.exit(', '.join(sorted(heavy & sys.modules.keys())) or 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"imported: {run.stderr}"


def test_public_names_are_sorted_exist_and_are_these():
    names = tuple(getattr(harts, "__all__", ()))
    assert names == PUBLIC_NAMES
    assert list(names) == sorted(names)
    assert [name for name in names if not hasattr(harts, name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_environment_is_read_at_import(module):
    lines = environment_reads(MODULES[module].read_text())
    assert not lines, f"{module} reads the environment at import, line {lines}"


def test_modules_stay_readable_in_one_sitting():
    lengths = {m: len(path.read_text().splitlines()) for m, path in MODULES.items()}
    assert {m: n for m, n in lengths.items() if n > MODULE_LINES_HARD} == {}
    if long := {m: n for m, n in lengths.items() if n > MODULE_LINES}:
        warnings.warn(f"modules over {MODULE_LINES} lines: {long}", stacklevel=1)


@pytest.mark.parametrize("module", MODULES)
def test_functions_stay_short(module):
    found = long_functions(MODULES[module].read_text(), FUNCTION_LINES)
    assert not found, f"{module}: {found} over {FUNCTION_LINES} lines"


def test_no_exception_is_swallowed_silently():
    found = {
        str(path.relative_to(ROOT)): lines
        for path in python_files()
        if (lines := silent_handlers(path.read_text()))
    }
    assert not found


def test_no_leftovers_and_no_paths_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if LEFTOVER.search(line) or MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


# The rules themselves can fail


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from harts.layout import CompactLayout", "harts.forest"),
        ("def f():\n    import harts.layout", "harts.forest"),
        ("from ..layout import CompactLayout", "harts.planning.calls"),
        ("from harts import layout", "harts.forest"),
        ("from harts import __all__", "harts.forest"),
    ],
)
def test_an_import_against_the_flow_is_found(source, module):
    assert misplaced_imports(source, module)


def test_an_import_along_the_flow_is_allowed():
    assert not misplaced_imports("from harts.errors import PlanError\nimport numpy", "harts.forest")
    assert not misplaced_imports("from .intervals import x", "harts.planning.calls")


@pytest.mark.parametrize("source", ["import torch", "def f():\n    from torch import nn"])
def test_torch_in_planning_is_found(source):
    assert foreign_imports(source, "harts.planning.calls")


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nX = os.environ.get('X')", [2]),
        ("from os import getenv\nclass A:\n    x = getenv('X')", [3]),
        ("import os\ndef f(x=os.getenv('X')):\n    pass", [2]),
        ("import os\ndef f():\n    return os.environ['X']", []),
        ("import os\nf = lambda: os.environ['X']", []),
    ],
)
def test_environment_reads_are_found_at_import_only(source, lines):
    assert environment_reads(source) == lines


def test_a_long_function_is_found():
    assert long_functions("def f():\n" + "    x = 1\n" * 60, 60) == ["f (61 lines)"]
    assert not long_functions("def f():\n" + "    x = 1\n" * 59, 60)


@pytest.mark.parametrize(
    ("handler", "lines"),
    [
        ("except Exception:\n    pass", [3]),
        ("except:\n    ...", [3]),
        ("except (ValueError, BaseException):\n    pass", [3]),
        ("except ValueError:\n    pass", []),
        ("except Exception as error:\n    print(error)", []),
    ],
)
def test_a_silent_handler_is_found(handler, lines):
    assert silent_handlers(f"try:\n    f()\n{handler}") == lines


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('open("/' + 'home/someone/data")', True),
        ('Path("/' + 'tmp/x")', True),
        ("../shared/data", False),
        ("tests/" + "tmp/x", False),
    ],
)
def test_a_machine_path_is_found(line, found):
    assert bool(MACHINE_PATH.search(line)) == found
