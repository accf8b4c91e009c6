"""The codemod that moves code off Megatron's globals; it runs where torch is not installed.

It never imports or runs the code that it looks at. Data flows one way: :mod:`~megapg.migrate.tree`
finds files, :mod:`~megapg.migrate.source` parses one, :mod:`~megapg.migrate.scopes` says what its
names are bound to, :mod:`~megapg.migrate.resolve` what they stand for, and
:mod:`~megapg.migrate.index` makes :mod:`~megapg.migrate.sites` of it, each with the answer of
:mod:`~megapg.migrate.mapping` and the :mod:`~megapg.migrate.carriers` in scope.
:mod:`~megapg.migrate.plan` decides what serves each, :mod:`~megapg.migrate.rewrite` makes edits of
that, :mod:`~megapg.migrate.verify` undoes them, :mod:`~megapg.migrate.write` writes files;
:mod:`~megapg.migrate.engine` is all of it but the writing.
"""
