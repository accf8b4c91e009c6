"""Test the exact new text of small trees. ``cases/rewrite.diff`` has one case for each rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from migrate_cases import VERSIONS, Case, migrated, parameters, sections
from trees import write

from megapg.migrate import engine
from megapg.migrate.config import Config
from megapg.migrate.engine import check, migrate
from megapg.migrate.reasons import REASONS
from megapg.migrate.rewrite import rewritten


@pytest.mark.parametrize("text", parameters("rewrite.diff"))
def test_a_case(text: str, tmp_path: Path) -> None:
    case = Case.read(text)
    write(tmp_path, case.before)
    migration = migrated(tmp_path, **case.settings)
    assert {name: (tmp_path / name).read_text() for name in case.after} == case.after
    assert [str(each.how) for each in migration.served] == case.hows
    assert [each.reason for each in migration.left] == case.reasons
    assert not migration.problems
    assert all(each.use.text and each.text for each in migration.served)


def test_every_reason_has_a_case() -> None:
    found = {reason for _, text in sections("rewrite.diff") for reason in Case.read(text).reasons}
    # The first is tested below, the second with the reports.
    assert {*REASONS} - found == {"unverified", "unwritten"}


def test_nothing_is_written_and_the_uses_add_up(tmp_path: Path) -> None:
    case = Case.read(dict(sections("rewrite.diff"))["every reason"])
    write(tmp_path, case.before)
    config = Config(tmp_path, versions=VERSIONS)
    steps: list[tuple[str, int, int]] = []
    migration = migrate([tmp_path], config, on_progress=lambda *step: steps.append(step))
    assert {name: (tmp_path / name).read_text() for name in case.before} == case.before
    uses = check([tmp_path], config).found.uses
    assert uses == migration.found.uses
    assert len(uses) == len(migration.served) + len(migration.left)
    assert [each.use for each in migration.left] == list(uses)
    assert steps
    assert all(0 <= done <= of for _, done, of in steps)


def test_unsafe_rewrites_what_may_be_none(tmp_path: Path) -> None:
    text = "from megatron.core import mpu\nX = mpu._EMBEDDING_GROUP\n"
    file = tmp_path / "a.py"
    file.write_text(text)
    config = Config(tmp_path, versions=VERSIONS)
    (left,) = migrate([tmp_path], config).left
    assert left.reason == "may-be-none"
    migration = migrate([tmp_path], config, unsafe=True)
    assert not migration.left
    assert migration.served[0].text == 'getattr(megapg.resolve(None), "embd", None)'


@pytest.mark.parametrize("damage", [lambda new: b"x = (", lambda new: 1 / 0])
def test_a_file_whose_new_text_is_wrong_stays(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other file is changed to use its new parameters."""
    write(
        tmp_path,
        {
            "low.py": "from megatron.core import mpu\n\n\n"
            "def f():\n    return mpu.get_tensor_model_parallel_rank()\n",
            "high.py": "from low import f\n\n\ndef g(model):\n    return f()\n",
        },
    )
    real = rewritten

    def wrong(data: bytes, *rest: object) -> bytes:
        try:
            return damage(real(data, *rest))  # type: ignore[arg-type]
        except ZeroDivisionError as error:
            raise ValueError("a bad node") from error

    monkeypatch.setattr(engine, "rewritten", wrong)
    migration = migrate([tmp_path], Config(tmp_path, versions=VERSIONS))
    assert not migration.files
    assert [each.reason for each in migration.left] == ["unverified"]
    assert "low.py" in [each.file for each in migration.problems]


def test_roots_are_the_functions_that_read_the_globals(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.py": "from megatron.core import mpu\n\n\n"
            "def low():\n    return mpu.get_data_parallel_rank()\n\n\n"
            "def high():\n    return low(), mpu.get_tensor_model_parallel_rank()\n\n\n"
            "def fed(pg_collection):\n    return low()\n\n\n"
            "def main():\n    return high()\n\n\n"
            "class A:\n    def __init__(self):\n        self.x = mpu.get_data_parallel_rank()\n\n\n"
            "X = mpu.get_data_parallel_rank()\n"
        },
    )
    roots = migrate([tmp_path], Config(tmp_path, versions=VERSIONS)).roots
    assert [(each.function, each.takes, each.uses) for each in roots] == [
        ("high", True, 2),
        ("", False, 1),
        ("A", True, 1),
    ]
    assert roots[0].calls == ("a.py:17",)
    assert [each.line for each in roots] == [8, 0, 21]
