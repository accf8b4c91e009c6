"""What serves each use, and which functions get a parameter for it."""
