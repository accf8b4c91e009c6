"""Patched getters become collections of fake groups where that is the same, and stay otherwise."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core import parallel_state

import megapg
from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.migrate.index import Index
from megapg.migrate.migration import applied
from megapg.migrate.patches import PatchPlan, plan_patches
from megapg.migrate.played import Answer, played
from megapg.migrate.sites import Kind
from megapg.testing import fake_collection

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.contract

HEAD = """\
from unittest import mock
from unittest.mock import MagicMock, Mock, patch

import pytest
from megatron.core import parallel_state

import pkg.mod
"""
PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/mod.py": """\
from megatron.core import parallel_state
from megatron.core.parallel_state import get_context_parallel_rank


def share(numbers):
    size = parallel_state.get_tensor_model_parallel_world_size()
    return numbers[parallel_state.get_tensor_model_parallel_rank() :: size]


def stages():
    ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return parallel_state.get_pipeline_model_parallel_world_size(), *ends


def chunk():
    return get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()


def experts(total):
    if not parallel_state.model_parallel_is_initialized():
        return total
    return total // parallel_state.get_expert_model_parallel_world_size()


def data():
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return rank, parallel_state.get_data_parallel_world_size()


def chunks():
    return parallel_state.get_virtual_pipeline_model_parallel_world_size()
