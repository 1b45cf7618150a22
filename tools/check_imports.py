"""Checks that import-linter does not have: no import circle, no imports of the vocabulary, torch's private names in one
file.

A circle is a strongly connected set of modules. Imports inside functions and imports for type checkers count too.
A private torch name is any dotted name under `torch` with a component that starts with an underscore.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("autopar", "cost_model", "search", "runtime")
PRIVATE_FILES = ("autopar/_torch/private.py", "autopar/_torch/exports.py")
ALLOWED = {"torch.distributed._functional_collectives": "runtime/"}  # name -> where it may be used
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+")


def main() -> None:
    sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed
    graph = grimp.build_graph("autopar", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    problems = [*circles(imports), *vocabulary_imports(imports), *private_uses()]
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(f"imports: {len(problems)} problem(s)")
    print("imports: no circle; ir on its own; torch's private names only where they belong")


def circles(imports: Mapping[str, set[str]]) -> list[str]:
    """One circle, if there is any: breaking it shows the next."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return ["import circle: " + " <- ".join(error.args[1])]
    return []


def vocabulary_imports(imports: Mapping[str, set[str]]) -> list[str]:
    """`autopar.ir` imports nothing of ours but itself, `autopar.files`, `autopar.words` and `autopar.errors`."""
    edges = ((importer, used) for importer in sorted(imports) for used in sorted(imports[importer]))
    return [
        f"{importer} imports {used}; the vocabulary may import autopar.files, autopar.words and autopar.errors only"
        for importer, used in edges
        if f"{importer}.".startswith("autopar.ir.")
        and not f"{used}.".startswith(("autopar.ir.", "autopar.files.", "autopar.words.", "autopar.errors."))
    ]


def private_uses() -> list[str]:
    problems = []
    for path in python_files():
        name = path.relative_to(ROOT).as_posix()
        if name in PRIVATE_FILES:
            continue
        for line, used in torch_names(ast.parse(path.read_text(), filename=name)):
            if is_private(used) and not is_allowed(used, name):
                problems.append(f"{name}:{line}: {used} is private to torch; go through {PRIVATE_FILES[0]}")
    return problems


def python_files() -> list[Path]:
    """Every product file once: a link to a folder is not followed."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


def is_private(name: str) -> bool:
    return PRIVATE.match(name) is not None and not name.startswith("torch.ops.")  # operators are called by their names


def is_allowed(name: str, path: str) -> bool:
    return any((name + ".").startswith(prefix + ".") and path.startswith(where) for prefix, where in ALLOWED.items())


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports from torch, or reads as an attribute of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            yield from ((node.lineno, str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain on a name, else the readable part of it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    main()
