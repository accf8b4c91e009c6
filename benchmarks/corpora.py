"""Published code that uses Megatron-core: wheels from PyPI, unpacked, never installed or imported.

The wheels are stored in ``.corpora``, which git ignores, and are downloaded only once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.config import Config, load_config, parse_versions

CACHE = Path(__file__).parents[1] / ".corpora"

# A wheel is only read, so any of these platforms will do.
_ANY_LINUX = (
    "manylinux_2_34_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux2014_x86_64",
)


@dataclass(frozen=True)
class Wheel:
    """One release on PyPI.

    Attributes:
        project: its name on PyPI.
        version: pinned exactly.
        python: version of Python; matters only for compiled wheels and old releases.
    """

    project: str
    version: str
    python: str = "3.12"

    @property
    def name(self) -> str:
        return f"{self.project} {self.version}"

    def tree(self) -> Path:
        """Return the folder of the unpacked wheel. Do not write there.

        Raises:
            RuntimeError: the download failed.
        """
        stem = f"{self.project.replace('-', '_')}-{self.version}"
        tree = CACHE / "trees" / stem
        if not tree.exists():
            beside = tree.with_name(f"{stem}.part")  # an incomplete tree must not look complete
            shutil.rmtree(beside, ignore_errors=True)
            with zipfile.ZipFile(self._file(stem)) as archive:
                archive.extractall(beside)
            beside.rename(tree)
        return tree

    def _file(self, stem: str) -> Path:
        wheels = CACHE / "wheels"
        if not any(wheels.glob(f"{stem}-*.whl")):
            download(f"{self.project}=={self.version}", wheels, self.python)
        return next(wheels.glob(f"{stem}-*.whl"))


@dataclass(frozen=True)
class Checkout:
    """A tree on this machine, such as a clone of a public repository."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    project = name

    def tree(self) -> Path:
        """Return its folder. Do not write there."""
        return self.path


def download(requirement: str, into: Path, python: str) -> None:
    """Download a wheel with pip, without its dependencies."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--python-version", python),
            *(f"--platform={platform}" for platform in _ANY_LINUX),
            *("--dest", str(into), requirement),
        ],
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"pip could not download {requirement}; its errors are above")


@dataclass(frozen=True)
class Corpus:
    """A tree to migrate, and the version of Megatron-core that it is written for.

    If ``core`` is empty, the tree's own configuration names the version.
    """

    wheel: Wheel | Checkout
    core: str = ""

    @property
    def name(self) -> str:
        return self.wheel.name

    def config(self, root: Path) -> Config:
        """Return the settings for a copy of the tree, from the tree alone."""
        if not self.core:
            return load_config(root)
        return Config(root, versions=parse_versions(self.core), versions_from="--from-core")


CORPORA = (
    # No pin. It tests for 0.16.2 or newer, patches 0.12 and 0.13, and has fallbacks for missing
    # parts of 0.18. 0.16 is the middle of its versions.
    Corpus(Wheel("verl", "0.9.1"), "0.16"),
    # No pin. It passes vp_stage and model_comm_pgs, which came in 0.13, and calls is_inside_encoder
    # and the split rank, which 0.14 removed.
    Corpus(Wheel("nemo-toolkit", "2.4.0"), "0.13"),
    # megatron-core>=0.16, with branches for 0.17.
    Corpus(Wheel("ms-swift", "4.6.0"), "0.16"),
    # megatron-core>=0.12. It looks for vp_stage (0.13) in signatures, so it runs on current cores.
    # It is read for the version of the projects that use it.
    Corpus(Wheel("mbridge", "0.15.1"), "0.16"),
    # megatron-core<0.20,>=0.16: the oldest of these versions.
    Corpus(Wheel("mcore_bridge", "1.6.5"), "0.16"),
    # No pin. It calls moe_utils.get_default_pg_collection, which came in 0.15.
    Corpus(Wheel("nvidia-modelopt", "0.47.0"), "0.16"),
    # No pin. It imports ProcessGroupCollection (0.15) everywhere, and nothing of 0.19.
    Corpus(Wheel("megatron-bridge", "0.6.2"), "0.16"),
    # Its own version.
    Corpus(Wheel("megatron-core", "0.12.0", python="3.10"), "0.12"),
)


def named(project: str) -> Corpus:
    """Return the corpus of a project."""
    return next(corpus for corpus in CORPORA if corpus.wheel.project == project)
