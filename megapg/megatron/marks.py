"""The names under which megapg keeps the state of the globals, in ``parallel_state`` itself.

This state lives as long as the globals do, serves every thread, and starts anew with a reload of
the module. No module of megapg has a variable for it.
"""

ADOPTED = "__megapg_adopted__"
"""The owner of the groups that ``adopt()`` took over."""

DROP_IN = "__megapg_drop_in__"
"""The session that the replacement of ``initialize_model_parallel`` opened."""

PUBLISHED = "__megapg_published__"
"""The open blocks of ``published()``."""

CHANGES = "__megapg_changes__"
"""The wrappers that report when the globals are initialised or destroyed."""

READS = "__megapg_read__"
"""The hook that reports reads of the globals."""

GUARD = "__megapg_guard__"
"""The guard, while it watches."""

ALLOWED = "__megapg_allowed__"
"""The open blocks of ``allow_global_reads()``."""