""",
}


def plan(root: Path, text: str, **files: str) -> PatchPlan:
    """The plan for ``test_it.py``, beside the package and other files."""
    everything = {**PACKAGE, "test_it.py": HEAD + text, **{f"{n}.py": t for n, t in files.items()}}
    for name, content in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode())
    index = Index([root], Config(root, versions=(16,)))
    index.run(lambda done, total: None)
    sites = {
        path: [each.site for each in index.located if each.path == path]
        for path in (root / "test_it.py", root / "conftest.py")
    }
    source, analysis = index.look(root / "test_it.py") or pytest.fail("no Python")
    conftest = index.look(root / "conftest.py") if "conftest" in files else None
    conftests = [(conftest[0], sites[root / "conftest.py"])] if conftest else []
    found = plan_patches(source, analysis, sites[root / "test_it.py"], conftests)
    patches = {
        each for each in sites[root / "test_it.py"] if each.kind in (Kind.PATCHED, Kind.STRING)
    }
    assert {*found.served, *found.stands, *found.left} == patches
    assert len(found.served) + len(found.stands) + len(found.left) == len(patches)
    return found


def rewritten(root: Path, text: str, **files: str) -> str:
    """The new text, of which every patch is served."""
    found = plan(root, text, **files)
    assert not found.left
    return applied(HEAD + text, found.edits).removeprefix(HEAD)


def reasons(root: Path, text: str, **files: str) -> set[str]:
    """Why all of it is left."""
    found = plan(root, text, **files)
    assert not found.served
    assert not found.edits
    return {suggestion.partition(". Write `with ")[0] for suggestion in found.left.values()}


# --- which rank of which layout -------------------------------------------------------------------

GETTERS = (
    *(
        f"get_{axis}_{asked}"
        for axis in (
            "tensor_model_parallel",
            "pipeline_model_parallel",
            "context_parallel",
            "data_parallel",
            "expert_model_parallel",
            "expert_tensor_parallel",
            "tensor_and_context_parallel",
            "expert_tensor_and_model_parallel",
        )
        for asked in ("rank", "world_size")
    ),
    "get_tensor_model_parallel_src_rank",
    "get_data_parallel_src_rank",
    *(f"get_pipeline_model_parallel_{which}_rank" for which in ("first", "last", "next", "prev")),
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_initialized",
    "model_parallel_is_initialized",
)
FLAGS = ({}, {"with_context_parallel": True})


def megatron_says(**sizes: int) -> dict[str, object]:
    """What every getter answers on that rank; those that differ with their flags left out."""
    said: dict[str, object] = {}
    with fake_collection(**sizes) as pg, megapg.published(pg):
        for name in GETTERS:
            getter = getattr(parallel_state, name)
            flags = FLAGS if name.startswith("get_data_parallel") else FLAGS[:1]
            answers = {getter(**each) for each in flags}
            if len(answers) == 1:
                said[name] = answers.pop()
    return said


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tp": 2, "rank": 1},
        {"pp": 3, "rank": 1},
        {"cp": 2, "rank": 1},
        {"tp": 2, "pp": 2, "world_size": 8, "rank": 6},
        {"tp": 2, "cp": 2, "rank": 3},
        {"ep": 4, "rank": 2},
        {"tp": 2, "ep": 2, "expt_tp": 1, "rank": 1},
        {"tp": 4, "ep": 2, "expt_tp": 2, "world_size": 8, "rank": 5},
        {"tp": 2, "pp": 2, "ep": 2, "world_size": 16, "rank": 13},
    ],
    ids=str,
)
def test_the_layout_makes_real_getters_answer_what_the_patches_did(sizes: dict[str, int]) -> None:
    said, chance = megatron_says(**sizes), random.Random(0)
    for count in (1, 2, 2, 3, 4, len(said)):
        asked = {name: said[name] for name in chance.sample(sorted(said), count)}
        found = played(Answer(*each) for each in asked.items())
        assert found is not None, asked
        again = megatron_says(**dict(found.sizes))
        assert {name: again.get(name) for name in asked} == asked, found


@pytest.mark.parametrize(
    "answers",
    [
        {"get_tensor_model_parallel_rank": 2, "get_tensor_model_parallel_world_size": 2},
        {"get_tensor_model_parallel_world_size": 0},
        {"get_data_parallel_rank": 3, "get_data_parallel_world_size": 3},
        {"is_pipeline_first_stage": True, "get_pipeline_model_parallel_rank": 1},
        {"is_pipeline_last_stage": False, "get_pipeline_model_parallel_world_size": 1},
        {
            "is_pipeline_last_stage": True,
            "get_pipeline_model_parallel_world_size": 2,
            "get_virtual_pipeline_model_parallel_world_size": 2,
        },
        # Experts spread over tensor parallel ranks, of which there are fewer than of experts'.
        {
            "get_expert_model_parallel_world_size": 8,
            "get_tensor_model_parallel_world_size": 2,
            "get_data_parallel_world_size": 2,
        },
        {"get_tensor_model_parallel_world_size": 100_000},
    ],
    ids=str,
)
def test_no_layout_says_what_is_impossible(answers: dict[str, object]) -> None:
    assert played(Answer(*each) for each in answers.items()) is None


def test_a_virtual_pipeline_is_part_of_the_layout() -> None:
    virtual = Answer("get_virtual_pipeline_model_parallel_world_size", 2)
    found = played([virtual, Answer("get_pipeline_model_parallel_world_size", 2)])
    assert str(found) == "pp=2, vpp=2"
    with fake_collection(**dict(found.sizes if found else ())) as pg, megapg.published(pg):
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2


# --- a project with tests, before and after -------------------------------------------------------

TESTS = '''

def test_with():
    with patch("megatron.core.mpu.get_tensor_model_parallel_world_size", return_value=2), patch(
        "pkg.mod.parallel_state.get_tensor_model_parallel_rank", return_value=1
    ):
        assert pkg.mod.share([10, 11, 12, 13]) == [11, 13]


def test_with_parentheses():
    with (
        patch.object(parallel_state, "is_pipeline_first_stage", lambda *args, **flags: False),
        patch.object(pkg.mod, "NEW", 1, create=True),
        patch.object(parallel_state, "is_pipeline_last_stage") as last,
        patch(
            "pkg.mod.parallel_state.get_pipeline_model_parallel_world_size",
            new=Mock(return_value=4),
        ),
    ):
        last.return_value = True
        assert pkg.mod.stages() == (4, False, True)
        assert pkg.mod.NEW == 1


class TestMethods:
    @patch("pkg.mod.get_context_parallel_rank", return_value=1)
    @patch("pkg.mod.share", return_value="shared")
    @mock.patch("megatron.core.parallel_state.get_context_parallel_world_size", return_value=2)
    def test_decorated(self, size, share, rank, tmp_path):
        """With a docstring
        of two lines."""
        assert pkg.mod.chunk() == (1, 2)
        assert pkg.mod.share([1]) == "shared"
        text = """of more
