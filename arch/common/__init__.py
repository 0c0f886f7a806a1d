"""What every architecture's kernels share: facts and functions, no skeletons."""
