"""What ``parallel_state`` answers and no field holds, as functions of a collection.

Each takes a collection, explicit or :class:`~megapg.megatron.GlobalGroups`, and gives what the
getter named in its docstring gives, in the installed version of Megatron-core. A group, a rank or a
size that a field does hold needs none of them: ``pg.tp``, ``pg.rank("dp_cp")``, ``pg.ranks("cp")``.

Of :class:`~megapg.megatron.GlobalGroups` each asks that getter itself, by its name in the module at
the time of the call; where this Megatron-core has no such getter, what it would answer is worked
out from the fields. A ``MissingGroupError`` about the globals is an ``AssertionError`` as well, as
from their getters.
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
