"""Plans of one step: which trajectories share a microbatch, on which replica, in which slot."""
