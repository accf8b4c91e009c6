"""The guard: Megatron's globals never answer for the wrong layout.

A process with two layouts has two answers to "which group?", and ``parallel_state`` has one. While
two layouts are alive, the guard checks every read of the globals against the groups that the
reading code was given, and raises :class:`~megapg.errors.WrongGroupError` if they differ.

* :mod:`alive` lists the layouts of this process, and the fields on which they differ;
* :mod:`stack` finds the nearest frame that carries a group for a field;
* :mod:`judge` compares one read with that frame, and writes the error;
* :mod:`changes` reports when code initialises or destroys the globals;
* :mod:`switch` starts the guard with the second layout and stops it with the last but one.
"""