lines"""
        assert text.splitlines() == ["of more", "lines"]
        assert tmp_path.exists()

    @patch("pkg.mod.parallel_state.model_parallel_is_initialized", new=lambda: True)
    @patch("pkg.mod.parallel_state.get_expert_model_parallel_world_size", lambda: 4)
    def test_without_mocks(self):
        assert pkg.mod.experts(12) == 3


@pytest.mark.parametrize("start", [0, 100])
def test_monkeypatch(monkeypatch, start):
    numbers = [start, start + 1]
    # The second of two.
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(
        "pkg.mod.parallel_state.get_tensor_model_parallel_rank", lambda: 1, raising=False
    )
    assert pkg.mod.share(numbers) == [start + 1]


def test_data(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda *a, **k: 2)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda *a, **k: 3)
    assert pkg.mod.data() == (2, 3)


@pytest.fixture
def four_chunks():
    with patch.object(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 4):
        yield


def test_of_the_fixture(four_chunks):
    assert pkg.mod.chunks() == 4
'''

FAULTS = {
    "share": ("numbers[", "numbers[1 + "),
    "stages": (
        'return megapg.resolve(None).size("pp")',
        'return 1 + megapg.resolve(None).size("pp")',
    ),
    "chunk": (
        'return megapg.resolve(None).rank("cp")',
        'return 1 + megapg.resolve(None).rank("cp")',
    ),
    "experts": ("total // ", "total * "),
    "data": ("return rank", "return rank + 1"),
    "chunks": (
        "virtual_pipeline_size(megapg.resolve(None))",
        "virtual_pipeline_size(megapg.resolve(None)) + 1",
    ),
}


def run_tests(root: Path) -> dict[str, dict[str, str]]:
    """Outcome of each test of each file."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "."]
    path = f"{root}{os.pathsep}{ROOT}"
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "MEGAPG_GLOBALS": "silent"},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        outcome, _, test = line.partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR") and "::" in test:
            file, _, name = test.partition("::")
            outcomes.setdefault(file, {})[name.split(" - ")[0]] = outcome
    assert outcomes, done.stdout + done.stderr
    return outcomes


def migrate_by_hand(root: Path) -> str:
    """The package reads ``megapg.resolve(None)``; of the imports no getter stays."""
    index = Index([root / "pkg"], Config(root, versions=(16,)))
    index.run(lambda done, total: None)
    text = (root / "pkg/mod.py").read_text()
    for each in reversed(index.located):
        if each.site.kind is Kind.CALL:
            answer = each.site.answer.write("megapg.resolve(None)", "megapg.megatron.getters")
            # Asked before there has to be a collection.
            answer = answer.replace("is_initialized(megapg.resolve(None))", "is_initialized(None)")
            text = text[: each.begin] + answer + text[each.end :]
    body = text.partition("def share")[2]
    return f"import megapg\n\n\ndef share{body}"


