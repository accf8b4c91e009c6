"""Checkpoints on Megatron's own disk format, with explicit process groups.

Everyday use is :func:`megapg.save_checkpoint` and :func:`megapg.load_checkpoint`. The modules, in
the order in which data flows:

* ``state``, ``optimizer``, ``optimizer_pieces``, ``step_count``, ``param_groups``, ``scheduler``,
  ``rng_keys``, ``rng_entries``: the contents of a checkpoint;
* ``team``: the ranks of a save or load;
* ``save`` with ``save_state`` and ``save_write``, ``background``: a save, also in the background;
* ``planning``, ``writer``, ``commit``, ``mounts``, ``manifest``: who writes what, the files, their
  final names, their checksums;
* ``load`` with ``load_steps``, ``choice``, ``can_reshard``, ``restore``: a load;
* ``directory``, ``contents``, ``entries``, ``files``, ``verify``, with ``safe_metadata``,
  ``safe_torch``, ``archive`` and ``pickles`` below them: safe reading of a checkpoint on disk.
"""
