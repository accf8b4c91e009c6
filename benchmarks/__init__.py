"""The cost of megapg compared with existing tools. Run ``python -m benchmarks --help``."""
