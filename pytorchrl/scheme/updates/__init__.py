"""Updates: the root of the tree, which applies gradients and keeps the account."""
