"""Access to the installed Megatron-core."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import ItemsView, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megapg.errors import UnsupportedVersionError
from megapg.megatron.tables import OLDEST_CORE, OLDEST_READ

if TYPE_CHECKING:
    from types import CodeType, ModuleType

    from torch import Tensor

    from megapg.collection import ProcessGroup, ProcessGroupCollection

_PACKAGE = "megatron.core"
_PACKAGE_INFO = f"{_PACKAGE}.package_info"
_NAMES = ("parallel_state", "mpu")  # one module; the second is an alias
GLOBALS, _ALIAS = (f"{_PACKAGE}.{name}" for name in _NAMES)
COLLECTIONS = "megatron.core.process_groups_config"

BRIDGE = __name__.rpartition(".")[0]
"""The package of everything between a collection and the globals."""


class MegatronCollection(Protocol):
    """Megatron-core's own ``ProcessGroupCollection``: mutable, tested by class in places."""

    __dict__: dict[str, object]

    @property
    def tp(self) -> ProcessGroup:
        """A field that every such collection has, so that a type checker can tell it from a
        session.
        """
        ...


class ModuleCollections(Protocol):
    """Megatron-core's ``MultiModuleProcessGroupCollection``: a collection for each module."""

    def __init__(
        self,
        module_pgs: dict[str, ProcessGroupCollection],
        language_model_module_name: str | None = None,
    ) -> None: ...

    def items(self) -> ItemsView[str, MegatronCollection | ProcessGroupCollection]:
        """The modules that this rank is in, by name."""
        ...


def installed_version() -> tuple[int, int, int]:
    """Return the version of the installed Megatron-core, for example ``(0, 12, 0)``.

    Raises:
        UnsupportedVersionError: it is not installed, can't be imported, or is older than 0.12.
    """
    try:
        package = importlib.import_module(_PACKAGE_INFO)
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise refusal from error
    if any(not hasattr(package, each) for each in ("MAJOR", "MINOR", "PATCH")):
        raise _says_no_version()
    version = _version_in(package)
    if version[:2] < OLDEST_READ:
        raise _too_old(version)
    return version


def version_text() -> str:
    """Return the version of the installed Megatron-core, such as ``0.20.0rc0``.

    Asks the package: a checkout on ``PYTHONPATH`` has no metadata. Its ``__version__`` may have the
    commit of the repository that the process runs in, which need not be Megatron-core's.
    """
    version = installed_version()
    package = importlib.import_module(_PACKAGE_INFO)
    return _dotted(version) + str(getattr(package, "PRE_RELEASE", ""))


def _version_in(package_info: ModuleType) -> tuple[int, int, int]:
    return int(package_info.MAJOR), int(package_info.MINOR), int(package_info.PATCH)


def _too_old(version: tuple[int, int, int]) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"Megatron-core {_dotted(version)} is older than any whose globals megapg can read; "
        "0.12.0 is the oldest. pip install 'megatron-core>=0.16' brings one that sessions run "
        "on; the codemod (megapg migrate) needs none at all."
    )


def _says_no_version() -> UnsupportedVersionError:
    where = getattr(sys.modules.get(_PACKAGE), "__file__", None) or "sys.modules"
    return UnsupportedVersionError(
        f"The Megatron-core in {where} does not say its version: it has no package_info.py with "
        "one, as a copy of before 0.6 has none, or a stub. megapg reads 0.12.0 and newer. pip "
        "install 'megatron-core>=0.16' brings one; see that nothing else comes before it."
    )


def _refusal(error: Exception) -> UnsupportedVersionError | None:
    """Return the error for a failed import of Megatron-core; None if ``error`` is clear enough.

    An old one may fail in any way with a newer torch, so its version is read separately.
    """
    not_found = isinstance(error, ModuleNotFoundError) and _PACKAGE_INFO.startswith(f"{error.name}")
    if not_found and sys.modules.get(_PACKAGE) is None:
        return UnsupportedVersionError("this needs Megatron-core: pip install 'megapg[megatron]'.")
    version = version_on_disk()
    if version is None:
        return _says_no_version() if not_found else None
    if version[:2] < OLDEST_READ:
        return _too_old(version)
    if isinstance(error, ImportError):
        return UnsupportedVersionError(
            f"Megatron-core {_dotted(version)} is here and can't be imported: {error}. "
            "Install what it lacks."
        )
    return None


