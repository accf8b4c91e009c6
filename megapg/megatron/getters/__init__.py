"""Functions of a collection for values of ``parallel_state`` that no field holds.

Each takes a collection, explicit or :class:`~megapg.megatron.GlobalGroups`. It returns the value of
the getter named in its docstring, in the installed version of Megatron-core. These functions are
not needed for a group, a rank or a size of a field: ``pg.tp``, ``pg.rank("dp_cp")``,
``pg.ranks("cp")``.

For :class:`~megapg.megatron.GlobalGroups` each function calls that getter itself, by its name in
the module at the time of the call. If this Megatron-core has no such getter, the value is computed
from the fields. A ``MissingGroupError`` about the globals is also an ``AssertionError``, like those
of their getters.

``megapg migrate --runtime vendored`` copies the functions as text into projects without megapg. The
bodies must run on Python 3.8, and may call only ``asking.py`` of megapg. That module has a second
form in ``megapg/megatron/vendored``. Only :func:`memory_buffer` has two bodies: a session holds its
buffer, and a collection of Megatron-core has no place for one.
"""

# ruff: noqa: F403

from megapg.megatron.getters import before_014, groups, initialised, memory, stages
from megapg.megatron.getters.before_014 import *
from megapg.megatron.getters.groups import *
from megapg.megatron.getters.initialised import *
from megapg.megatron.getters.memory import *
from megapg.megatron.getters.stages import *

__all__: list[str] = []
__all__ += before_014.__all__
__all__ += groups.__all__
__all__ += initialised.__all__
__all__ += memory.__all__
__all__ += stages.__all__
