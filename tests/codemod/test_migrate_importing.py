"""Imports that are replayed from syntax trees end as those of Python do.

Each case is a project in real files, and what a program of it imports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trees import write

from megapg.migrate.python.importing import Reader, Replays
from megapg.migrate.python.source import Source, parse
from megapg.migrate.python.tree import File, Modules, find_files

# "a" begins, and b asks a for x while that is unfinished.
B = "from a import x\n"
CASES = {
    "bound before": {"a.py": "x = 1\nimport b\n", "b.py": B},
    "bound behind": {"a.py": "import b\nx = 1\n", "b.py": B},
    "by a function": {"a.py": "def x():\n    pass\nimport b\n", "b.py": B},
    "by a class": {"a.py": "class x:\n    pass\nimport b\n", "b.py": B},
    "by an import": {"a.py": "import sys as x\nimport b\n", "b.py": B},
    "by a loop": {"a.py": "for x in [1]:\n    pass\nimport b\n", "b.py": B},
    "by with": {"a.py": "with open(__file__) as (x):\n    import b\n", "b.py": B},
    "by match": {"a.py": "match 1:\n    case x:\n        import b\n", "b.py": B},
    "by several": {"a.py": "y = (x, *z) = [1, 2]\nimport b\n", "b.py": B},
    "annotated only": {"a.py": "x: int\nimport b\nx = 1\n", "b.py": B},
    "annotated": {"a.py": "x: int = 1\nimport b\n", "b.py": B},
    "in a class": {"a.py": "class C:\n    x = 1\n    import b\n", "b.py": B},
    "in a function": {"a.py": "def f():\n    import b\nx = 1\n", "b.py": B},
    "in a block": {"a.py": "if True:\n    import b\nx = 1\n", "b.py": B},
    "in else": {
        "a.py": "if not b:\n    pass\n".replace("b", "1") + "else:\n    import b\n",
        "b.py": B,
    },
    "for types": {"a.py": "TYPE_CHECKING = 0\nif TYPE_CHECKING:\n    import b\n", "b.py": B},
    "not for types": {
        "a.py": "import typing\nif not typing.TYPE_CHECKING:\n    import b\n",
        "b.py": B,
    },
    "for types or not": {
        "a.py": "TYPE_CHECKING = 0\nif TYPE_CHECKING:\n    x = 1\nelse:\n    import b\n",
        "b.py": B,
    },
    "in one of many branches": {
        "a.py": "if 0:\n    pass\n" + "elif 0:\n    pass\n" * 1500 + "else:\n    import b\n",
        "b.py": B,
    },
    "bound before its first package": {
        "a.py": "x = 1\nfrom p import y\n",
        "p/__init__.py": f"{B}y = 1\n",
    },
    "for types in another branch": {
        "a.py": "TYPE_CHECKING = 0\nif 0:\n    pass\nelif TYPE_CHECKING:\n    import b\n",
        "b.py": B,
    },
    "as a script": {"a.py": "if __name__ == '__main__':\n    import b\n", "b.py": B},
    "as none": {"a.py": "if __name__ == '__main__':\n    x = 1\nelse:\n    import b\n", "b.py": B},
    "everything": {"a.py": "from c import *\nimport b\n", "b.py": B, "c.py": "x = 1\n"},
    "everything but that": {"a.py": "from c import *\nimport b\nx = 1\n", "b.py": B, "c.py": ""},
    "everything of others": {"a.py": "from os import *\nimport b\n", "b.py": "from a import sep\n"},
    "everything, too late": {"a.py": "import b\nfrom c import *\n", "b.py": B, "c.py": "x = 1\n"},
    "whatever it is asked": {"a.py": "def __getattr__(name):\n    return 1\nimport b\n", "b.py": B},
    "tried": {"a.py": "try:\n    import b\nexcept ImportError:\n    pass\n", "b.py": B},
    "tried for another error": {
        "a.py": "try:\n    import b\nexcept KeyError:\n    pass\n",
        "b.py": B,
    },
    "tried, and another way": {
        "a.py": "try:\n    import c\nexcept ImportError:\n    import b\n",
        "b.py": B,
        "c.py": B,
    },
    "tried, and on": {
        "a.py": "try:\n    import sys\nexcept ImportError:\n    pass\nelse:\n    import b\n",
        "b.py": B,
    },
    "tried, and finally": {
        "a.py": "try:\n    pass\nexcept ImportError:\n    pass\nfinally:\n    import b\n",
        "b.py": B,
    },
    "tried once more": {
        "a.py": "try:\n    import b\nexcept ImportError:\n    pass\nx = 1\nimport b\nimport c\n",
        "b.py": B + "y = 1\n",
        "c.py": "from b import y\n",
    },
    "a module": {"a/__init__.py": "import b\n", "a/x.py": "", "b.py": B},
    "a module that has begun": {"a/__init__.py": "import a.x\n", "a/x.py": "import b\n", "b.py": B},
    "a module that is done": {
        "a/__init__.py": "from a import x\nimport b\n",
        "a/x.py": "",
        "b.py": "from a import x as y\nfrom b import y\n",
    },
    "relative": {"a/__init__.py": "from . import b\nx = 1\n", "a/b.py": "from . import x\n"},
    "relative, bound": {"a/__init__.py": "x = 1\nfrom . import b\n", "a/b.py": "from . import x\n"},
    "two up": {
        "a/__init__.py": "from .c import d\nx = 1\n",
        "a/c/__init__.py": "",
        "a/c/d.py": "from .. import x\n",
    },
    "packages run first": {
        "a.py": "import c.d\n",
        "c/__init__.py": "import b\n",
        "c/d.py": "",
        "b.py": B,
    },
    "a folder without a package": {"a.py": "from c import b\nx = 1\n", "c/b.py": B},
    "the name of a module that a package takes for another thing": {
        "a.py": "from c import d\nx = 1\n",
        "c/__init__.py": "d = 1\n",
        "c/d.py": "from a import x\n",
    },
    "a submodule that something loaded": {
        "a.py": "import c.d\nfrom e import *\n",
        "c/__init__.py": "",
        "c/d.py": "import e\n",
        "e.py": "from c import d\n",
    },
    "the parent has what is done": {
        "a/__init__.py": "import a.x\nfrom c import *\n",
        "a/x.py": "",
        "c.py": "from a import *\nfrom a import x\n",
    },
    "begun by a package": {
        "a.py": "import c\nfrom c.b import y\nx = 1\n",
        "c/__init__.py": "from a import x\n",
        "c/b.py": "y = 1\n",
    },
    "tried before a package": {
        "a.py": "try:\n    import b\nexcept ImportError:\n    pass\nimport c\n",
        "b.py": "from c import y\n",
        "c/__init__.py": "import b\ny = 1\n",
    },
    "a package first": {
        "a.py": "import c\nimport b\nx = 1\n",
        "b.py": "import c\n",
        "c/__init__.py": "import a\n",
    },
}


def replays(root: Path, *missing: str) -> Replays:
    found = [each for each in find_files([root], root) if isinstance(each, File)]
    reader = Reader(Modules(found))

    def steps(path: Path):  # type: ignore[no-untyped-def]
        source = parse(path, path.name, path.read_bytes())
        assert isinstance(source, Source)
        return reader.steps(source.tree, path)

    return Replays(reader, steps, frozenset(missing))


@pytest.mark.parametrize("name", CASES)
def test_as_python_does(tmp_path: Path, name: str) -> None:
    files = CASES[name]
    write(tmp_path, files)
    first = tmp_path / ("a.py" if "a.py" in files else "a/__init__.py")
    ran = subprocess.run(
        [sys.executable, "-B", "-S", "-c", "import a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr == "" or "partially initialized" in ran.stderr, ran.stderr
    assert (replays(tmp_path).failed(first) is None) == bool(ran.returncode), ran.stderr


def test_what_is_only_tried_is_told(tmp_path: Path) -> None:
    write(tmp_path, CASES["tried"])
    failed = replays(tmp_path).failed(tmp_path / "a.py")
    assert failed == {(tmp_path / "b.py", tmp_path / "a.py", "x")}


def test_one_replay_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """Of modules of one package, each is imported by a program of its own."""
    tries = "try:\n    import p.a\nexcept ImportError:\n    pass\n"
    files = {"p/__init__.py": "", "p/b.py": "from p.a import x\n", "p/c.py": tries, "p/d.py": ""}
    write(tmp_path, {**files, "p/a.py": "import p.b\nx = 1\n"})
    found = replays(tmp_path)
    assert found.failed(tmp_path / "p/a.py") is None
    assert len(found.failed(tmp_path / "p/c.py") or ()) == 1
    assert found.failed(tmp_path / "p/b.py") == frozenset()  # the other one runs inside it
    assert found.failed(tmp_path / "p/d.py") == frozenset()


def test_a_module_comes_with_what_failed_in_its_package(tmp_path: Path) -> None:
    tries = "try:\n    import p.b\nexcept ImportError:\n    pass\n"
    write(tmp_path, {"p/__init__.py": tries, "p/b.py": "from p import x\n", "p/c.py": ""})
    found = replays(tmp_path)
    assert found.failed(tmp_path / "p/c.py") == found.failed(tmp_path / "p/__init__.py")
    assert len(found.failed(tmp_path / "p/c.py") or ()) == 1


def test_without_what_is_missing(tmp_path: Path) -> None:
    text = "try:\n    import missing\n    x = 1\nexcept ImportError:\n    pass\nimport b\n"
    write(tmp_path, {"a.py": text, "b.py": B})
    assert replays(tmp_path).failed(tmp_path / "a.py") == frozenset()
    assert replays(tmp_path, "missing").failed(tmp_path / "a.py") is None


def test_what_may_be_missing(tmp_path: Path) -> None:
    tried = "try:\n    import apex, torch, json\nexcept ImportError:\n    apex = None\n"
    write(tmp_path, {"a.py": tried, "b.py": tried + "import torch\nimport torch.nn\n"})
    reader = Reader(Modules(e for e in find_files([tmp_path], tmp_path) if isinstance(e, File)))
    for name in ("a.py", "b.py"):
        source = parse(tmp_path / name, name, (tmp_path / name).read_bytes())
        assert isinstance(source, Source)
        reader.steps(source.tree, tmp_path / name)
    assert reader.optional == {"apex"}
