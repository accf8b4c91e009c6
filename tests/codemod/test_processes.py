"""Files are scanned in several processes, with the same result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trees import write

from megapg.migrate.config import Config
from megapg.migrate.engine import check, migrate

FILES = {
    "p/__init__.py": "",
    "p/a.py": "from megatron.core import mpu\n\n\ndef rank():\n    return "
    "mpu.get_tensor_model_parallel_rank()\n",
    "p/b.py": "from p.a import rank\n\n\ndef twice():\n    return 2 * rank()\n",
    "p/c.py": "from p.b import twice\n\nx = twice()\n",
    "p/d.py": "from megatron.core import mpu\n\nmpu.destroy_model_parallel()\n",
    "p/e.py": "import mpu\n\nthis is no Python\n",
    "p/test_f.py": "from megatron.core.mpu import get_data_parallel_group\n\n"
    "assert get_data_parallel_group()\n",
}


def test_the_result_is_that_of_one_process(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    config = Config(tmp_path)
    steps: list[str] = []

    def note(what: str, done: int, of: int) -> None:
        steps.append(what)

    one, two = (migrate([tmp_path], config, processes=n, on_progress=note) for n in (1, 2))
    assert [each.file for each in one.files] == ["p/a.py"]
    assert [each.file for each in one.problems] == ["p/e.py"]
    assert replace(two, found=replace(two.found, files=())) == replace(
        one, found=replace(one.found, files=())
    )
    assert list(two.found.files) == list(one.found.files)
    assert {"finding", "following calls", "rewriting"} <= {*steps}
    assert check([tmp_path], config, processes=2).left == one.left
