"""The programs of megapg, on top of the framework: what ``megapg COMMAND`` runs.

``plan`` draws and measures a layout, ``parity`` compares layouts with one rank, ``doctor`` asks a
machine, ``demo`` trains a small GPT, and ``cli`` has the commands.
"""