def test_tests_pass_before_and_after_and_can_still_fail(tmp_path: Path) -> None:
    found = plan(tmp_path / "plan", TESTS)
    assert not found.left
    old = HEAD + TESTS
    new = applied(old, found.edits).replace("import pytest\n", "import megapg\nimport pytest\n", 1)
    before = PACKAGE["pkg/mod.py"]
    moved = migrate_by_hand(tmp_path / "plan")
    wrong = moved
    for right, fault in FAULTS.values():
        assert wrong.count(right) == 1
        wrong = wrong.replace(right, fault)

    tests = {
        "before": (before, old),
        "code_not_moved": (before, new),
        "tests_not_moved": (moved, old),
        "both_moved": (moved, new),
        "moved_and_wrong": (wrong, new),
    }
    root = tmp_path / "run"
    for name, (module, test) in tests.items():
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text("")
        (root / name / "mod.py").write_text(module)
        (root / f"test_{name}.py").write_text(test.replace("pkg.mod", f"{name}.mod"))

    outcomes = run_tests(root)
    names = set(outcomes["test_before.py"])
    assert len(names) == 8
    assert outcomes == {
        "test_before.py": dict.fromkeys(names, "PASSED"),
        "test_code_not_moved.py": dict.fromkeys(names, "PASSED"),
        "test_tests_not_moved.py": dict.fromkeys(names, "FAILED"),
        "test_both_moved.py": dict.fromkeys(names, "PASSED"),
        "test_moved_and_wrong.py": dict.fromkeys(names, "FAILED"),
    }


# --- what is written ------------------------------------------------------------------------------


def test_items_of_a_with_statement(tmp_path: Path) -> None:
    text = """
def test_it(tmp_path):
    with open(tmp_path / "a", "w") as file, patch(
        "pkg.mod.parallel_state.get_tensor_model_parallel_world_size", return_value=2
    ), patch.object(pkg.mod, "chunk") as c, patch("megatron.core.mpu.is_initialized", lambda: True):
        file.write("")  # keep
"""
    assert (
        rewritten(tmp_path, text)
        == """
def test_it(tmp_path):
    with open(tmp_path / "a", "w") as file, megapg.testing.fake_collection(tp=2) as pg, \
megapg.published(pg), patch.object(pkg.mod, "chunk") as c:
        file.write("")  # keep
"""
    )


def test_items_on_lines_of_their_own(tmp_path: Path) -> None:
    text = """
def test_it():
    with (
        patch("pkg.mod.share"),  # the first
        patch("pkg.mod.parallel_state.get_pipeline_model_parallel_rank", return_value=2),
        patch("pkg.mod.parallel_state.is_pipeline_last_stage", return_value=True),
    ):
        assert pkg.mod.stages()
"""
    assert (
        rewritten(tmp_path, text)
        == """
def test_it():
    with (
        patch("pkg.mod.share"),  # the first
        megapg.testing.fake_collection(pp=3, rank=2) as pg,
        megapg.published(pg),
    ):
        assert pkg.mod.stages()
"""
    )


def test_a_patch_of_torch_distributed_comes_after_the_collection(tmp_path: Path) -> None:
    text = """
def test_it():
    with (
        patch("pkg.mod.share"),
        patch("torch.distributed.is_initialized", return_value=True),
        patch("pkg.mod.parallel_state.get_tensor_model_parallel_rank", return_value=1),
        patch("torch.distributed.get_rank", return_value=7),
    ):
        pass
"""
    assert (
        rewritten(tmp_path, text)
        == """
def test_it():
    with (
        patch("pkg.mod.share"),
        megapg.testing.fake_collection(tp=2, rank=1) as pg,
        megapg.published(pg),
        patch("torch.distributed.is_initialized", return_value=True),
        patch("torch.distributed.get_rank", return_value=7),
    ):
        pass
"""
    )


