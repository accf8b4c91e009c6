"""Where a function gets its collection from: what it was passed, its model, or the globals."""