def version_on_disk() -> tuple[int, int, int] | None:
    """Return the version of the Megatron-core that an import would find; None if unreadable."""
    with contextlib.suppress(Exception):
        found = importlib.util.find_spec(_PACKAGE)
        for folder in (found and found.submodule_search_locations) or ():
            path = Path(folder, "package_info.py")
            spec = importlib.util.spec_from_file_location("_package_info", path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return _version_in(module)
    return None


def core_version() -> tuple[int, int, int]:
    """Return the version of the installed Megatron-core, for example ``(0, 16, 1)``.

    Raises:
        UnsupportedVersionError: it is not installed, or too old for explicit groups.
    """
    version = installed_version()
    if version[:2] < OLDEST_CORE:
        raise UnsupportedVersionError(
            f"Megatron-core {_dotted(version)} can't run on injected groups (its layers read the "
            "globals unconditionally); 0.16.0 is the oldest that can. pip install "
            "'megatron-core>=0.16'; resolve() and the helpers beside it work with this one too."
        )
    return version


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def parallel_state_module() -> ModuleType:
    """Return the module ``megatron.core.parallel_state``, of any version.

    Raises:
        UnsupportedVersionError: Megatron-core is not installed.
    """
    installed_version()
    return importlib.import_module(GLOBALS)


def globals_of_core() -> Mapping[str, object]:
    """Return the variables of ``parallel_state``; empty if it is not imported.

    In that case nothing is initialised, and an import takes seconds.
    """
    module = sys.modules.get(GLOBALS)
    return {} if module is None else vars(module)


def modules_at_hand() -> Sequence[ModuleType]:
    """Return the modules that an import of ``parallel_state`` may give now, a test's stub included.

    Empty if it is not imported. A stub may be in ``sys.modules`` or an attribute of the package,
    under either name. It comes before the real module, which has the names that the stub lacks.
    """
    modules = sys.modules
    found = modules.get(GLOBALS)
    package = modules.get(_PACKAGE)
    if (
        package is not None
        and getattr(package, "parallel_state", found) is found
        and getattr(package, "mpu", found) is found
        and _ALIAS not in modules
    ):
        return () if found is None else (found,)
    candidates = [modules.get(GLOBALS), modules.get(_ALIAS)]
    candidates += [getattr(package, name, None) for name in _NAMES]
    return sorted(filter(None, candidates), key=_is_real)


def _is_real(module: ModuleType) -> bool:
    """True if the import system has loaded it."""
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.name == GLOBALS


def collection_class() -> type[MegatronCollection]:
    """Return Megatron-core's own collection class."""
    core_version()
    module = importlib.import_module(COLLECTIONS)
    found: type[MegatronCollection] = module.ProcessGroupCollection
    return found


def module_collections_class() -> type[ModuleCollections]:
    """Return Megatron-core's own class for the collections of several modules.

    Raises:
        UnsupportedVersionError: the installed one has none.
    """
    version = core_version()
    module = importlib.import_module(COLLECTIONS)
    if not hasattr(module, "MultiModuleProcessGroupCollection"):
        raise UnsupportedVersionError(
            f"Megatron-core {_dotted(version)} has no pipelines of several modules; 0.17.0 is the "
            "oldest that has. pip install 'megatron-core>=0.17'."
        )
    found: type[ModuleCollections] = module.MultiModuleProcessGroupCollection
    return found


def fsdp_module() -> ModuleType:
    """Return Megatron-core's adapter to Megatron-FSDP, from which all of that can be reached.

    Raises:
        UnsupportedVersionError: Megatron-FSDP can't be imported here.
    """
    version = core_version()
    module = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    if not module.HAVE_MEGATRON_FSDP:
        reason = module.IMPORT_MEGATRON_FSDP_ERROR
        raise UnsupportedVersionError(
            f"Megatron-FSDP of Megatron-core {_dotted(version)} can't be imported: {reason}."
        ) from reason
    return module


def collection_fields() -> Mapping[str, object]:
    """Return the field names that the installed core's collection declares."""
    declared: Mapping[str, object] = vars(collection_class())["__dataclass_fields__"]
    return declared


def losses_of_experts() -> dict[str, object]:
    """Return Megatron-core's own record of the losses of experts, by name."""
    package = "megatron.core.transformer.moe"
    found: dict[str, object]
    try:  # newer cores
        found = importlib.import_module(f"{package}.moe_logging").get_moe_metrics_tracker().metrics
    except ModuleNotFoundError:
        found = importlib.import_module(f"{package}.moe_utils").get_moe_layer_wise_logging_tracker()
    return found


def gradients_in_norm(optimizer: object) -> list[Tensor]:
    """Return the gradients of this rank that an optimizer counts in its norm, after a step."""
    found: list[Tensor] = []
    for each in getattr(optimizer, "chained_optimizers", (optimizer,)):
        if not getattr(each, "is_stub_optimizer", False):
            names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")  # newer, older
            found += next(getattr(each, name) for name in names if hasattr(each, name))()
    return found


def parameters_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of a function's parameters without ``*args``; faster than ``inspect``."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
