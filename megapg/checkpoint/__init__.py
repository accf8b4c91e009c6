"""Checkpoints on Megatron's own disk format, with explicit process groups.

Everyday use is :func:`megapg.save_checkpoint` and :func:`megapg.load_checkpoint`. The modules, in
the order in which data flows:

* ``state``, ``optimizer``, ``rng_records``: what is in a checkpoint;
* ``planning``: which entries of it this rank writes or reads;
* ``writer``, ``publish``, ``manifest``: files, their final names, their checksums;
* ``save`` and ``saves``, ``load``: the two functions, and saves in the background;
* ``names``, ``safe``, ``contents``, ``commands``: looking at what is there, safely.
"""
