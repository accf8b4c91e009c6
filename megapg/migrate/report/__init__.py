"""What ``megapg check`` and ``megapg migrate`` say: to people, to programs, and to ``git apply``.

Both commands make one :class:`~megapg.migrate.report.outcome.Report`, and every form is made of
that.
"""
