"""The codemod that moves code off Megatron's globals. It needs LibCST, and runs without torch.

It never imports the code that it reads. If no collection is passed, rewritten code does what it did
before. :mod:`~megapg.migrate.engine` finds and rewrites uses: begin to read there.
:mod:`~megapg.migrate.write` writes the files, and :mod:`~megapg.migrate.report` reports.
``ARCHITECTURE.md`` has a picture, and the steps to add a replacement or a carrier.
"""
