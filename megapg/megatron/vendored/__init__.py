"""What ``megapg migrate --runtime vendored`` writes into a project that wants no dependency.

The codemod copies definitions from here as text. They know of nothing else in megapg, and run where
Python 3.8 does.
"""
