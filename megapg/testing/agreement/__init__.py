"""Does a model compute in other layouts what one rank computes? The parts of ``parity``.

``run`` starts the ranks. Each rank trains in ``trial`` and writes what it holds to a file. Then
this process compares the files with those of one rank (``compare``, ``judge``), looks for a cause
(``diagnose``) and reports (``report``).
"""
