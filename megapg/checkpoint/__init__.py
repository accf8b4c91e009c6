"""Checkpoints on Megatron's own disk format, with explicit process groups.

Everyday use is :func:`megapg.save_checkpoint` and :func:`megapg.load_checkpoint`. The modules, in
the order in which data flows:

* ``state``, ``optimizer``, ``restore``, ``step_count``, ``param_groups``, ``rng_keys``,
  ``rng_entries``: the contents of a checkpoint;
* ``planning``: the entries that this rank writes or reads;
* ``writer``, ``commit``, ``manifest``: files, their final names, their checksums;
* ``save`` and ``background``, ``load``: the two functions, and saves in the background;
* ``directory``, ``contents``, ``verify``, with ``safe_metadata`` and ``safe_torch`` below them:
  safe inspection of a checkpoint on disk.
"""
