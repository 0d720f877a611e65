"""Collection: workers that act in environments."""
