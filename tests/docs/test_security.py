"""docs/security.md lists every use of what may run foreign code, open a socket or leave a name on the disk."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("autopar", "cost_model", "search", "runtime")
PAGE = ROOT / "docs" / "security.md"
_TEXT = """
    pickle cPickle _pickle dill cloudpickle joblib marshal shelve Pickler Unpickler allow_pickle loads
    runpy run_path run_module import_module spec_from_file_location exec_module ctypes cffi FunctionType
    trust_remote_code subprocess Popen fork popen spawn system multiprocessing forkserver Listener Client
    socket socketserver http xmlrpc asyncio create_server listen HTTPServer urlopen requests
    TCPStore FileStore HashStore PrefixStore init_process_group rendezvous rpc
    broadcast_object_list all_gather_object gather_object scatter_object_list send_object_list recv_object_list
    tempfile mkdtemp mkstemp mktemp TemporaryDirectory NamedTemporaryFile gettempdir
"""
WATCHED = frozenset(_TEXT.split())
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}  # as bare names: `module.eval()` is a mode
CALLS = {"torch.load", "torch.save", "np.load", "numpy.load"}
COMPILERS = {"GraphModule", "recompile"}  # of torch.fx, which writes Python code and executes it; called, not named
NAMES = re.compile(r"\.partial$|^/tmp|^/dev/shm|^/var/tmp")


def uses(tree: ast.AST) -> Iterator[str]:
    """The watched words of a file, each where it is imported, read or called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from (part for part in alias.name.split(".") if part in WATCHED)
        elif isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if part in WATCHED)
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in COMPILERS:
            yield name
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            yield from (word for word in (node.attr,) if word in WATCHED and whole != "json.loads")
            yield from (word for word in (whole,) if word in CALLS)
        elif isinstance(node, ast.Name) and node.id in (WATCHED - {"loads"}) | BUILTINS:
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg in WATCHED:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if found := NAMES.search(node.value):
                yield found[0]
            if node.value in WATCHED:  # such as getattr(module, "loads")
                yield node.value


def found() -> set[tuple[str, str]]:
    files = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    return {
        (path.relative_to(ROOT).as_posix(), word)
        for path in files
        if not any(parent.is_symlink() for parent in path.parents)  # a link to a folder that is listed itself
        for word in uses(ast.parse(path.read_text(encoding="utf-8")))
    }


def listed() -> dict[tuple[str, str], str]:
    """The rows of the page: (file, word) and the reason."""
    rows: dict[tuple[str, str], str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if row := re.fullmatch(r"\| `([\w/]+\.py)` \| (.+?) \| (.+) \|", line):
            for word in re.findall(r"`([^`]+)`", row[2]):
                assert (row[1], word) not in rows, f"{row[1]} {word} is listed twice"
                rows[row[1], word] = row[3]
    return rows


def test_every_use_is_listed_with_a_reason() -> None:
    rows, seen = listed(), found()
    assert sorted(seen - set(rows)) == [], "these uses have no row in docs/security.md"
    assert sorted(set(rows) - seen) == [], "docs/security.md lists uses that are gone"
    assert all(len(reason.split()) >= 4 for reason in rows.values())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("import pickle as p\np.loads(b'')", "pickle"),
        ("from pickle import loads as read", "loads"),
        ("value = eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("from torch import distributed as d\nd.TCPStore('0.0.0.0', 1)", "TCPStore"),
        ("from torch.distributed import TCPStore as Place", "TCPStore"),
        ("server.listen()", "listen"),
        ("import http.server", "http"),
        ("dist.all_gather_object(every, own, group=group)", "all_gather_object"),
        ("path = f'/tmp/autopar-{name}'", "/tmp"),
        ("partial = path.with_name(f'.{path.name}.partial')", ".partial"),
        ("module = fx.GraphModule(root, graph)", "GraphModule"),
        ("import tempfile", "tempfile"),
        ("getattr(module, 'loads')(data)", "loads"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle"),
    ],
)
def test_a_planted_use_is_found(text: str, word: str) -> None:
    assert word in set(uses(ast.parse(text)))


def test_a_mode_or_a_method_is_no_use() -> None:
    assert not set(uses(ast.parse("model.eval()\nparallel.compile()\nre.compile('x')\njson.dumps({})")))
