"""The delta rule on a GPU: fla's kernels inside chunks, our own Triton kernels for the state."""
