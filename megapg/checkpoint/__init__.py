"""Checkpoints on Megatron's own disk format, with explicit process groups.

Everyday use is :func:`megapg.save_checkpoint` and :func:`megapg.load_checkpoint`. The modules, in
the order in which data flows:

* ``state``, ``optimizer``, ``rng_layouts``, ``rng_records``: what is in a checkpoint;
* ``planning``: which entries of it this rank writes or reads;
* ``writer``, ``commit``, ``manifest``: files, their final names, their checksums;
* ``save`` and ``background``, ``load``: the two functions, and saves in the background;
* ``directory``, ``contents``, ``verify``, and ``safe_metadata`` and ``safe_torch`` below them:
  looking at what is there, safely.
"""
