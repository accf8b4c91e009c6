"""Does a model compute in other layouts what one rank computes? The parts of ``parity``.

``entry`` starts the ranks. Each rank trains in ``trial`` and writes its results to a file. This
process compares the files with those of one rank (``differences``, ``judge``), looks for a cause
(``diagnose``) and reports (``parity_report``).
"""
