"""Train an agent in one call: options, presets, configuration files, and the files from which a run is built again."""
