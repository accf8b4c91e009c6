"""Reports of ``megapg check`` and ``megapg migrate``: for people, as JSON, as SARIF, as a diff.

Each form is made from one :class:`~megapg.migrate.report.outcome.Report`.
"""
