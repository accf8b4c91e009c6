"""One hook reports the reads of Megatron's globals. Listeners record, forbid or guard them.

The guard ends wrong answers. A process with two layouts has two answers to "which group?", and
``parallel_state`` has one. While two layouts are alive, :mod:`guard` checks every read of the
globals against the groups that the reading code was given:

* :mod:`alive` lists the layouts of this process, and the fields on which they differ;
* :mod:`changes` reports when code initialises or destroys the globals;
* :mod:`stack` finds the nearest frame that carries a group for a field;
* :mod:`contradiction` compares one read with that frame, and writes the error;
* :mod:`guard` starts with the second layout, and stops when one layout is left.
"""
