"""Floor 0: what is asked and what is decided, as frozen values. Plain Python; imports nothing above it."""