def test_decorators_go_with_their_parameters_and_the_body_moves_in(tmp_path: Path) -> None:
    text = '''
class TestIt:
    @pytest.mark.slow
    @patch("pkg.mod.parallel_state.is_pipeline_first_stage")
    @patch("pkg.mod.share")  # stays
    @patch(
        "pkg.mod.parallel_state.is_pipeline_last_stage",
        return_value=False,
    )
    def test_it(
        self,
        last,
        share,
        first,
        pg,
    ):
        """What it is."""
        import os

        first.return_value = True

        # About the text.
        text = """
    not moved
"""

        assert pkg.mod.stages(
            # nor lost
        ), text
        # The end.
'''
    assert (
        rewritten(tmp_path, text)
        == '''
class TestIt:
    @pytest.mark.slow
    @patch("pkg.mod.share")  # stays
    def test_it(
        self,
        share,
        pg,
    ):
        """What it is."""
        import os

        with megapg.testing.fake_collection(pp=2) as fake_pg, megapg.published(fake_pg):

            # About the text.
            text = """
    not moved
"""

            assert pkg.mod.stages(
                # nor lost
            ), text
        # The end.
'''
    )


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["    ", "\t", "  "])
def test_newlines_and_indentation_are_those_of_the_file(
    tmp_path: Path, newline: str, indent: str
) -> None:
    lines = [
        "",
        "def test_it(monkeypatch):",
        "\tmonkeypatch.setattr(parallel_state, 'get_context_parallel_rank', lambda: 1)",
        "\tfor i in (1, 2):",
        "\t\tassert pkg.mod.chunk() == (1, 2), 'ä'",
        "",
    ]
    wanted = [
        "",
        "def test_it(monkeypatch):",
        "\twith megapg.testing.fake_collection(cp=2, rank=1) as pg, megapg.published(pg):",
        "\t\tfor i in (1, 2):",
        "\t\t\tassert pkg.mod.chunk() == (1, 2), 'ä'",
        "",
    ]
    old, new = (newline.join(each).replace("\t", indent) for each in (lines, wanted))
    assert applied(HEAD + old, plan(tmp_path, old).edits).removeprefix(HEAD) == new


def test_blocks_beside_each_other_are_served_one_by_one(tmp_path: Path) -> None:
    text = """
def test_it():
    with patch("pkg.mod.parallel_state.get_tensor_model_parallel_rank", return_value=0):
        pkg.mod.share([])
    with patch("pkg.mod.parallel_state.get_tensor_model_parallel_rank", return_value=1):
        pkg.mod.share([])
    with patch("pkg.mod.parallel_state.get_tensor_model_parallel_group", return_value=None):
        pkg.mod.share([])
"""
    found = plan(tmp_path, text)
    assert len(found.served) == 2
    new = applied(HEAD + text, found.edits)
    ast.parse(new)
    assert "fake_collection() as pg" in new
    assert "fake_collection(tp=2, rank=1) as pg" in new
    (suggestion,) = found.left.values()
    assert "compare with pg.tp" in suggestion


# --- what is left ---------------------------------------------------------------------------------

