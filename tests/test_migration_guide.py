"""What the migration guide shows, run as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parent.parent / "migration_guide" / "by-hand.md").read_text()
# name -> source; the name is in the first line of each block.
FILES = {
    re.match(r"# (\w+\.py)", block)[1]: block
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.S)
}
ON_TWO_RANKS = [name for name, source in FILES.items() if "on two ranks" in source.split("\n")[0]]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def directory(tmp_path):
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    return tmp_path


def test_all_examples_are_here():
    assert [*FILES] == ["where_you_are.py", "see.py", "publish.py", "moved.py", *ON_TWO_RANKS[2:]]
    assert ON_TWO_RANKS[2:] == ["resolve.py", "at_hand.py", "pass.py", "shadow.py", "forbid.py"]


def test_what_check_says_of_the_first_example(directory):
    (command, ratchet) = re.findall(r"^\$ megapg (check .+)$", GUIDE, re.M)

    def check(arguments):
        return subprocess.run(
            [sys.executable, "-m", "megapg", *arguments.split()],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    said = check(command)
    assert said.returncode == 1
    assert 'mpu.get_data_parallel_rank() -> pg.rank("dp")' in said.stdout
    assert "mpu.get_data_parallel_group(with_context_parallel=True) -> pg.dp_cp" in said.stdout
    assert check(ratchet).returncode == 0
    again = ratchet.replace(" --update-baseline", "")
    assert check(again).returncode == 0
    with (directory / "where_you_are.py").open("a") as file:
        file.write("\n\nprint(mpu.get_tensor_model_parallel_group())\n")
    assert check(again).returncode == 1


@pytest.mark.contract
def test_every_stage_runs(directory):
    # One launch for all of them: what takes long is to import Megatron-core.
    said = {}
    everything = directory / "everything.py"
    everything.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(directory)!r})\n"
        f"for name in {ON_TWO_RANKS!r}:\n"
        "    print(f'<<{name}>>', flush=True)\n"
        f"    runpy.run_path({str(directory)!r} + '/' + name, run_name='__main__')\n"
        "    sys.stdout.flush()\n"
    )
    done = subprocess.run(
        [*TORCHRUN, "--tee", "0", "--log-dir", str(directory / "logs"), "-r", "1", str(everything)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (directory / "logs").glob("*/attempt_0/0/stdout.log")
    for part in log.read_text().split("<<")[1:]:
        name, _, text = part.partition(">>")
        said[name] = text
    assert [*said] == ON_TWO_RANKS

    reads = json.loads((directory / "reads.json").read_text())
    places = {(Path(read["file"]).name, read["function"], read["replacement"]) for read in reads}
    assert ("where_you_are.py", "my_share", 'pg.rank("dp")') in places
    assert ("where_you_are.py", "speaks", 'pg.rank("tp")') in places
    assert 'pg.rank("dp")' in said["see.py"]
    assert "dp_cp" in said["shadow.py"]
    assert re.search(r"where_you_are\.py:\d+: my_share reads get_data_parallel_", said["forbid.py"])
