"""Play episodes with a trained agent, to make a video or a data set."""