_SIZE = "pkg.mod.parallel_state.get_tensor_model_parallel_world_size"
_RANK = "pkg.mod.parallel_state.get_tensor_model_parallel_rank"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f'    with patch("{_SIZE}"):\n        pass', "it answers with a mock"),
        (f'    with patch("{_SIZE}", return_value=2) as m:\n        m.assert_called()', "itself"),
        (f'    with patch("{_SIZE}", side_effect=[1, 2]):\n        pass', "takes side_effect"),
        (f'    with patch("{_SIZE}", return_value=n):\n        pass', "at run time only"),
        (f'    with patch("{_SIZE}", helper):\n        pass', "at run time only"),
        (f'    with patch("{_SIZE}", return_value=True):\n        pass', "no layout it is True"),
        (f'    with patch("{_SIZE}", return_value="2"):\n        pass', "no layout it is '2'"),
        (
            '    with patch("megatron.core.mpu.is_initialized", return_value=False):\n        pass',
            "no layout it is False",
        ),
        (
            '    with patch("pkg.mod.parallel_state.get_tensor_model_parallel_group", '
            "return_value=None):\n        pass",
            "no layout it is None",
        ),
        ('    with patch("pkg.mod.parallel_state"):\n        pass', "module as a whole"),
        (
            f'    with patch("{_SIZE}", return_value=2), patch("{_RANK}", return_value=2):\n'
            "        pass",
            "no rank of any layout",
        ),
        (
            f'    with patch("{_SIZE}", return_value=2):\n'
            f'        with patch("{_RANK}", return_value=1):\n            pass',
            "something else in the same test",
        ),
        (
            f'    with patch("{_SIZE}", return_value=2):\n'
            "        parallel_state.set_tensor_model_parallel_rank(1)",
            "something else in the same test",
        ),
        (
            f'    with patch("{_SIZE}", return_value=2), '
            'patch(f"{n}.parallel_state.get_tensor_model_parallel_rank", return_value=1):\n'
            "        pass",
            "something else in the same test",
        ),
        (f'    patcher = patch("{_SIZE}", return_value=2)\n    patcher.start()', "can't be told"),
        (
            '    with patch("torch.distributed.get_rank", return_value=0):\n'
            f'        with patch("{_SIZE}", return_value=2):\n            pass',
            "torch.distributed is patched around it",
        ),
        (
            '    with open("a"), patch("torch.distributed.get_rank"), open("b"), '
            f'patch("{_SIZE}", return_value=2):\n        pass',
            "torch.distributed is patched before it",
        ),
        (
            '    torch.distributed.init_process_group("gloo")\n'
            f'    with patch("{_SIZE}", return_value=2):\n        pass',
            "sets up or ends process groups",
        ),
        (
            f'    with (\n        patch("{_SIZE}", return_value=2),  # two\n'
            f'        patch("{_RANK}", return_value=1),\n    ):\n        pass',
            "a comment stands between",
        ),
        (
            f'    with patch("{_SIZE}") as m:\n        m.return_value = 2  # two\n        pass',
            "a comment or a statement",
        ),
        (
            '    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)\n'
            "    monkeypatch.undo()",
            "taken back before the test ends",
        ),
        (
            '    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)\n'
            '    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)',
            "torch.distributed is patched around it",
        ),
        (
            "    for n in (1, 2):\n        monkeypatch.setattr(parallel_state, "
            '"get_context_parallel_rank", lambda: 1)',
            "can't be told",
        ),
        (
            f'    with patch("{_SIZE}", return_value=2):\n        patch_it(monkeypatch)',
            "patch_it patches",
        ),
    ],
)
def test_what_can_not_be_the_same_is_left(tmp_path: Path, body: str, why: str) -> None:
    helper = """
def patch_it(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)

"""
    text = f"{helper if 'patch_it' in body else ''}\ndef test_it(monkeypatch, n):\n{body}\n"
    found = reasons(tmp_path, text) - (
        {"how long the patch holds can't be told from here"} if helper in text else set()
    )
    assert any(why in each for each in found), found


