"""The codemod that moves code off Megatron's globals. It runs without torch.

It never imports or runs the code that it reads. :mod:`~megapg.migrate.engine` finds and rewrites
uses, :mod:`~megapg.migrate.format` and :mod:`~megapg.migrate.write` finish the files, and
:mod:`~megapg.migrate.report` reports.
"""
