"""What a codemod on LibCST pays before it changes anything; run as a script, with a directory.

Each Python file is parsed, and the qualified name of every call and attribute is asked for, as a
codemod must that goes by what names stand for. The copy of the tree that LibCST's own codemods
make first is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import libcst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider


class _Names(libcst.CSTVisitor):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def _look(self, node: libcst.CSTNode) -> None:
        names = self.get_metadata(QualifiedNameProvider, node, ())
        self.found += any("parallel_state" in name.name for name in names)

    def visit_Call(self, node: libcst.Call) -> None:
        self._look(node)

    def visit_Attribute(self, node: libcst.Attribute) -> None:
        self._look(node)


def main() -> None:
    looked_at = found = 0
    for path in sorted(Path(sys.argv[1]).rglob("*.py")):
        try:
            module = libcst.parse_module(path.read_bytes())
        except libcst.ParserSyntaxError:
            continue
        names = _Names()
        MetadataWrapper(module, unsafe_skip_copy=True).visit(names)
        looked_at += 1
        found += names.found
    print(looked_at, found)


if __name__ == "__main__":
    main()
