"""What megapg costs next to what people use today. Run ``python -m benchmarks --help``."""
