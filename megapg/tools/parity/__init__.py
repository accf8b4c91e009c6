"""The parts of ``parity``, which compares a model in other layouts with one rank.

``entry`` starts the ranks. Each rank trains in ``trial`` and writes its results to a file. This
process compares the files with those of one rank (``differences``, ``judge``), looks for a cause
(``diagnose``) and reports (``parity_report``).
"""
