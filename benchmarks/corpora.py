"""Published code that uses Megatron-core: wheels from PyPI, unpacked, never installed or imported.

They are kept in ``.corpora``, which git ignores; what is there is not fetched again.
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

# A wheel is only read here, so it need not fit this machine: any of these will do.
_ANY_LINUX = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True)
class Wheel:
    """One release on PyPI.

    Attributes:
        project: its name there.
        version: pinned exactly.
        python: for which Python; matters for wheels that are compiled, and for none that is newer.
    """

    project: str
    version: str
    python: str = "3.12"

    @property
    def name(self) -> str:
        return f"{self.project} {self.version}"

    def tree(self) -> Path:
        """Where it lies unpacked. Nothing may be written there.

        Raises:
            RuntimeError: it can't be downloaded.
        """
        stem = f"{self.project.replace('-', '_')}-{self.version}"
        tree = CACHE / "trees" / stem
        if not tree.exists():
            beside = tree.with_name(f"{stem}.part")  # half of a tree must not look like a tree
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
    """A tree that lies on this machine, such as a clone of a public repository."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    project = name

    def tree(self) -> Path:
        """Where it lies. Nothing may be written there."""
        return self.path


def download(requirement: str, into: Path, python: str) -> None:
    """Fetch a wheel with pip, without its dependencies."""
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
    """A tree that is migrated, and the Megatron-core that it is read as being written for: the one
    that the tree itself says, if ``core`` is empty.
    """

    wheel: Wheel | Checkout
    core: str = ""

    @property
    def name(self) -> str:
        return self.wheel.name

    def config(self, root: Path) -> Config:
        """The settings for a copy of it: its own, whatever lies around the copy."""
        if not self.core:
            return load_config(root)
        return Config(root, versions=parse_versions(self.core), versions_from="--from-core")


CORPORA = (
    # No pin. It asks whether the core is 0.16.2 or newer, patches 0.12 and 0.13, and falls back
    # where something of 0.18 is missing: 0.16 is the middle of what it runs on.
    Corpus(Wheel("verl", "0.9.1"), "0.16"),
    # No pin. It passes vp_stage and model_comm_pgs, which are 0.13's, and calls is_inside_encoder
    # and the split rank, which were gone in 0.14.
    Corpus(Wheel("nemo-toolkit", "2.4.0"), "0.13"),
    # megatron-core>=0.16, with branches for 0.17.
    Corpus(Wheel("ms-swift", "4.6.0"), "0.16"),
    # megatron-core>=0.12, and it looks at signatures for vp_stage, which came in 0.13: it runs on
    # what is current, and is read as those are that use it.
    Corpus(Wheel("mbridge", "0.15.1"), "0.16"),
    # megatron-core<0.20,>=0.16: the oldest that it admits.
    Corpus(Wheel("mcore_bridge", "1.6.5"), "0.16"),
    # No pin. It calls moe_utils.get_default_pg_collection, which came in 0.15.
    Corpus(Wheel("nvidia-modelopt", "0.47.0"), "0.16"),
    # No pin. It imports ProcessGroupCollection, which is 0.15's, everywhere, and nothing of 0.19.
    Corpus(Wheel("megatron-bridge", "0.6.2"), "0.16"),
    # Itself.
    Corpus(Wheel("megatron-core", "0.12.0", python="3.10"), "0.12"),
)


def named(project: str) -> Corpus:
    """The corpus of a project."""
    return next(corpus for corpus in CORPORA if corpus.wheel.project == project)
