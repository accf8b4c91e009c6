"""The new texts of files: written, verified, put on disk, and put back."""
