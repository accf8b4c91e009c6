"""The one door to the installed Megatron-core."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from megapg.errors import UnsupportedVersionError
from megapg.megatron.tables import OLDEST_CORE

if TYPE_CHECKING:
    from types import ModuleType


class MegatronCollection(Protocol):
    """Megatron-core's own ``ProcessGroupCollection``: mutable, tested by class in places."""

    __dict__: dict[str, object]


def core_version() -> tuple[int, int, int]:
    """Version of the installed Megatron-core, for example ``(0, 16, 1)``.

    Raises:
        UnsupportedVersionError: it is not installed, or too old for explicit groups.
    """
    try:
        package = importlib.import_module("megatron.core.package_info")
    except ModuleNotFoundError as error:
        raise UnsupportedVersionError(
            "this needs Megatron-core: pip install 'megapg[megatron]'."
        ) from error
    version = (int(package.MAJOR), int(package.MINOR), int(package.PATCH))
    if version[:2] < OLDEST_CORE:
        raise UnsupportedVersionError(
            f"Megatron-core {'.'.join(map(str, version))} can't run on injected groups (its layers "
            "read the globals unconditionally); 0.16.0 is the oldest that can."
        )
    return version


def parallel_state_module() -> ModuleType:
    """``megatron.core.parallel_state`` itself: the globals that the bridge is a bridge to."""
    core_version()
    return importlib.import_module("megatron.core.parallel_state")


def collection_class() -> type[MegatronCollection]:
    """Megatron-core's own collection class."""
    core_version()
    module = importlib.import_module("megatron.core.process_groups_config")
    found: type[MegatronCollection] = module.ProcessGroupCollection
    return found


def collection_fields() -> Mapping[str, object]:
    """Field names that the installed core's collection declares."""
    declared: Mapping[str, object] = vars(collection_class())["__dataclass_fields__"]
    return declared