AROUND = {
    "a fixture that patches": "@pytest.fixture\ndef two(monkeypatch):\n"
    '    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)\n',
    "an automatic fixture": "@pytest.fixture(autouse=True)\ndef groups():\n"
    "    parallel_state.initialize_model_parallel()\n",
    "set-up": 'def setup_module():\n    torch.distributed.init_process_group("gloo")\n',
    "a fixture of a fixture": "@pytest.fixture\ndef one():\n"
    "    parallel_state.destroy_model_parallel()\n"
    "@pytest.fixture\ndef two(one):\n    pass\n",
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("where", ["test_it", "conftest"])
def test_what_fixtures_and_set_up_do_counts(tmp_path: Path, around: str, where: str) -> None:
    test = f'\ndef test_it(two):\n    with patch("{_SIZE}", return_value=2):\n        pass\n'
    if where == "test_it":
        found = reasons(tmp_path, f"\n{AROUND[around]}{test}")
    else:
        found = reasons(tmp_path, test, conftest=HEAD + AROUND[around])
    assert any("patches or sets the globals" in each for each in found), found


def test_fixtures_that_have_nothing_to_do_with_it_do_not_count(tmp_path: Path) -> None:
    test = f'\ndef test_it(one):\n    with patch("{_SIZE}", return_value=2):\n        pass\n'
    fixture = AROUND["a fixture that patches"]
    found = plan(tmp_path, f"\n{fixture}{test}", conftest=HEAD + fixture.replace("two", "three"))
    assert [site.function for site in found.served] == ["test_it"]


def test_a_mock_that_somebody_looks_at_keeps_its_decorator(tmp_path: Path) -> None:
    text = f"""
@patch("{_SIZE}", return_value=2)
def test_it(size):
    size.assert_called_once()


@patch("{_SIZE}", return_value=2)
class TestIt:
    def test_it(self, size):
        pass
"""
    assert reasons(tmp_path, text) == {
        "the test uses the mock itself",
        "how long the patch holds can't be told from here",
    }


def test_other_packages_patch_is_not_known(tmp_path: Path) -> None:
    test = f'def test_it():\n    with patch("{_SIZE}", return_value=2):\n        pass\n'
    text = f"\nfrom mine import patch\n\n{test}"
    assert reasons(tmp_path, text) == {"how long the patch holds can't be told from here"}


def test_patches_of_what_stays_stand(tmp_path: Path) -> None:
    text = f"""
def test_it():
    with (
        patch("pkg.mod.parallel_state.destroy_model_parallel") as destroy,
        patch("pkg.mod.parallel_state.is_initialized", return_value=True),
        patch("pkg.mod.parallel_state.get_virtual_pipeline_model_parallel_rank", return_value=1),
    ):
        destroy.assert_not_called()


def test_unset():
    with patch("megatron.core.parallel_state._TENSOR_MODEL_PARALLEL_GROUP", None):
        pass


def test_both():
    with patch("megatron.core.parallel_state._TENSOR_MODEL_PARALLEL_GROUP", None):
        with patch("{_RANK}", return_value=1):
            pass
"""
    found = plan(tmp_path, text)
    assert [site.name for site in found.served] == ["is_initialized"]
    assert len(found.stands) == 4
    assert [site.name for site in found.left] == ["get_tensor_model_parallel_rank"]
    left = migrate([tmp_path], Config(tmp_path, versions=(16,))).left
    assert sum("It can stay" in each.suggestion for each in left) == 4


def test_an_unset_group_reads_the_same_through_a_collection() -> None:
    """What makes a patched private variable stand."""
    from unittest.mock import patch

    with (
        fake_collection(tp=2) as pg,
        megapg.published(pg),
        megapg.megatron.globals_policy("silent"),
    ):
        with patch("megatron.core.parallel_state._TENSOR_MODEL_PARALLEL_GROUP", None):
            with pytest.raises(AssertionError):
                parallel_state.get_tensor_model_parallel_group()
            with pytest.raises(megapg.errors.MissingGroupError):
                _ = megapg.resolve(None).tp
        assert megapg.resolve(None).size("tp") == 2


def test_kept_sites_are_none_of_ours(tmp_path: Path) -> None:
    text = f"""
def test_it():
    with patch("{_SIZE}", return_value=2):  # megapg: keep
        with patch("{_RANK}", return_value=1):
            pass
"""
    index_says = plan_with_keeps(tmp_path, text)
    assert not index_says.served
    assert [site.name for site in index_says.left] == ["get_tensor_model_parallel_rank"]


def plan_with_keeps(root: Path, text: str) -> PatchPlan:
    (root / "test_it.py").write_text(HEAD + text)
    index = Index([root], Config(root, versions=(16,)))
    index.run(lambda done, total: None)
    source, analysis = index.look(root / "test_it.py") or pytest.fail("no Python")
    return plan_patches(source, analysis, [each.site for each in index.located])
