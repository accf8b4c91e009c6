"""The codemod that moves code off Megatron's globals; it runs where torch is not installed.

It never imports or runs the code that it looks at. Data flows one way:

- :mod:`~megapg.migrate.python` finds files, parses them, and says what names are bound to;
- :mod:`~megapg.migrate.find` says what names stand for, and lists the uses of the globals, each
  with the answer of :mod:`megapg.upstream.mapping` and the carriers in scope;
- :mod:`~megapg.migrate.decide` decides what serves each;
- :mod:`~megapg.migrate.edit` makes edits of that, verifies them, and writes files;
- :mod:`~megapg.migrate.report` says what came of it.

:mod:`~megapg.migrate.engine` is all of it but the writing.
"""
